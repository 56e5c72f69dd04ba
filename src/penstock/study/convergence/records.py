"""Records of the cases of a study, and the file that stores them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from penstock.errors import FileError
from penstock.files.read import parse_json
from penstock.files.text import read_text
from penstock.study.convergence.experiment import Case, Group

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


Entry = Record | Measured


@dataclass(frozen=True)
class _Line:
    """A line of the file: one of the two kinds of entries."""

    record: Record | None = None
    measured: Measured | None = None


class RecordFile:
    """The file `records.jsonl` of a study's folder: one line of JSON per record.

    Attributes:
        path: of the file.
        records: by the key of their case.
        measured: seconds per batch in real processes, by group.

    Raises:
        FileError: the folder cannot be made or written, or the file has a line that is no record.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / "records.jsonl"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with self.path.open("a", encoding="utf-8"):
                pass
            text = read_text(self.path, "records of the study")
            # An incomplete last line is left by a power cut: drop it, so that its case runs again.
            complete = text[: text.rfind("\n") + 1]
            if complete != text:
                self.path.write_text(complete, encoding="utf-8")
        except OSError as error:
            raise FileError(
                f"cannot store records in {folder}: {error.strerror or error}"
            ) from error
        self.records: dict[str, Record] = {}
        self.measured: dict[Group, float] = {}
        for number, line in enumerate(complete.splitlines(), start=1):
            self._insert(_parse_line(line, f"{self.path}, line {number}"))

    def add(self, entry: Entry) -> None:
        """Append an entry to the file.

        Raises:
            FileError: the file cannot be written.
        """
        kind = "record" if isinstance(entry, Record) else "measured"
        line = json.dumps({kind: asdict(entry)}, separators=(",", ":"))
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(line + "\n")
        except OSError as error:
            raise FileError(f"cannot write {self.path}: {error.strerror or error}") from error
        self._insert(entry)

    def of(self, cases: Iterable[Case]) -> list[Record]:
        """Return the records of those cases that have one, in the order of the cases."""
        return [self.records[case.key] for case in cases if case.key in self.records]

    def _insert(self, entry: Entry) -> None:
        """Add an entry to the records in memory."""
        if isinstance(entry, Record):
            self.records[entry.case.key] = entry
        else:
            self.measured[entry.group] = entry.seconds_per_batch


def _parse_line(line: str, location: str) -> Entry:
    """Parse a line of the file.

    Raises:
        FileError: the line is no record; the message names `location`.
    """
    try:
        # A run that diverged has losses that are not finite.
        entries = parse_json(line, _Line, location, kind="record of a study", finite=False)
    except FileError as error:
        raise FileError(f"{error}: use another folder, or remove the line") from error
    entry = entries.record or entries.measured
    if entry is None or (entries.record and entries.measured):
        raise FileError(
            f"{location} is no record of a study: it has neither or both of 'record' and "
            "'measured': use another folder, or remove the line"
        )
    return entry
