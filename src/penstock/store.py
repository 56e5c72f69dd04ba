"""Write files atomically: text, and dataclasses of plain data, which `files.read` reads back."""

from __future__ import annotations

import errno
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
        raise write_error(target, error) from error


def check_writable(path: str | Path) -> None:
    """Check that `write_text` can write to `path`, before the work whose result it is to hold.

    Raises:
        FileError: the path is a folder, or no file can be made beside it.
    """
    target = Path(path)
    try:
        if target.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        partial = target.with_name(target.name + ".partial")
        partial.touch()
        partial.unlink(missing_ok=True)  # another rank may have removed it
    except (OSError, ValueError) as error:
        raise write_error(target, error) from error


def write_error(path: Path, error: Exception, kind: str = "") -> FileError:
    """Return the error to raise where a file cannot be written, with the reason.

    Args:
        path: the file.
        error: what the write raised.
        kind: what the file is, for the message.
    """
    reason = getattr(error, "strerror", None) or str(error)
    if isinstance(error, FileNotFoundError) and not path.parent.exists():
        reason = f"the folder {path.parent} does not exist; create it first"
    return FileError(f"cannot write {f'the {kind} ' if kind else ''}{path}: {reason}")


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
