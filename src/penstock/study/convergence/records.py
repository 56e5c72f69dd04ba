"""Records of the cases of a study, and the file that stores them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from penstock.study.convergence.experiment import Case, Group
from penstock.study.record_lines import RecordLines

#: Decimals to which losses are stored.
_LOSS_DECIMALS = 4


@dataclass(frozen=True)
class Record:
    """Result of one case.

    Attributes:
        case: what was run.
        losses: training loss of each batch, in order.
        test_loss, test_accuracy: after the last batch; None if the run was given up.
        given_up: why the run stopped before its last batch, if it did.
        seconds: duration of training, with all stages on one core; a real pipeline differs.
    """

    case: Case
    losses: tuple[float, ...]
    test_loss: float | None = None
    test_accuracy: float | None = None
    given_up: str | None = None
    seconds: float = 0.0

    def __post_init__(self) -> None:
        rounded = tuple(round(loss, _LOSS_DECIMALS) for loss in self.losses)
        object.__setattr__(self, "losses", rounded)


@dataclass(frozen=True)
class Measured:
    """Seconds per batch in real processes with one thread each, while the pipeline was full."""

    group: Group
    seconds_per_batch: float


@dataclass(frozen=True)
class _Line:
    """A line of the file: one of the two kinds of entries."""

    record: Record | None = None
    measured: Measured | None = None


class RecordFile:
    """The records of a study, and the file that stores them.

    Attributes:
        path: of the file.
        records: by the key of their case.
        measured: seconds per batch in real processes, by group.

    Raises:
        FileError: the folder cannot be made or written, or the file has a line that is no record.
    """

    def __init__(self, folder: Path) -> None:
        self._file = RecordLines(folder, _Line)
        self.path = self._file.path
        self.records: dict[str, Record] = {}
        self.measured: dict[Group, float] = {}
        for line in self._file.lines:
            self._insert(line)

    def add(self, entry: Record | Measured) -> None:
        """Append an entry to the file.

        Raises:
            FileError: the file cannot be written.
        """
        line = _Line(record=entry) if isinstance(entry, Record) else _Line(measured=entry)
        self._file.append(line)
        self._insert(line)

    def of(self, cases: Iterable[Case]) -> list[Record]:
        """Return the records of those cases that have one, in the order of the cases."""
        return [self.records[case.key] for case in cases if case.key in self.records]

    def _insert(self, line: _Line) -> None:
        """Add a line of the file to the entries in memory."""
        if line.record is not None:
            self.records[line.record.case.key] = line.record
        if line.measured is not None:
            self.measured[line.measured.group] = line.measured.seconds_per_batch
