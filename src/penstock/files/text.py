"""Read a text file within limits, and quote what is in it."""

from __future__ import annotations

from pathlib import Path

from penstock.errors import FileError

#: Bytes of a file at most. A plan of a million ops has 8 MB, and is the largest file by far.
MAX_BYTES = 32 * 2**20
#: Why a text with a NUL character is refused.
NUL_PROBLEM = "it contains the character NUL, which no name or path can have"
#: Characters of a foreign value that a message quotes.
_QUOTED = 80


def read_text(path: str | Path, kind: str, max_bytes: int = MAX_BYTES) -> str:
    """Return the text of a UTF-8 file.

    Args:
        path: the file; a pipe is read until it is closed.
        kind: what the file holds, for messages: "plan".
        max_bytes: a longer file is refused, before all of it is read.

    Raises:
        FileError: the file cannot be read, is too long, or is not UTF-8 text; the message names it.
    """
    try:
        with Path(path).open("rb") as file:
            content = file.read(max_bytes + 1)
    except (OSError, ValueError) as error:  # ValueError: the path itself contains NUL
        reason = getattr(error, "strerror", None) or error
        raise FileError(f"cannot read the {kind} {quote_path(path)}: {reason}") from error
    if b"\0" in content:
        raise FileError(f"cannot read the {kind} {path}: it is not text, it contains NUL bytes")
    if len(content) > max_bytes:
        raise FileError(
            f"cannot read the {kind} {path}: it is longer than {max_bytes:,} bytes, which no "
            f"{kind} is"
        )
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise FileError(
            f"cannot read the {kind} {path}: byte {error.start} is not UTF-8 text: save it as UTF-8"
        ) from error


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


def shorten(text: str, limit: int = _QUOTED) -> str:
    r"""Return a text on one line, cut to `limit` characters.

    >>> shorten("one\n two", 5)
    'one …'
    """
    words = " ".join(text[: 10 * limit].split())
    printable = "".join(letter if letter.isprintable() else "?" for letter in words)
    return printable if len(printable) <= limit else printable[: limit - 1] + "…"
