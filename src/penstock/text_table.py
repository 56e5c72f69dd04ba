"""Tables and rows of text for a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

#: Longer rows of values are shortened in the middle.
_LONGEST_ROW = 32


def table(head: Sequence[str], rows: Sequence[Sequence[str]], indent: str = "") -> str:
    """Write a table with left-aligned columns under a head.

    >>> print(table(("stage", "layers"), [("0", "5"), ("1", "6")]))
    stage  layers
    0      5
    1      6

    Args:
        head: the titles of the columns.
        rows: the cells, as many in each row as there are titles.
        indent: text before each line.
    """
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    lines = []
    for cells in (head, *rows):
        padded = [cell.ljust(width) for cell, width in zip(cells, widths, strict=True)]
        lines.append(f"{indent}{'  '.join(padded)}".rstrip())
    return "\n".join(lines)


def row(values: Iterable[object], separator: str = " ") -> str:
    """Write values in one line; of more than 32 only the first 6 and the last 3."""
    words = list(map(str, values))
    if len(words) > _LONGEST_ROW:
        words = [*words[:6], f"… {len(words) - 9} more …", *words[-3:]]
    return separator.join(words)
