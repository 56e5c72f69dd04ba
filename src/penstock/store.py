"""Plain data to JSON and back: parsed, never executed, and refused with the place that is wrong."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, TypeVar

from penstock.errors import FileError

T = TypeVar("T")


def to_json(value: object) -> str:
    """A frozen dataclass of plain data as indented JSON."""
    from pydantic import TypeAdapter  # loaded here: most of what plans never touches a file

    return TypeAdapter(type(value)).dump_json(value, indent=1).decode()


def write_json(path: str | Path, value: object) -> None:
    """Write `value` to `path` whole or not at all."""
    target = Path(path)
    partial = target.with_name(target.name + ".partial")
    try:
        partial.write_text(to_json(value) + "\n", encoding="utf-8")
        partial.replace(target)
    except OSError as error:
        raise FileError(f"cannot write {target}: {error.strerror or error}") from error


def read_json(path: str | Path, kind: type[T], schema: int) -> T:
    """Read a value of type `kind` whose `schema` field is `schema`.

    Raises:
        FileError: no such file, no JSON, another schema version, or fields that are missing, unknown or of the wrong type.
    """
    from pydantic import TypeAdapter, ValidationError

    what = kind.__name__.lower()
    try:
        text = Path(path).read_text(encoding="utf-8")
        found: Any = json.loads(text, parse_float=_finite, parse_constant=_finite)
    except (OSError, UnicodeDecodeError) as error:
        raise FileError(
            f"cannot read the {what} {path}: {getattr(error, 'strerror', None) or error}"
        ) from error
    except (ValueError, RecursionError) as error:
        raise FileError(f"{path} is not JSON: {error}") from error
    version = found.get("schema") if isinstance(found, dict) else None
    if version != schema:
        raise FileError(
            f"{path} is no {what} of schema {schema}: its schema is {version!r}. Make it anew with this version"
        )
    try:
        return TypeAdapter(kind).validate_json(text, strict=True, extra="forbid")
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the top"
        raise FileError(f"{path} is no {what}: at {where}: {first['msg']}") from error


def _finite(text: str) -> float:
    """A number of JSON's own grammar: Python would also take NaN and Infinity, and 1e999 for one."""
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is not a finite number")
    return number
