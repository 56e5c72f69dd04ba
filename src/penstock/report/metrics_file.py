"""Read `metrics.jsonl` of a training run: a line per step and per epoch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.errors import FileError
from penstock.files.json_values import json_value
from penstock.files.text import read_text

#: A run of a million steps has 150 MB.
_MAX_BYTES = 2**30

#: Lines that are parsed at once, which takes half the time of one by one.
_LINES_AT_ONCE = 1000

Values = dict[str, Any]


@dataclass(frozen=True)
class RunMetrics:
    """Values of a run, by step in ascending order.

    Attributes:
        steps: values of the steps, such as `loss`.
        epochs: values of the evaluations after the epochs, such as `test_loss`.
    """

    steps: dict[int, Values]
    epochs: dict[int, Values]

    def curve(self, name: str, *, epochs: bool = False) -> tuple[list[float], list[float]]:
        """Return the steps and the values of one number, where it was recorded."""
        rows = self.epochs if epochs else self.steps
        x: list[float] = []
        y: list[float] = []
        for step, values in rows.items():
            value = values.get(name)
            if isinstance(value, int | float) and not isinstance(value, bool):
                x.append(float(step))
                y.append(float(value))
        return x, y


def read_metrics(path: Path) -> RunMetrics:
    """Read the metrics of a run.

    A last line without its end is what a killed run leaves, and is ignored. Of two lines of the same
    step the later counts: a resumed run repeats the steps after its checkpoint.

    Raises:
        FileError: the file cannot be read, or a line is no record of a step.
    """
    text = read_text(path, "metrics", _MAX_BYTES)
    steps: dict[int, Values] = {}
    epochs: dict[int, Values] = {}
    complete = text[: text.rfind("\n") + 1]
    for number, values in enumerate(_parse_lines(complete.split("\n")[:-1], path), start=1):
        if not isinstance(values, dict) or type(values.get("step")) is not int:
            raise FileError(
                f"{path}, line {number} is no record of a step: it has no integer 'step'"
            )
        rows = epochs if "epoch" in values else steps
        rows[values["step"]] = values
    return RunMetrics(dict(sorted(steps.items())), dict(sorted(epochs.items())))


def _parse_lines(lines: list[str], path: Path) -> list[Any]:
    """Return the values of JSON lines.

    Raises:
        FileError: a line is not JSON.
    """
    values: list[Any] = []
    for first in range(0, len(lines), _LINES_AT_ONCE):
        part = lines[first : first + _LINES_AT_ONCE]
        try:
            together = json_value(f"[{','.join(part)}]", str(path), finite=False)
        except FileError:
            together = []
        if len(together) != len(part):
            # One line is damaged, or the whole is too long: read it line by line.
            together = [
                json_value(line, f"{path}, line {number}", finite=False)
                for number, line in enumerate(part, start=first + 1)
            ]
        values += together
    return values
