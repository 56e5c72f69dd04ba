"""Tables of text for a terminal."""

from __future__ import annotations

from collections.abc import Sequence


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
