"""Write dataclasses of plain data as JSON, and read them back with strict validation."""

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
    """Serialise a frozen dataclass of plain data as indented JSON."""
    from pydantic import TypeAdapter  # imported late: most uses of a plan never touch a file

    return TypeAdapter(type(value)).dump_json(value, indent=1).decode()


def write_json(path: str | Path, value: object, *, durable: bool = False) -> None:
    """Write `value` to `path` atomically: the file is complete or unchanged.

    Args:
        path: the file.
        value: a frozen dataclass of plain data.
        durable: wait until the file is on disk, so that it survives a power failure.

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
    """Wait until the content of a file is on disk."""
    descriptor = os.open(path, os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_folder(path: Path) -> None:
    """Wait until the names in a folder are on disk, if the file system supports that."""
    with suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def read_json(path: str | Path, kind: type[T], schema: int | Collection[int]) -> T:
    """Read a value of type `kind` and validate it.

    Args:
        path: the file.
        kind: a dataclass with a field `schema`.
        schema: supported version, or versions, of the format.

    Raises:
        FileError: the file cannot be read, is no JSON, has another schema version, or has fields
            that are missing, unknown or of the wrong type.
    """
    from pydantic import TypeAdapter, ValidationError

    type_name = kind.__name__.lower()
    try:
        text = Path(path).read_text(encoding="utf-8")
        content: Any = json.loads(text, parse_float=_parse_finite, parse_constant=_parse_finite)
    except (OSError, UnicodeDecodeError) as error:
        raise FileError(
            f"cannot read the {type_name} {path}: {getattr(error, 'strerror', None) or error}"
        ) from error
    except (ValueError, RecursionError) as error:
        raise FileError(f"{path} is not JSON: {error}") from error
    version = content.get("schema") if isinstance(content, dict) else None
    supported = (schema,) if isinstance(schema, int) else schema
    # True == 1 in Python, but true is no version.
    if version not in supported or isinstance(version, bool):
        raise FileError(
            f"{path} is no {type_name} of schema {' or '.join(map(str, supported))}: "
            f"its schema is {version!r}. Create it again with this version of penstock"
        )
    try:
        return TypeAdapter(kind).validate_json(text, strict=True, extra="forbid")
    except ValidationError as error:
        first = error.errors()[0]
        location = ".".join(map(str, first["loc"])) or "the top"
        raise FileError(f"{path} is no {type_name}: at {location}: {first['msg']}") from error


def _parse_finite(text: str) -> float:
    """Parse a finite number. Python's parser also accepts NaN, Infinity and 1e999.

    Raises:
        ValueError: the number is not finite.
    """
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is not a finite number")
    return number
