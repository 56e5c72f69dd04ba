"""Text that another process has sent, made safe to print: nothing in it acts on a terminal or looks
like a line of this process's own.
"""

from __future__ import annotations

import unicodedata

#: Characters of a text that are shown.
_MOST_CHARACTERS = 20_000


def foreign_text(text: str) -> str:
    """Return a text with its control characters escaped, and every line but the first indented."""
    if len(text) > _MOST_CHARACTERS:
        text = f"{text[:_MOST_CHARACTERS]}… ({len(text):,} characters)"
    lines = ["".join(map(_visible, line)) for line in text.split("\n")]
    return "\n".join([lines[0], *map(_indent, lines[1:])])


def _visible(character: str) -> str:
    """Return a character, or its escape sequence in Python's notation.

    Control and format characters, of which some reverse the direction of text, surrogates, and
    separators other than spaces are not printable.
    """
    if character.isprintable() or unicodedata.category(character) == "Zs":
        return character
    return character.encode("unicode_escape").decode("ascii")


def _indent(line: str) -> str:
    """Return a line that begins with a space, unless it is empty."""
    return line if not line or line.startswith(" ") else f"  {line}"
