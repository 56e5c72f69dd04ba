"""How often checkpoints are written: after a number of steps, or after some time."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.errors import SettingError
from penstock.files.text import quote
from penstock.units import parse_seconds

#: Digits of a number of steps; Python refuses to read thousands of them.
_MOST_DIGITS = 18


@dataclass(frozen=True)
class Interval:
    """An interval between checkpoints: steps, or seconds, or none.

    Attributes:
        steps: number of trained batches.
        seconds: time, measured by rank 0.
    """

    steps: int | None = None
    seconds: float | None = None

    def passes(self, before: int, after: int) -> bool:
        """Whether a checkpoint is due between two steps: at multiples of the number of steps.

        So a run that was resumed saves at the same steps as one that was not interrupted.
        """
        return self.steps is not None and before // self.steps != after // self.steps


def parse_interval(value: int | str | None) -> Interval:
    """Parse an interval: `500` (steps), `"500"`, `"10min"`, `"2 h"`; None is no interval.

    >>> parse_interval("10min"), parse_interval(500)
    (Interval(steps=None, seconds=600.0), Interval(steps=500, seconds=None))

    Raises:
        SettingError: it is neither a positive number of steps nor a positive time.
    """
    if value is None:
        return Interval()
    text = str(value).strip()
    if text.isdecimal() and text.isascii() and len(text) <= _MOST_DIGITS:
        steps = int(text)
        if steps >= 1 and not isinstance(value, bool):
            return Interval(steps=steps)
    elif isinstance(value, str):
        try:
            seconds = parse_seconds(text)
        except SettingError:
            seconds = 0.0
        # parse_seconds takes "1.5" as seconds; here it could as well be meant as steps.
        if seconds > 0 and text[-1:].isalpha():
            return Interval(seconds=seconds)
    raise SettingError(
        f"{quote(value)} is no interval between checkpoints: write a number of steps, such as 500, "
        "or a time with its unit, such as '10min' or '2h'"
    )
