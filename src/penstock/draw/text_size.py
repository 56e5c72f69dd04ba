"""How wide words will be in a sans-serif font that is not known, estimated from above."""

from __future__ import annotations

import unicodedata

#: Widths in ems. DejaVu Sans, the widest of the usual sans-serif fonts, has 0.64 for digits and
#: 0.99 for a W.
_NARROW, _USUAL, _CAPITAL, _BROAD, _FULL = 0.42, 0.65, 0.79, 1.0, 1.1


def text_width(words: str, size: float) -> float:
    """An upper estimate of the points that `words` take at font size `size`."""
    return size * sum(map(_ems, words))


def _ems(character: str) -> float:
    if character in "WM@%mw…—":
        return _BROAD
    if unicodedata.east_asian_width(character) in "WF" or ord(character) > 0x2E7F:
        return _FULL
    if character in " .,:;|!'ijl()[]":
        return _NARROW
    return _CAPITAL if character.isupper() or character in "+<>=~#&" else _USUAL


def wrapped(words: str, size: float, room: float) -> list[str]:
    """`words` in lines of at most `room` points, broken at spaces, and within a word that alone is
    too long.
    """
    lines: list[str] = []
    line = ""
    for word in words.split():
        if line and text_width(f"{line} {word}", size) <= room:
            line = f"{line} {word}"
            continue
        if line:
            lines.append(line)
        line = ""
        for character in word:
            if line and text_width(line + character, size) > room:
                lines.append(line)
                line = ""
            line += character
    return [*lines, line] if line else lines


def flowing(widths: list[float], between: float, room: float) -> list[list[int]]:
    """Entries of these widths side by side in lines of at most `room` points: the indices of each
    line's entries.
    """
    lines: list[list[int]] = []
    used = 0.0
    for index, width in enumerate(widths):
        if lines and used + between + width <= room:
            lines[-1].append(index)
            used += between + width
        else:
            lines.append([index])
            used = width
    return lines
