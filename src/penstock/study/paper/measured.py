"""What the repetitions of a cell say: time per step, loss, and how both compare."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from penstock.study.cell import Cell
from penstock.study.intervals import Interval, mean_interval, welch
from penstock.study.records import Record
from penstock.study.tables import by_group, last_losses, peaks_of, reason_of, runs_that_ended


def step_seconds(record: Record) -> float:
    """Return the seconds per step of a run: of epochs the mean, because the paper's time is that of
    all epochs; of a few steps the median.
    """
    seconds = record.outcome.seconds
    if record.outcome.unit == "epoch":
        return sum(seconds) / (len(seconds) * int(record.outcome.extra["steps_per_unit"]))
    return statistics.median(seconds)


@dataclass(frozen=True)
class Measured:
    """Repetitions of one cell.

    Attributes:
        cell: with repetition 0.
        steps: seconds per step of each run that ended.
        losses: last training loss of each.
        peaks: largest peak memory of a rank of each, in bytes.
        reason: why runs have no result.
        records: all of them.
    """

    cell: Cell
    steps: tuple[float, ...] = ()
    losses: tuple[float, ...] = ()
    peaks: tuple[int, ...] = ()
    reason: str = ""
    records: tuple[Record, ...] = ()

    @property
    def step(self) -> Interval | None:
        """Mean seconds per step with its interval."""
        return mean_interval(self.steps)

    @property
    def loss(self) -> Interval | None:
        """Mean last loss with its interval."""
        return mean_interval(self.losses)


class Measurements:
    """All records of a study, by cell.

    Args:
        records: of the study.
        cores: of the machine on which they were made.
    """

    def __init__(self, records: Iterable[Record], cores: int) -> None:
        self.cores = cores
        self._by_cell = {}
        for cell, group in by_group(records).items():
            self._by_cell[cell] = _measured(cell, group)

    def of(self, cell: Cell) -> Measured:
        """Return what is known of a cell, nothing if it has no record."""
        return self._by_cell.get(cell.group, Measured(cell.group, reason="not run"))

    def is_meaningful(self, cell: Cell) -> bool:
        """Whether a time means something: every stage has a core."""
        return cell.stages <= self.cores

    def note(self, cell: Cell) -> str:
        """Return why a row has no result or means nothing."""
        measured = self.of(cell)
        notes = [measured.reason] if measured.reason else []
        if measured.steps and not self.is_meaningful(cell):
            notes.append(f"times mean nothing: {cell.stages} stages on {self.cores} cores")
        return "; ".join(notes)


def _measured(cell: Cell, records: Sequence[Record]) -> Measured:
    """Return what the repetitions of a cell say."""
    ended = runs_that_ended(records)
    return Measured(
        cell,
        tuple(step_seconds(record) for record in ended),
        tuple(last_losses(ended)),
        tuple(peaks_of(ended)),
        reason_of(records),
        tuple(records),
    )


def ratio(first: Measured, second: Measured) -> float | None:
    """Return the mean time per step of the first over that of the second."""
    if not first.steps or not second.steps:
        return None
    return statistics.fmean(first.steps) / statistics.fmean(second.steps)


def p_value(first: Measured, second: Measured) -> float | None:
    """Return the p-value of Welch's test that the times per step are equal; None for a cell and
    itself.
    """
    if first.cell == second.cell:
        return None
    return welch(first.steps, second.steps)
