"""Records of cells: raw times, losses and peaks, or why there are none. One line of JSON each."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, final

from penstock.errors import FileError
from penstock.files.read import parse_json
from penstock.files.text import read_text
from penstock.study.cell import Cell

Status = Literal["ok", "failed", "missing", "refused", "timeout", "skipped"]
#: Values of `extra`: plain, nested in lists and dictionaries as needed.
Extra = dict[str, Any]
_SCHEMA = 1
#: 9,775 steps per repetition with time and loss take 0.4 MB; a study of 1,000 such cells is larger
#: than other files that are read.
_MAX_BYTES = 2**30


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
    """The file `records.jsonl` of a study's folder.

    Its first line has the facts of the machine. Of several records of one cell the last counts. An
    incomplete last line, which a power cut leaves, is dropped.

    Args:
        folder: of the study; made if it does not exist.
        study: name of the study.
        machine: facts of this machine; None: the file must exist, and nothing will be added.

    Attributes:
        machine: facts of the machine on which the study began.

    Raises:
        FileError: the folder cannot be written, or the file has a line that is no record, or is of
            another study.
    """

    def __init__(self, folder: Path, study: str, machine: Mapping[str, str] | None = None) -> None:
        self.path = folder / "records.jsonl"
        self._lock = threading.Lock()
        self._records: dict[str, Record] = {}
        self.machine: dict[str, str] = {}
        if machine is not None:
            self._open(folder)
        text = read_text(self.path, "records of the study", _MAX_BYTES)
        complete = text[: text.rfind("\n") + 1]
        if machine is not None and complete != text:
            # The next record would continue the incomplete line.
            self.path.write_text(complete, encoding="utf-8")
        self._parse(complete, study)
        if not complete and machine is not None:
            self.machine = dict(machine)
            self._append(_Line(head=_Head(_SCHEMA, study, self.machine)))

    def _open(self, folder: Path) -> None:
        """Make the folder and the file, if they do not exist, and check that both can be written.

        Raises:
            FileError: they cannot.
        """
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with self.path.open("a", encoding="utf-8"):
                pass
        except OSError as error:
            reason = error.strerror or error
            raise FileError(f"cannot store records in {folder}: {reason}") from error

    def _parse(self, text: str, study: str) -> None:
        """Read the lines of the file."""
        for number, line in enumerate(text.splitlines(), start=1):
            location = f"{self.path}, line {number}"
            entry = _parse_line(line, location)
            if (entry.head is None) == (number == 1):
                raise FileError(
                    f"{location}: the first line has the machine, the others records: use another "
                    "folder"
                )
            if entry.head is not None:
                self._check_head(entry.head, study, location)
            if entry.record is not None:
                self._records[entry.record.cell.key] = entry.record

    def _check_head(self, head: _Head, study: str, location: str) -> None:
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
        self.machine = head.machine

    def add(self, record: Record) -> None:
        """Append a record to the file. Threads may call it at the same time.

        Raises:
            FileError: the file cannot be written.
        """
        with self._lock:
            self._append(_Line(record=record))
            self._records[record.cell.key] = record

    def _append(self, line: _Line) -> None:
        """Write a line at the end of the file.

        Raises:
            FileError: it cannot be written.
        """
        values = {name: value for name, value in asdict(line).items() if value is not None}
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(values, separators=(",", ":")) + "\n")
        except OSError as error:
            raise FileError(f"cannot write {self.path}: {error.strerror or error}") from error

    def get(self, cell: Cell) -> Record | None:
        """Return the record of a cell, or None."""
        return self._records.get(cell.key)

    def of(self, cells: Iterable[Cell]) -> list[Record]:
        """Return the records of those cells that have one, in the order of the cells."""
        return [self._records[cell.key] for cell in cells if cell.key in self._records]


def _parse_line(line: str, location: str) -> _Line:
    """Parse a line of the file.

    Raises:
        FileError: it is neither the head nor a record.
    """
    try:
        # A run that diverged has losses that are not finite.
        entry = parse_json(line, _Line, location, kind="record of a study", finite=False)
    except FileError as error:
        raise FileError(f"{error}: use another folder, or remove the line") from error
    if (entry.head is None) == (entry.record is None):
        raise FileError(
            f"{location} is no record of a study: it must have 'head' or 'record': use another "
            "folder, or remove the line"
        )
    return entry
