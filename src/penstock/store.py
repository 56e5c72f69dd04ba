"""Write files atomically: text, and dataclasses of plain data, which `files.read` reads back."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from penstock.errors import FileError


def to_json(value: object) -> str:
    """Serialise a frozen dataclass of plain data as indented JSON."""
    from pydantic import TypeAdapter  # imported late: most uses of a plan never touch a file

    return TypeAdapter(type(value)).dump_json(value, indent=1).decode()


def write_json(path: str | Path, value: object, *, durable: bool = False) -> None:
    """Write `value` to `path` atomically: the file is complete or unchanged.

    Args:
        path: the file.
        value: a frozen dataclass of plain data.
        durable: as of `write_text`.

    Raises:
        FileError: the file cannot be written.
    """
    write_text(path, to_json(value) + "\n", durable=durable)


def write_text(path: str | Path, text: str, *, durable: bool = False) -> None:
    """Write text to a file atomically: the file is complete or unchanged.

    Args:
        path: the file.
        text: its content.
        durable: wait until the file is on disk, so that it survives a power failure.

    Raises:
        FileError: the file cannot be written.
    """
    target = Path(path)
    try:
        partial = target.with_name(target.name + ".partial")
        partial.write_text(text, encoding="utf-8")
        if durable:
            sync_file(partial)
        partial.replace(target)
        if durable:
            sync_folder(target.parent)
    except (OSError, ValueError) as error:  # ValueError: the name is empty
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
