"""results.json: its schema, and how it is written."""

from __future__ import annotations

import json
import math
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

SCHEMA = 1

#: What a section can come to.
STATUSES = ("passed", "failed", "timeout", "crashed", "skipped")

#: What a row can come to. "wrong" is a system whose gradients are not those of plain training.
ROW_STATUSES = ("measured", "wrong", "failed", "skipped", "not on this machine")

Row = dict[str, Any]


@dataclass
class SectionResult:
    """One section of a run. `error`: the last lines of its output, or why it was skipped."""

    name: str
    status: str
    seconds: float = 0.0
    error: str | None = None
    rows: list[Row] = field(default_factory=list)
    conditions: dict[str, Any] = field(default_factory=dict)


@dataclass
class Results:
    """A whole run."""

    kit: str
    device: str
    smoke: bool
    limit_s: float
    machine: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0
    ended: str = "running"
    sections: list[SectionResult] = field(default_factory=list)
    expected: list[Row] = field(default_factory=list)

    def as_json(self) -> str:
        """The file's text."""
        return json.dumps({"schema": SCHEMA, **asdict(self)}, indent=1, allow_nan=False) + "\n"

    def write(self, path: Path) -> None:
        """Replace the file in one step: a reader sees the old text or the new one."""
        part = path.with_suffix(".part")
        part.write_text(self.as_json(), encoding="utf-8")
        os.replace(part, path)  # noqa: PTH105 - the call that POSIX makes atomic, by its name


def plain(value: Any) -> Any:
    """A value as JSON has it: numbers that are not finite become text, tensors and paths too."""
    if isinstance(value, bool) or value is None or isinstance(value, (str, int)):
        return value
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else str(value)
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return str(value)


def read_rows(path: Path) -> tuple[list[Row], int]:
    """The rows that a section has written, and the number of lines that are no rows.

    A section that was killed may leave half a line, and a broken one may leave anything.
    """
    rows: list[Row] = []
    broken = 0
    text = path.read_bytes().decode("utf-8", errors="replace") if path.exists() else ""
    for line in text.splitlines():
        row = _row_of(line)
        if row is None:
            broken += 1
        else:
            rows.append(row)
    return rows, broken


def _row_of(line: str) -> Row | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(row, dict) or not isinstance(row.get("row"), str):
        return None
    has_status = row.get("status") in ROW_STATUSES
    return plain(row) if has_status else None
