"""Tables and rows of text for a terminal."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

#: Longer rows of values are shortened in the middle.
_LONGEST_ROW = 32


def table(
    head: Sequence[str],
    rows: Sequence[Sequence[str]],
    indent: str = "",
    right: Collection[int] = (),
) -> str:
    """Write a table with aligned columns under a head.

    >>> print(table(("stage", "layers"), [("0", "5"), ("1", "6")]))
    stage  layers
    0      5
    1      6

    Args:
        head: the titles of the columns.
        rows: the cells, as many in each row as there are titles.
        indent: text before each line.
        right: indices of the columns that are aligned to the right; all others are to the left.
    """
    return "\n".join(f"{indent}{line}".rstrip() for line in aligned([head, *rows], right))


def aligned(rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> list[str]:
    """Return rows of cells as lines of equal length, see `table`."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for cells in rows:
        padded = []
        for column, (cell, width) in enumerate(zip(cells, widths, strict=True)):
            padded.append(cell.rjust(width) if column in right else cell.ljust(width))
        lines.append("  ".join(padded))
    return lines


def row(values: Iterable[object], separator: str = " ") -> str:
    """Write values in one line; of more than 32 only the first 6 and the last 3."""
    words = list(map(str, values))
    if len(words) > _LONGEST_ROW:
        words = [*words[:6], f"… {len(words) - 9} more …", *words[-3:]]
    return separator.join(words)
