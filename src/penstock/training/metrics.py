"""Log of a run: one JSON line per step and per epoch; TensorBoard events if it is installed, and a
run of Weights & Biases if the user names a project.
"""

from __future__ import annotations

import importlib.util
import json
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, Self

from penstock.errors import FileError, SettingError

#: File in a run's folder with the id of its run of Weights & Biases, so that a resumed run goes on
#: in it.
_WANDB_ID = "wandb-id.txt"


class _Board(Protocol):
    """A program that shows figures by step."""

    def add(self, figures: Mapping[str, float], step: int) -> None:
        """Show the figures of a step, or of an evaluation after it."""

    def close(self) -> None:
        """Write what has not been written yet."""


class _TensorBoard:
    """Events in the folder `tensorboard` of a run. What an earlier attempt has written of steps
    after `step` is hidden.
    """

    def __init__(self, folder: Path, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1)

    def add(self, figures: Mapping[str, float], step: int) -> None:
        """See `_Board`."""
        for name, value in figures.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """See `_Board`."""
        self._writer.close()


class _WeightsAndBiases:
    """A run in a project of Weights & Biases, which ignores steps that it has already."""

    def __init__(self, project: str, folder: Path) -> None:
        import wandb

        path = folder / _WANDB_ID
        if not path.exists():
            path.write_text(secrets.token_hex(8), encoding="utf-8")
        self._run: Any = wandb.init(
            project=project,
            id=path.read_text(encoding="utf-8").strip(),
            name=folder.name,
            resume="allow",
            dir=str(folder),
        )

    def add(self, figures: Mapping[str, float], step: int) -> None:
        """See `_Board`."""
        self._run.log(dict(figures), step=step)

    def close(self) -> None:
        """See `_Board`."""
        self._run.finish()


def check_wandb(project: str | None) -> None:
    """Refuse a project of Weights & Biases where the package is missing, before anything runs.

    Raises:
        SettingError: it is missing.
    """
    if project is not None and importlib.util.find_spec("wandb") is None:
        raise SettingError("wandb needs the package of that name: pip install wandb")


class Metrics:
    """Writes `metrics.jsonl` in a run's folder; every line is flushed when it is written.

    Args:
        folder: of the run.
        predicted_step_s: seconds of a step as planned, which is shown beside `step_s`.
        step: step from which the run continues. TensorBoard hides what an earlier attempt has
            written of later ones, so that it shows every step once, as `metrics.jsonl` does.
        wandb: project of Weights & Biases; None for none.
    """

    def __init__(
        self,
        folder: Path,
        predicted_step_s: float | None = None,
        step: int = 0,
        wandb: str | None = None,
    ) -> None:
        self._predicted_step_s = predicted_step_s
        self._lines = (folder / "metrics.jsonl").open("a", buffering=1)
        self._boards: list[_Board] = []
        if importlib.util.find_spec("tensorboard") is not None:
            self._boards.append(_TensorBoard(folder, step))
        if wandb is not None:
            self._boards.append(_WeightsAndBiases(wandb, folder))

    def write(self, step: int, **values: object) -> None:
        """Write one line; numbers are shown too, those of a list as `name/0`, `name/1`, ….

        Raises:
            FileError: the line cannot be written, such as on a full disk.
        """
        try:
            self._lines.write(json.dumps({"step": step, **values}) + "\n")
        except OSError as error:
            raise self._write_error(error) from error
        if not self._boards:
            return
        if "step_s" in values:
            values["predicted_step_s"] = self._predicted_step_s
        figures: dict[str, float] = {}
        for name, value in values.items():
            _add_figures(figures, name, value)
        for board in self._boards:
            board.add(figures, step)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, *details: object
    ) -> None:
        try:
            self._lines.close()
        except OSError as close_error:
            # An error of the run itself is not replaced by one of closing its log.
            if error is None:
                raise self._write_error(close_error) from close_error
        for board in self._boards:
            board.close()

    def _write_error(self, error: OSError) -> FileError:
        """Return the error of a line that cannot be written."""
        return FileError(f"cannot write {self._lines.name}: {error.strerror}")


def _add_figures(figures: dict[str, float], name: str, value: object) -> None:
    """Add a number, or the numbers of a list, to the figures of a step."""
    if isinstance(value, (int, float)):
        figures[name] = value
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            _add_figures(figures, f"{name}/{index}", item)
