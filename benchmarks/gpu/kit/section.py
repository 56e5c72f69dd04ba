"""What a section is given: its device, its clock, and where its rows go."""

from __future__ import annotations

import gc
import json
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from kit.results import Row, plain

#: Seconds before its limit at which a section begins nothing new.
RESERVE_S = 3.0


@dataclass
class Section:
    """One section, in the process that runs it.

    Attributes:
        name: such as "facts".
        device: "cuda:0" or "cpu".
        smoke: small sizes, which only show that everything runs.
        out: the folder of the run, for files that come back.
        rows_file: one JSON object per line, flushed line by line.
        limit_s: seconds after which it is killed.
        earlier: rows of the sections before, by section.
    """

    name: str
    device: torch.device
    smoke: bool
    out: Path
    rows_file: Path
    limit_s: float
    earlier: Mapping[str, Sequence[Row]] = field(default_factory=dict)
    started: float = field(default_factory=time.monotonic)
    written: list[Row] = field(default_factory=list)

    @property
    def on_gpu(self) -> bool:
        """Whether CUDA is measured."""
        return self.device.type == "cuda"

    def seconds_left(self) -> float:
        """Until nothing new should begin."""
        return self.limit_s - RESERVE_S - (time.monotonic() - self.started)

    def row(self, name: str, status: str = "measured", **values: Any) -> Row:
        """Write a row; it stays whatever happens afterwards."""
        row: Row = plain({"row": name, "status": status, **values})
        with self.rows_file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row, allow_nan=False) + "\n")
        self.written.append(row)
        return row

    def require_right(self) -> None:
        """End as failed if a row is wrong or could not be measured: for sections that are about
        what is right.

        Raises:
            RuntimeError: naming these rows.
        """
        bad = [row["row"] for row in self.written if row["status"] in ("wrong", "failed")]
        if bad:
            raise RuntimeError(f"wrong or failed: {', '.join(bad)}")

    def attempt(self, name: str, work: Callable[[], Mapping[str, Any]], least_s: float = 0) -> None:
        """Write the row that `work` returns the values of; if it raises, a row that says so.

        Args:
            name: of the row.
            work: returns the row's values, `status` among them if it is not "measured".
            least_s: seconds that have to be left.
        """
        if self.seconds_left() < least_s:
            self.row(name, "skipped", note="out of time")
            return
        try:
            self.row(name, **work())
        except Exception as error:  # noqa: BLE001 - one row is lost, not the section
            traceback.print_exc()
            self.row(name, "failed", note=words_of(error))
            self.free()

    def needs_gpu(self, *names: str) -> bool:
        """Whether there is a GPU; without one the rows are written as not measurable here."""
        if not self.on_gpu:
            for name in names:
                self.row(name, "not on this machine")
        return self.on_gpu

    def found(self, section: str, row: str) -> Row:
        """A measured row of an earlier section, or an empty one."""
        rows = self.earlier.get(section, ())
        fitting = (item for item in rows if item["row"] == row and item["status"] == "measured")
        return next(fitting, {})

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.on_gpu:
            torch.cuda.synchronize(self.device)

    def free(self) -> None:
        """Give memory that nothing uses back to the device. An exception's traceback may have held
        it in a cycle.
        """
        gc.collect()
        if self.on_gpu:
            torch.cuda.empty_cache()


def words_of(error: BaseException) -> str:
    """An error in one line."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:300]}"
