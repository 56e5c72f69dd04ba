"""A published number beside ours, and tables of them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, final


@final
@dataclass(frozen=True)
class Row:
    """One case: the paper's number, ours, both in the section's unit; None where there is none.
    `fitted`: ours was fitted to it, or both are normalised by it.
    """

    case: str
    paper: float | None
    ours: float | None
    note: str = ""
    fitted: bool = False

    @property
    def ratio(self) -> float | None:
        """Ours over the paper's."""
        return self.ours / self.paper if self.paper and self.ours is not None else None


@final
@dataclass(frozen=True)
class Section:
    """A table of a paper, with what went in and where it does not match."""

    name: str
    title: str
    unit: str
    rows: tuple[Row, ...]
    published: tuple[str, ...] = ()  # inputs from the paper or its code
    assumed: tuple[str, ...] = ()  # inputs that are ours: presets, conventions
    fitted: tuple[str, ...] = ()  # constants fitted, and to what
    misses: tuple[str, ...] = ()  # where it does not match, and why

    @property
    def predicted(self) -> list[float]:
        """Ratios of the rows that nothing was fitted to."""
        return [row.ratio for row in self.rows if row.ratio is not None and not row.fitted]

    @classmethod
    def of(cls, data: dict[str, Any]) -> Section:
        """What `data` gave."""
        rows = []
        for row in data["rows"]:
            rows.append(Row(**{key: value for key, value in row.items() if key != "ratio"}))
        fields = {key: tuple(data[key]) for key in ("published", "assumed", "fitted", "misses")}
        return cls(data["name"], data["title"], data["unit"], tuple(rows), **fields)

    def summary(self) -> str:
        """How far off, in a sentence."""
        off = [max(ratio, 1 / ratio) - 1 for ratio in self.predicted if ratio > 0]
        if not off:
            return "No row of this table has a published number to hold ours against."
        inside = sum(error <= 0.1 for error in off)
        of = f"Of {len(off)} predicted" if len(off) > 1 else "The one predicted"
        if len(off) == 1:
            return f"{of} number is off by {off[0]:.0%}."
        return f"{of} numbers {inside} are within 10 %; median error {statistics.median(off):.0%}, worst {max(off):.0%}."

    def data(self) -> dict[str, Any]:
        """For results.json."""
        rows = [
            {
                **asdict(row),
                "ratio": rounded(row.ratio),
                "paper": rounded(row.paper),
                "ours": rounded(row.ours),
            }
            for row in self.rows
        ]
        return {**asdict(self), "rows": rows, "summary": self.summary()}

    def markdown(self) -> str:
        """The section of a page."""
        noted = any(row.note for row in self.rows)
        has_paper = any(row.paper is not None for row in self.rows)
        head = [
            "case",
            *(
                [f"paper ({self.unit})", "ours", "ours / paper"]
                if has_paper
                else [f"ours ({self.unit})"]
            ),
            *(["how"] if noted else []),
        ]
        body = [
            [
                row.case,
                *(
                    [shown(row.paper), shown(row.ours), ratio_text(row)]
                    if has_paper
                    else [shown(row.ours)]
                ),
                *([row.note] if noted else []),
            ]
            for row in self.rows
        ]
        parts = [f"### {self.title}", "", table(head, body), "", self.summary()]
        for label, lines in (
            ("From the paper", self.published),
            ("Ours", self.assumed),
            ("Fitted", self.fitted),
            ("Where it misses", self.misses),
        ):
            parts += ["", f"{label}:", "", *(f"* {line}" for line in lines)] if lines else []
        return "\n".join(parts)


def ratio_text(row: Row) -> str:
    """The ratio, marked where the row was fitted."""
    return "" if row.ratio is None else f"{row.ratio:.2f}{' (fitted)' if row.fitted else ''}"


def rounded(number: float | None) -> float | None:
    """To four digits, so that results.json changes when results do."""
    return None if number is None or not math.isfinite(number) else float(f"{number:.4g}")


def shown(number: float | None) -> str:
    """Three digits and a half; nothing for None."""
    if number is None:
        return "-"
    return (
        f"{number:,.0f}"
        if abs(number) >= 1000
        else f"{number:.3g}"
        if abs(number) < 100
        else f"{number:.0f}"
    )


def table(head: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    """A Markdown table that reads well as text."""
    rows = [list(head), *map(list, body)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        lines.append(f"| {' | '.join(cells).rstrip()} |")
    rule = "|".join("-" * (width + 2) for width in widths)
    return "\n".join([lines[0], f"|{rule}|", *lines[1:]])
