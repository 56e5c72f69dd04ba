"""Plain data to JSON and back: parsed, never executed, and refused with the place that is wrong."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from penstock.errors import FileError

T = TypeVar("T")


def to_json(value: object) -> str:
    """A frozen dataclass of plain data as indented JSON."""
    from pydantic import TypeAdapter  # loaded here: most of what plans never touches a file

    return TypeAdapter(type(value)).dump_json(value, indent=1).decode()


def write_json(path: str | Path, value: object, *, durable: bool = False) -> None:
    """Write `value` to `path` whole or not at all.

    Args:
        path: the file.
        value: a frozen dataclass of plain data.
        durable: wait until the disk has it, so that it outlasts a loss of power.

    Raises:
        FileError: the file cannot be written.
    """
    target = Path(path)
    partial = target.with_name(target.name + ".partial")
    try:
        partial.write_text(to_json(value) + "\n", encoding="utf-8")
        if durable:
            sync_file(partial)
        partial.replace(target)
        if durable:
            sync_folder(target.parent)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise FileError(f"cannot write {target}: {reason}") from error


def sync_file(path: Path) -> None:
    """Wait until the disk has the content of a file."""
    descriptor = os.open(path, os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_folder(path: Path) -> None:
    """Wait until the disk has the names in a folder, where the file system can say so."""
    with suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def read_json(path: str | Path, kind: type[T], schema: int | Collection[int]) -> T:
    """Read a value of type `kind` whose `schema` field is `schema`, or one of several.

    Raises:
        FileError: no such file, no JSON, another schema version, or fields that are missing,
        unknown or of the wrong type.
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
    known = (schema,) if isinstance(schema, int) else schema
    if version not in known or isinstance(version, bool):
        raise FileError(
            f"{path} is no {what} of schema {' or '.join(map(str, known))}: its schema is {version!r}. Make it anew with this version"
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
