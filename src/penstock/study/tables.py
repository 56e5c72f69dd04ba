"""Tables that several studies share."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence

from penstock.report.document import Column, Series, Table, Value
from penstock.study.cell import Cell
from penstock.study.intervals import mean_interval
from penstock.study.records import Record


def by_group(records: Iterable[Record]) -> dict[Cell, list[Record]]:
    """Return the records of each group of repetitions, in the order of their first record."""
    groups: dict[Cell, list[Record]] = {}
    for record in records:
        groups.setdefault(record.cell.group, []).append(record)
    return groups


def typical_seconds(record: Record) -> float:
    """Return the median seconds of a step, or epoch, of a run that ended."""
    return statistics.median(record.outcome.seconds)


def runs_that_ended(records: Iterable[Record]) -> list[Record]:
    """Return the records with times."""
    return [record for record in records if record.ok and record.outcome.seconds]


def step_seconds(records: Iterable[Record]) -> list[float]:
    """Return the median seconds of a step, or epoch, of each run that ended."""
    return [typical_seconds(record) for record in runs_that_ended(records)]


def peaks_of(records: Iterable[Record]) -> list[int]:
    """Return the largest peak memory of a rank, in bytes, of every run that measured it."""
    return [max(record.outcome.peak_bytes) for record in records if record.outcome.peak_bytes]


def last_losses(records: Iterable[Record]) -> list[float]:
    """Return the last training loss of every run that has losses."""
    return [record.outcome.losses[-1] for record in records if record.outcome.losses]


def bars(name: str, rows: Sequence[tuple[str, float, float, float]]) -> tuple[Series, list[str]]:
    """Return the series of a bar chart with intervals, and its categories.

    Args:
        name: of the series.
        rows: per bar its category, its height, and the ends of its interval.
    """
    x = tuple(float(index) for index in range(len(rows)))
    heights = tuple(height for _, height, _, _ in rows)
    lows = tuple(low for _, _, low, _ in rows)
    highs = tuple(high for _, _, _, high in rows)
    return Series(name, x, heights, lows, highs), [category for category, *_ in rows]


def reason_of(records: Sequence[Record]) -> str:
    """Return why a group has no result, or what some of its runs say."""
    reasons = dict.fromkeys(
        f"{record.status}: {record.reason}" for record in records if not record.ok
    )
    return "; ".join(reasons)


RECORD_COLUMNS = (
    Column("system"),
    Column("S", "number", 0, "stages"),
    Column("M", "number", 0, "micro-batches per step"),
    Column("balance"),
    Column("runs", "number", 0, "repetitions that ended"),
    Column("seconds", "seconds", about="mean over repetitions of the median step, or epoch"),
    Column("±", "seconds", about="half of the 95 % interval of the mean (t-distribution)"),
    Column("loss", "number", 4, "mean over repetitions of the last training loss"),
    Column("peak", "bytes", about="largest peak memory of a rank, above its imports"),
    Column("note"),
)


def record_row(records: Sequence[Record]) -> tuple[Value, ...]:
    """Return the row of a group of repetitions, in the columns `RECORD_COLUMNS`."""
    cell = records[0].cell
    ended = runs_that_ended(records)
    interval = mean_interval(step_seconds(ended))
    losses = last_losses(ended)
    return (
        cell.system_label,
        cell.stages,
        cell.micro_batches,
        cell.balance,
        len(ended),
        interval.mean if interval else None,
        interval.half_width if interval else None,
        statistics.fmean(losses) if losses else None,
        max(peaks_of(ended), default=None),
        reason_of(records),
    )


def record_table(name: str, title: str, records: Sequence[Record]) -> Table:
    """Return a table with a row per group of repetitions."""
    rows = tuple(record_row(group) for group in by_group(records).values())
    return Table(name, title, RECORD_COLUMNS, rows, "", ("records.jsonl",))
