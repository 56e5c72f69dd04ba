"""A progress bar with loss, speed, and how busy the stages are; on a terminal a bar, elsewhere a
line per epoch.
"""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar


class Progress:
    """Shows how far a run is, on standard error."""

    def __init__(self, steps: int, silent: bool) -> None:
        self._silent = silent
        self._console = Console(file=sys.stderr)
        columns = [
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
        ]
        self._bar = (
            None
            if silent or not self._console.is_terminal
            else Bar(*columns, console=self._console)
        )
        self._task = self._bar.add_task("training", total=steps) if self._bar is not None else None
        self._busy = ""
        self._last = ""

    def step(self, done: int, loss: float, samples_per_s: float, busy: list[float] | None) -> None:
        """After a step. `busy` is given now and then."""
        if busy is not None:
            self._busy = "  busy " + " ".join(f"{share:.0%}" for share in busy)
        self._last = f"loss {loss:.4f}  {samples_per_s:.1f} samples/s{self._busy}"
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=done, description=self._last)

    def epoch(self, number: int, accuracy: float) -> None:
        """After an epoch's evaluation."""
        if not self._silent:
            self._console.print(
                f"epoch {number}: {self._last}  test accuracy {accuracy:.2%}", highlight=False
            )

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
