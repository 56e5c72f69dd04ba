"""The file `records.jsonl` of a study's folder: one JSON object per line, only ever appended to."""

from __future__ import annotations

import json
import threading
from dataclasses import asdict
from pathlib import Path
from typing import Any, Generic, TypeVar

from penstock.errors import FileError
from penstock.files.read import parse_json
from penstock.files.text import read_text

#: A dataclass of which each line sets exactly one field; the others are None.
Line = TypeVar("Line", bound=Any)

#: 9,775 steps per repetition with time and loss take 0.4 MB; a study of 1,000 such cells is larger
#: than other files that are read.
_MAX_BYTES = 2**30


class RecordLines(Generic[Line]):
    """The lines of the file, which is made if it does not exist.

    An incomplete last line, which a power cut leaves, is dropped, so that its cell runs again.

    Args:
        folder: of the study; made if it does not exist.
        kind: class of the lines.

    Attributes:
        path: of the file.
        lines: those that the file had when it was opened.

    Raises:
        FileError: the folder cannot be made or written, or the file has a line that is no record.
    """

    def __init__(self, folder: Path, kind: type[Line]) -> None:
        self.path = folder / "records.jsonl"
        self._lock = threading.Lock()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with self.path.open("a", encoding="utf-8"):
                pass
            text = read_text(self.path, "records of the study", _MAX_BYTES)
            complete = text[: text.rfind("\n") + 1]
            if complete != text:
                # The next record would continue the incomplete line.
                self.path.write_text(complete, encoding="utf-8")
        except OSError as error:
            reason = error.strerror or error
            raise FileError(f"cannot store records in {folder}: {reason}") from error
        self.lines: list[Line] = []
        for number, line in enumerate(complete.splitlines(), start=1):
            self.lines.append(_parse_line(line, kind, self.location(number)))

    def location(self, number: int) -> str:
        """Return the place of a line, counted from 1, for messages."""
        return f"{self.path}, line {number}"

    def append(self, line: Line) -> None:
        """Write a line at the end of the file. Threads may call it at the same time.

        Raises:
            FileError: it cannot be written.
        """
        values = {name: value for name, value in asdict(line).items() if value is not None}
        text = json.dumps(values, separators=(",", ":")) + "\n"
        try:
            with self._lock, self.path.open("a", encoding="utf-8") as file:
                file.write(text)
        except OSError as error:
            raise FileError(f"cannot write {self.path}: {error.strerror or error}") from error


def _parse_line(text: str, kind: type[Line], location: str) -> Line:
    """Parse a line of the file.

    Raises:
        FileError: the line is no record; the message names `location`.
    """
    try:
        # A run that diverged has losses that are not finite.
        line = parse_json(text, kind, location, kind="record of a study", finite=False)
    except FileError as error:
        raise FileError(f"{error}: use another folder, or remove the line") from error
    if sum(value is not None for value in vars(line).values()) != 1:
        keys = " or ".join(map(repr, vars(line)))
        raise FileError(
            f"{location} is no record of a study: it must have {keys}: use another folder, or "
            "remove the line"
        )
    return line
