"""Log of a run: one JSON line per step and per epoch, and TensorBoard events if it is installed."""

from __future__ import annotations

import json
from pathlib import Path
from types import TracebackType
from typing import Any, Self


class Metrics:
    """Writes `metrics.jsonl` in a run's folder; every line is flushed when it is written."""

    def __init__(self, folder: Path) -> None:
        self._lines = (folder / "metrics.jsonl").open("a", buffering=1)
        self._board: Any = None
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            return
        self._board = SummaryWriter(str(folder / "tensorboard"))

    def write(self, step: int, **values: object) -> None:
        """Write one line; numbers go to TensorBoard too."""
        self._lines.write(json.dumps({"step": step, **values}) + "\n")
        for name, value in values.items():
            if self._board is not None and isinstance(value, (int, float)):
                self._board.add_scalar(name, value, step)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._lines.close()
        if self._board is not None:
            self._board.close()
