"""Records of cells: raw times, losses and peaks, or why there are none. One line of JSON each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, final

from penstock.errors import FileError, PenstockError, RunError
from penstock.peers.messages import PeerMissing, PeerTimeout
from penstock.peers.team import Refused
from penstock.study.cell import Cell
from penstock.study.record_lines import RecordLines

Status = Literal["ok", "failed", "missing", "refused", "timeout", "skipped"]
#: Values of `extra`: plain, nested in lists and dictionaries as needed.
Extra = dict[str, Any]
_SCHEMA = 1


@dataclass(frozen=True)
class Outcome:
    """What running a cell yields.

    Attributes:
        seconds: of every step, or epoch, in order.
        losses: training loss of every step, or epoch.
        peak_bytes: per rank.
        unit: what `seconds` and `losses` are of.
        extra: further raw values of the study, plain.
    """

    seconds: tuple[float, ...] = ()
    losses: tuple[float, ...] = ()
    peak_bytes: tuple[int, ...] = ()
    unit: Literal["step", "epoch"] = "step"
    extra: Extra = field(default_factory=dict)


@dataclass(frozen=True)
class Record:
    """Result of one cell.

    Attributes:
        cell: what was run.
        status: "ok"; "failed": an exception or a dead process; "missing": a package is not
            installed; "refused": impossible, by the system's own words; "timeout"; "skipped": not
            attempted, by the study's choice.
        reason: why there is no outcome.
        outcome: the raw values.
        wall_s: seconds that the cell took, with starting its processes.
    """

    cell: Cell
    status: Status
    reason: str = ""
    outcome: Outcome = field(default_factory=Outcome)
    wall_s: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether there is an outcome."""
        return self.status == "ok"


@dataclass(frozen=True)
class _Head:
    """First line of the file."""

    schema: int
    study: str
    machine: dict[str, str]


@dataclass(frozen=True)
class _Line:
    """A line of the file: exactly one of the two."""

    head: _Head | None = None
    record: Record | None = None


@final
class Records:
    """The records of a study, and the file that stores them.

    The first line of the file has the facts of the machine. Of several records of one cell the last
    counts.

    Args:
        folder: of the study; made if it does not exist.
        study: name of the study.
        machine: facts of this machine.

    Attributes:
        path: of the file.
        machine: facts of the machine on which the study began.

    Raises:
        FileError: the folder cannot be written, or the file has a line that is no record, or is of
            another study.
    """

    def __init__(self, folder: Path, study: str, machine: Mapping[str, str]) -> None:
        self._file = RecordLines(folder, _Line)
        self.path = self._file.path
        self._records: dict[str, Record] = {}
        self.machine = dict(machine)
        for number, line in enumerate(self._file.lines, start=1):
            self._insert(line, number, study)
        if not self._file.lines:
            self._file.append(_Line(head=_Head(_SCHEMA, study, self.machine)))

    def _insert(self, line: _Line, number: int, study: str) -> None:
        """Add a line of the file to the records in memory.

        Raises:
            FileError: it has no machine and is the first, or has one and is not, or is of another
                study.
        """
        location = self._file.location(number)
        if (line.head is None) == (number == 1):
            raise FileError(
                f"{location}: the first line has the machine, the others records: use another "
                "folder"
            )
        if line.head is not None:
            self._check_head(line.head, study, location)
            self.machine = line.head.machine
        if line.record is not None:
            self._records[line.record.cell.key] = line.record

    @staticmethod
    def _check_head(head: _Head, study: str, location: str) -> None:
        """Refuse a file of another study."""
        if head.schema != _SCHEMA:
            raise FileError(
                f"{location}: schema {head.schema} is not {_SCHEMA}: use another folder"
            )
        if head.study != study:
            raise FileError(
                f"{location}: these are records of the study {head.study!r}, not of {study!r}: use "
                "another folder"
            )

    def add(self, record: Record) -> None:
        """Append a record to the file. Threads may call it at the same time.

        Raises:
            FileError: the file cannot be written.
        """
        self._file.append(_Line(record=record))
        self._records[record.cell.key] = record

    def get(self, cell: Cell) -> Record | None:
        """Return the record of a cell, or None."""
        return self._records.get(cell.key)

    def of(self, cells: Iterable[Cell]) -> list[Record]:
        """Return the records of those cells that have one, in the order of the cells."""
        return [self._records[cell.key] for cell in cells if cell.key in self._records]


def status_of_error(error: PenstockError) -> Status:
    """Return the status of a cell that raised an error."""
    if isinstance(error, PeerMissing):
        return "missing"
    if isinstance(error, PeerTimeout):
        return "timeout"
    if isinstance(error, Refused) or not isinstance(error, RunError):
        return "refused"
    return "failed"
