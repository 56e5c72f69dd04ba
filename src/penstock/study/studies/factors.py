"""`penstock study factors`: what acts on the time of a GPipe step.

The question is that of Zhang et al. 2023: number of micro-batches, number of stages, balance, depth
of the model and size of the input, one of them varied at a time, in real runs.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace

from penstock.report.document import (
    Chart,
    Column,
    Page,
    Report,
    Section,
    Table,
    Text,
    Value,
)
from penstock.study.catalogue import register
from penstock.study.cell import Cell, options
from penstock.study.intervals import mean_interval
from penstock.study.records import Record
from penstock.study.settings import Settings
from penstock.study.tables import (
    bars,
    by_group,
    peaks_of,
    reason_of,
    step_seconds,
)

STUDY = "factors"
#: Value of each factor in all runs in which another factor varies.
_BASE: dict[str, int | str] = {
    "micro-batches": 8,
    "stages": 2,
    "balance": "bottleneck",
    "depth": 8,
    "input": 64,
}
#: Depth of the model of which the balance varies.
_BALANCE_DEPTH = 10
_VALUES: dict[str, dict[str, tuple[int | str, ...]]] = {
    "small": {
        "micro-batches": (1, 2, 4, 8, 16),
        "stages": (1, 2, 4),
        "balance": ("bottleneck", "uniform", "parameters", "10-2"),
        "depth": (4, 8, 16),
        "input": (16, 64, 128),
    },
    "full": {
        "micro-batches": (1, 2, 4, 8, 16, 32),
        "stages": (1, 2, 3, 4, 6, 8),
        "balance": ("bottleneck", "uniform", "parameters", "10-2", "2-10"),
        "depth": (4, 8, 12, 16, 24, 32),
        "input": (16, 32, 64, 96, 128),
    },
}
_ABOUT = {
    "micro-batches": "micro-batches per batch of 32 samples",
    "stages": "stages, one process each; 1: plain training",
    "balance": "method of partitioning, or layers per stage",
    "depth": "transformer blocks; two more layers are the embedding and the head",
    "input": "tokens per sample",
}
_BATCH = 32


@register(
    STUDY,
    about="How do micro-batches, stages, balance, depth and input size act on a GPipe step?",
)
class Factors:
    """GPipe on a GPT, one factor varied at a time."""

    def cells(self, settings: Settings) -> list[Cell]:
        """Return a cell per value of each factor; the base cell occurs once."""
        cells = []
        for factor, values in _VALUES[settings.scale].items():
            for value in values:
                for repetition in range(settings.repeat(2, 5)):
                    cells.append(replace(_cell(factor, value, settings), repetition=repetition))
        return list(dict.fromkeys(cells))

    def report(self, settings: Settings, records: Sequence[Record]) -> Report:
        """Return a section per factor."""
        groups = by_group(records)
        sections, summary = [], []
        for factor, values in _VALUES[settings.scale].items():
            rows: list[tuple[int | str, list[Record]]] = []
            for value in values:
                rows.append((value, groups.get(_cell(factor, value, settings), [])))
            sections.append(_section(factor, rows))
            conclusion = _conclusion(factor, rows)
            if conclusion:
                summary.append(conclusion)
        command = f"penstock study {STUDY} --scale {settings.scale}"
        title = "Factors that act on GPipe"
        return Report(title, (Page(STUDY, title, tuple(sections), command, tuple(summary)),))


def _base_of(factor: str) -> dict[str, int | str]:
    """Return the values of the other factors while one varies. For balance the model has two more
    blocks, so that 12 layers can be cut unevenly.
    """
    others = {name: value for name, value in _BASE.items() if name != factor}
    return {**others, "depth": _BALANCE_DEPTH} if factor == "balance" else others


def _cell(factor: str, value: int | str, settings: Settings) -> Cell:
    """Return the cell in which one factor has a value and the others have those of the base."""
    factors = {**_base_of(factor), factor: value}
    stages, tokens = int(factors["stages"]), int(factors["input"])
    pipelined = stages > 1
    return Cell(
        STUDY,
        "penstock" if pipelined else "plain",
        "gpipe" if pipelined else "",
        stages=stages,
        micro_batches=int(factors["micro-batches"]) if pipelined else 1,
        balance=str(factors["balance"]) if pipelined else "",
        model="gpt",
        model_options=options(
            layers=int(factors["depth"]),
            width=128,
            heads=4,
            tokens=tokens,
            vocabulary=256,
        ),
        data=settings.data or "random",
        batch=_BATCH,
        steps=5 if settings.scale == "small" else 30,
    )


_COLUMNS = (
    Column("value"),
    Column("runs", "number", 0, "repetitions that ended"),
    Column("step", "seconds", about="mean over repetitions of the median step"),
    Column("±", "seconds", about="half of the 95 % interval of the mean (t-distribution)"),
    Column("to the fastest", "number", 2, "step over the shortest step of this table"),
    Column("ideal bubble", "percent", 0, "(S - 1) / (M + S - 1), for equal stages"),
    Column("peak of a rank", "bytes", about="largest over ranks and repetitions"),
    Column("note"),
)


def _section(factor: str, rows: Sequence[tuple[int | str, list[Record]]]) -> Section:
    """Return the table and the chart of a factor."""
    means = [statistics.fmean(step_seconds(group)) for _, group in rows if step_seconds(group)]
    fastest = min(means, default=0.0)
    table_rows = tuple(_row(value, group, fastest) for value, group in rows)
    table = Table(
        f"factor-{factor}", f"By {factor}", _COLUMNS, table_rows, _ABOUT[factor], ("records.jsonl",)
    )
    base = ", ".join(f"{name} {value}" for name, value in _base_of(factor).items())
    return Section(
        f"Factor: {factor}", (Text(f"All else is equal: {base}."), table, _chart(factor, rows))
    )


def _row(value: int | str, group: Sequence[Record], fastest: float) -> tuple[Value, ...]:
    """Return the row of a value of a factor."""
    interval = mean_interval(step_seconds(group))
    bubble = None
    if group:
        cell = group[0].cell
        bubble = (cell.stages - 1) / (cell.micro_batches + cell.stages - 1)
    return (
        str(value),
        interval.count if interval else 0,
        interval.mean if interval else None,
        interval.half_width if interval else None,
        interval.mean / fastest if interval and fastest else None,
        bubble,
        max(peaks_of(group), default=None),
        reason_of(group) if group else "not run",
    )


def _chart(factor: str, rows: Sequence[tuple[int | str, list[Record]]]) -> Chart:
    """Return a bar per value, with the interval over repetitions."""
    bar_rows = []
    for value, group in rows:
        interval = mean_interval(step_seconds(group))
        if interval is not None:
            low = interval.mean if interval.low is None else max(0.0, interval.low)
            high = interval.mean if interval.high is None else interval.high
            bar_rows.append((str(value), interval.mean, low, high))
    series, categories = bars("step", bar_rows)
    return Chart(
        f"factor-{factor}-chart",
        f"Seconds of a step by {factor}",
        factor,
        "seconds a step, 95 % interval",
        (series,),
        "bar",
        tuple(categories),
    )


def _conclusion(factor: str, rows: Sequence[tuple[int | str, list[Record]]]) -> str:
    """Return which values are the fastest and slowest, and by how much; empty with fewer than two
    values.
    """
    means = {
        value: statistics.fmean(step_seconds(group)) for value, group in rows if step_seconds(group)
    }
    if len(means) < 2:
        return ""
    best = min(means, key=lambda value: means[value])
    worst = max(means, key=lambda value: means[value])
    return (
        f"{factor}: {best} is the fastest; {worst} takes {means[worst] / means[best]:.2f} times as "
        "long."
    )
