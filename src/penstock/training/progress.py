"""Progress display with loss, speed, and utilisation of the ranks: a bar on a terminal, elsewhere a
line per epoch.
"""

from __future__ import annotations

import sys
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar


class Progress:
    """Displays a run's progress on standard error."""

    def __init__(self, steps: int, silent: bool) -> None:
        self._silent = silent
        self._console = Console(file=sys.stderr)
        columns = [
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
        ]
        self._bar: Bar | None = None
        self._task: TaskID | None = None
        if not silent and self._console.is_terminal:
            self._bar = Bar(*columns, console=self._console)
            self._task = self._bar.add_task("training", total=steps)
        self._busy = ""  # utilisation of the ranks, as text
        self._status = ""  # of the last step, as text

    def step(self, done: int, loss: float, samples_per_s: float, busy: list[float] | None) -> None:
        """Update the display after a step.

        Args:
            done: steps so far.
            loss: of the step.
            samples_per_s: of the step.
            busy: utilisation per rank, if it was measured.
        """
        if busy is not None:
            self._busy = "  busy " + " ".join(f"{share:.0%}" for share in busy)
        self._status = f"loss {loss:.4f}  {samples_per_s:.1f} samples/s{self._busy}"
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=done, description=self._status)

    def epoch(self, number: int, loss: float, accuracy: float | None) -> None:
        """Print a line after an epoch's evaluation, with the accuracy if there is one."""
        if not self._silent:
            result = f"loss {loss:.4g}" if accuracy is None else f"accuracy {accuracy:.2%}"
            self._console.print(f"epoch {number}: {self._status}  test {result}", highlight=False)

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *details: object) -> None:
        if self._bar is not None:
            self._bar.stop()
