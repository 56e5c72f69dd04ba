"""Log of a run: one JSON line per step and per epoch, and TensorBoard events if it is installed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Self

from penstock.errors import FileError


class Metrics:
    """Writes `metrics.jsonl` in a run's folder; every line is flushed when it is written.

    Args:
        folder: of the run.
        predicted_step_s: seconds of a step as planned, which TensorBoard shows beside `step_s`.
        step: step from which the run continues. TensorBoard hides what an earlier attempt has
            written of later ones, so that it shows every step once, as `metrics.jsonl` does.
    """

    def __init__(self, folder: Path, predicted_step_s: float | None = None, step: int = 0) -> None:
        self._predicted_step_s = predicted_step_s
        self._lines = (folder / "metrics.jsonl").open("a", buffering=1)
        self._board: Any = None
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            return
        self._board = SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1)

    def write(self, step: int, **values: object) -> None:
        """Write one line; numbers go to TensorBoard too, those of a list as `name/0`, `name/1`, ….

        Raises:
            FileError: the line cannot be written, such as on a full disk.
        """
        try:
            self._lines.write(json.dumps({"step": step, **values}) + "\n")
        except OSError as error:
            raise self._write_error(error) from error
        if self._board is None:
            return
        for name, value in values.items():
            self._add_to_board(name, value, step)
        if "step_s" in values:
            self._add_to_board("predicted_step_s", self._predicted_step_s, step)

    def _add_to_board(self, name: str, value: object, step: int) -> None:
        """Add a number, or the numbers of a list, to TensorBoard."""
        if isinstance(value, (int, float)):
            self._board.add_scalar(name, value, step)
        elif isinstance(value, (list, tuple)):
            for index, item in enumerate(value):
                self._add_to_board(f"{name}/{index}", item, step)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, *details: object
    ) -> None:
        try:
            self._lines.close()
        except OSError as close_error:
            if error is None:
                raise self._write_error(close_error) from close_error
        if self._board is not None:
            self._board.close()

    def _write_error(self, error: OSError) -> FileError:
        """Return the error of a line that cannot be written."""
        return FileError(f"cannot write {self._lines.name}: {error.strerror}")
