"""Output on terminals whose encoding lacks the characters of drawings and tables."""

from __future__ import annotations

import codecs
import io
import sys

#: ASCII characters for those of drawings: idle time, fills by kind of op, and punctuation.
ASCII = {
    "·": ".",
    "░": ":",
    "▒": "+",
    "▓": "#",
    "═": "=",
    "█": "%",
    "→": ">",
    "←": "<",
    "…": "...",
    "\N{MULTIPLICATION SIGN}": "x",
    "\N{MINUS SIGN}": "-",
    "\N{EN DASH}": "-",
    "—": "-",
    "≤": "<=",
    "≥": ">=",
    "─": "-",
    "━": "-",
    "│": "|",
    "┃": "|",
    "µ": "u",
    "²": "2",
}
_HANDLER = "penstock-ascii"


def _ascii_text(error: UnicodeError) -> tuple[str, int]:
    """Return ASCII for the characters that an encoding lacks, and where encoding continues."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    characters = error.object[error.start : error.end]
    return "".join(ASCII.get(character, "?") for character in characters), error.end


def replace_unencodable() -> None:
    """Let standard output and error print ASCII for characters that their encoding lacks.

    Streams that encode Unicode are not changed.
    """
    codecs.register_error(_HANDLER, _ascii_text)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and not _is_unicode(stream.encoding):
            stream.reconfigure(errors=_HANDLER)


def _is_unicode(encoding: str) -> bool:
    """Whether an encoding has all characters."""
    return codecs.lookup(encoding).name.startswith("utf")
