"""Read a text file within limits, and quote what is in it."""

from __future__ import annotations

import errno
import os
import select
import stat
from collections.abc import Sequence
from pathlib import Path

from penstock.errors import FileError

#: Bytes of a file at most. A plan of a million ops has 8 MB, and is the largest file by far.
MAX_BYTES = 32 * 2**20
#: Bytes of one read.
_CHUNK_BYTES = 2**20
#: Seconds to wait for a process that opens a pipe to write, and for one that has opened it.
_NO_WRITER_S, _SILENT_S = 0.3, 60.0
#: Why a text with a NUL character is refused.
NUL_PROBLEM = "it contains the character NUL, which no name or path can have"
#: Characters of a foreign value that a message quotes.
_QUOTED = 80
#: Names that a message lists.
_LISTED_NAMES = 5


def read_text(path: str | Path, kind: str, max_bytes: int = MAX_BYTES) -> str:
    """Return the text of a UTF-8 file.

    Args:
        path: the file; a pipe is read until it is closed.
        kind: what the file holds, for messages: "plan".
        max_bytes: a longer file is refused, before all of it is read.

    Raises:
        FileError: the file cannot be read, is too long, or is not UTF-8 text; the message names it.
    """
    name = quote_path(path)
    try:
        content = _read_bytes(path, max_bytes + 1)
    except (OSError, ValueError) as error:  # ValueError: the path itself contains NUL
        reason = getattr(error, "strerror", None) or error
        raise FileError(f"cannot read the {kind} {name}: {reason}") from error
    if b"\0" in content:
        raise FileError(f"cannot read the {kind} {name}: it is not text, it contains NUL bytes")
    if len(content) > max_bytes:
        raise FileError(
            f"cannot read the {kind} {name}: it is longer than {max_bytes:,} bytes, which no "
            f"{kind} is"
        )
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise FileError(
            f"cannot read the {kind} {name}: byte {error.start} is not UTF-8 text: save it as UTF-8"
        ) from error


def _read_bytes(path: str | Path, count: int) -> bytearray:
    """Return the first `count` bytes of a file, or all if it has fewer, or those up to a NUL byte.

    Raises:
        OSError: the file cannot be read, or is a pipe to which nothing is written.
        ValueError: the path contains NUL.
    """
    # Without O_NONBLOCK, opening a pipe blocks until another process opens it to write.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        read = _read_pipe if stat.S_ISFIFO(os.fstat(descriptor).st_mode) else os.read
        content = bytearray()
        while len(content) < count:
            chunk = read(descriptor, min(count - len(content), _CHUNK_BYTES))
            if not chunk:
                break
            content += chunk
            if b"\0" in chunk:  # no text; a device or a sparse file may have any number of them
                break
    finally:
        os.close(descriptor)
    return content


def _read_pipe(descriptor: int, count: int) -> bytes:
    """Return up to `count` bytes of a pipe as soon as it has some; none if it was closed.

    Raises:
        TimeoutError: no process opens the pipe to write, or the one that did writes nothing.
    """
    is_ready = select.select([descriptor], [], [], _NO_WRITER_S)[0]
    try:
        chunk = os.read(descriptor, count)
    except BlockingIOError as error:  # a process has opened it to write, and may take its time
        if not select.select([descriptor], [], [], _SILENT_S)[0]:
            reason = f"it is a pipe without data for {_SILENT_S:.0f} s"
            raise TimeoutError(errno.ETIMEDOUT, reason) from error
        return os.read(descriptor, count)
    if not chunk and not is_ready:
        raise TimeoutError(errno.ETIMEDOUT, "it is a pipe, and no process writes to it")
    return chunk


def check_characters(text: str) -> None:
    """Refuse NUL characters and halves of surrogate pairs.

    A path with NUL cannot be opened, and half a pair cannot be printed.

    Raises:
        ValueError: there is such a character.
    """
    if "\0" in text:
        raise ValueError(NUL_PROBLEM)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"character {error.start} is half of a surrogate pair") from error


def quote(value: object) -> str:
    """Return a value as Python writes it, on one line and cut to some characters."""
    return shorten(repr(value))


def quote_path(path: str | Path) -> str:
    """Return a path as it is, or as Python writes it if it cannot be printed on one line."""
    text = str(path)
    return text if text.isprintable() else quote(text)


def one_line(text: object) -> str:
    r"""Return the text of an object, such as an error, on one line.

    >>> one_line(ValueError("one\n two"))
    'one two'
    """
    return " ".join(str(text).split())


def shorten(text: str, limit: int = _QUOTED) -> str:
    r"""Return a text on one line, cut to `limit` characters.

    >>> shorten("one\n two", 5)
    'one …'
    """
    words = " ".join(text[: 10 * limit].split())
    printable = "".join(letter if letter.isprintable() else "?" for letter in words)
    return printable if len(printable) <= limit else printable[: limit - 1] + "…"


def join_names(names: Sequence[str]) -> str:
    """List the first few names and the number of further ones.

    >>> join_names(["a", "b", "c", "d", "e", "f", "g"])
    'a, b, c, d, e and 2 more'
    """
    further = len(names) - _LISTED_NAMES
    suffix = f" and {further} more" if further > 0 else ""
    return ", ".join(names[:_LISTED_NAMES]) + suffix
