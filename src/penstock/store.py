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
    """Write `value` to `path` atomically, see `write_file`.

    Args:
        path: the file.
        value: a frozen dataclass of plain data.
        durable: as of `write_file`.

    Raises:
        FileError: the file cannot be written.
    """
    write_file(path, to_json(value) + "\n", durable=durable)


def write_file(
    path: str | Path, content: str | bytes, *, kind: str = "", durable: bool = False
) -> None:
    """Write a file atomically: readers see either its old or its complete new content.

    A link stays a link, and its target is replaced. A terminal or a pipe, such as /dev/stdout, is
    written to.

    Args:
        path: the file.
        content: all of it; text is written as UTF-8.
        kind: what the file is, for messages.
        durable: wait until the file is on disk, so that it survives a power failure.

    Raises:
        FileError: the file cannot be written.
    """
    target = Path(path)
    partial: Path | None = None
    try:
        encoded = content if isinstance(content, bytes) else content.encode("utf-8")
        partial = _partial_path(target)
        if partial is None:
            target.write_bytes(encoded)
            return
        partial.write_bytes(encoded)
        if durable:
            sync_file(partial)
        partial.replace(target.resolve())
        if durable:
            sync_folder(partial.parent)
    # ValueError: a NUL in the name. RuntimeError: a cycle of links.
    except (OSError, ValueError, RuntimeError) as error:
        if partial is not None:
            with suppress(OSError):  # such as a parent that is a file
                partial.unlink()
        raise write_error(target, error, kind) from error


def check_writable(path: str | Path) -> None:
    """Check that `write_file` can write to `path`, before the work whose result it is to hold.

    Raises:
        FileError: the path is a folder, or no file can be made beside it.
    """
    target = Path(path)
    try:
        partial = _partial_path(target)
        if partial is not None:
            partial.touch()
            partial.unlink(missing_ok=True)  # another rank may have removed it
    except (OSError, ValueError, RuntimeError) as error:
        raise write_error(target, error) from error


def _partial_path(path: Path) -> Path | None:
    """Return where to write the content of a file before it replaces the file; None for a terminal
    or a pipe, which another file cannot replace.

    Raises:
        OSError, ValueError, RuntimeError: the path cannot be that of a file.
    """
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    # By the path itself: /dev/stdout leads to a pipe that has no path of its own.
    if path.exists() and not path.is_file():
        return None
    target = path.resolve()
    # In the same folder, since a file can only be replaced atomically within a file system.
    return target.with_name(f".{target.name}.{os.getpid()}.partial")


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
