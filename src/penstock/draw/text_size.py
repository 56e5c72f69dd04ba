"""Estimated size of text in a sans-serif font that is not known, and line breaking by it."""

from __future__ import annotations

import unicodedata

#: Widths of characters in ems, estimated from above. DejaVu Sans, the widest of the common
#: sans-serif fonts, has 0.64 for digits and 0.99 for a W.
_NARROW, _USUAL, _CAPITAL, _BROAD, _FULL = 0.42, 0.65, 0.79, 1.0, 1.1


def text_width(text: str, size: float) -> float:
    """Return an upper estimate of the width of `text` in points at font size `size`."""
    return size * sum(map(_character_width, text))


def _character_width(character: str) -> float:
    """Return an upper estimate of the width of a character in ems."""
    if character in "WM@%mw…—":
        return _BROAD
    if unicodedata.east_asian_width(character) in "WF" or ord(character) > 0x2E7F:
        return _FULL
    if character in " .,:;|!'ijl()[]":
        return _NARROW
    return _CAPITAL if character.isupper() or character in "+<>=~#&" else _USUAL


def wrap_text(text: str, size: float, max_width: float) -> list[str]:
    """Break `text` into lines of at most `max_width` points.

    Lines are broken at spaces, and within a word that is too long for a line of its own.

    Args:
        text: the text; runs of spaces count as one.
        size: font size in points.
        max_width: width of a line in points.
    """
    lines: list[str] = []
    line = ""
    for word in text.split():
        if line and text_width(f"{line} {word}", size) <= max_width:
            line = f"{line} {word}"
            continue
        if line:
            lines.append(line)
        line = ""
        for character in word:
            if line and text_width(line + character, size) > max_width:
                lines.append(line)
                line = ""
            line += character
    return [*lines, line] if line else lines


def flow_lines(widths: list[float], gap: float, max_width: float) -> list[list[int]]:
    """Distribute entries over lines of at most `max_width` points.

    Args:
        widths: width of each entry in points.
        gap: distance between two entries of a line in points.
        max_width: width of a line; an entry wider than it gets a line of its own.

    Returns:
        Per line, the indices of its entries.
    """
    lines: list[list[int]] = []
    used = 0.0
    for index, width in enumerate(widths):
        if lines and used + gap + width <= max_width:
            lines[-1].append(index)
            used += gap + width
        else:
            lines.append([index])
            used = width
    return lines
