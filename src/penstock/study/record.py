"""Record: what came of a case; and the file that records are kept in as they come."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from penstock.errors import FileError
from penstock.study.question import Case, Group

#: Digits behind the point of a loss that is kept.
_DIGITS = 4


@dataclass(frozen=True)
class Record:
    """What came of one case.

    Attributes:
        case: what was run.
        losses: of the batches in order, as they were trained on.
        test_loss, test_accuracy: after the last batch; None if the run was given up.
        given_up: why the run stopped before its last batch, if it did.
        seconds: of training, with all stages on one core: not what a pipeline takes.
    """

    case: Case
    losses: tuple[float, ...]
    test_loss: float | None = None
    test_accuracy: float | None = None
    given_up: str | None = None
    seconds: float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "losses", tuple(round(loss, _DIGITS) for loss in self.losses))


@dataclass(frozen=True)
class Measured:
    """How long a batch took in real processes, one thread in each, from batch to batch in the
    middle of the run.
    """

    group: Group
    seconds_per_batch: float


Entry = Record | Measured


class Notebook:
    """The file `records.jsonl` of a folder: one line of JSON for each record, written as soon as it
    is there.

    Raises:
        FileError: the folder cannot be made or written, or the file holds something else.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / "records.jsonl"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with self.path.open("a", encoding="utf-8"):
                pass
            text = self.path.read_text(encoding="utf-8")
            # A line without an end is what a power cut leaves: its case is run again.
            whole = text[: text.rfind("\n") + 1]
            if whole != text:
                self.path.write_text(whole, encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise FileError(
                f"cannot keep records in {folder}: {getattr(error, 'strerror', None) or error}"
            ) from error
        self.records: dict[str, Record] = {}
        self.measured: dict[Group, float] = {}
        for number, line in enumerate(whole.splitlines(), start=1):
            self._take(_read(line, f"{self.path}, line {number}"))

    def add(self, entry: Entry) -> None:
        """Keep one more.

        Raises:
            FileError: the file cannot be written.
        """
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(
                    json.dumps({type(entry).__name__.lower(): asdict(entry)}, separators=(",", ":"))
                    + "\n"
                )
        except OSError as error:
            raise FileError(f"cannot write {self.path}: {error.strerror or error}") from error
        self._take(entry)

    def of(self, cases: Iterable[Case]) -> list[Record]:
        """The records of those cases that have one, in the order of the cases."""
        return [self.records[case.key] for case in cases if case.key in self.records]

    def _take(self, entry: Entry) -> None:
        if isinstance(entry, Record):
            self.records[entry.case.key] = entry
        else:
            self.measured[entry.group] = entry.seconds_per_batch


def _read(line: str, where: str) -> Entry:
    from pydantic import TypeAdapter, ValidationError

    kinds: dict[str, Any] = {"record": Record, "measured": Measured}
    try:
        ((name, value),) = json.loads(line).items()
        entry: Entry = TypeAdapter(kinds[name]).validate_json(json.dumps(value), strict=True)
    except (ValueError, KeyError, AttributeError, RecursionError) as error:
        why = (
            f"{error.errors()[0]['loc']}: {error.errors()[0]['msg']}"
            if isinstance(error, ValidationError)
            else "no such line"
        )
        raise FileError(
            f"{where} is no record of a study ({why}): take another folder, or remove the line"
        ) from error
    return entry
