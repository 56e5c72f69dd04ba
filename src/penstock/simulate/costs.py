"""Costs: what every op of every stage takes, in seconds and bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from numbers import Real

from penstock.errors import SettingError

PerStage = float | Sequence[float] | None


def _is_amount(number: object) -> bool:
    try:
        return isinstance(number, Real) and 0 <= float(number) < float("inf")
    except OverflowError:  # an int beyond the largest float
        return False


@dataclass(frozen=True)
class Costs:
    """Seconds per stage and micro-batch, and bytes where memory is asked for. A single number stands for all stages.

    Attributes:
        forward, backward: seconds of F and of a whole B; when not given, `backward` is the sum of `input_grad` and
            `weight_grad`, or twice `forward` where one of them lacks.
        input_grad, weight_grad: seconds of I and W; when one is not given it is what the other leaves of `backward`, when
            neither is, each is half.
        update: seconds of U.
        transfer: seconds per boundary, in either direction: entry s is between stages s and s + 1.
        transfer_back: seconds per boundary for gradients, when they differ from `transfer`.
        activation_bytes: what one micro-batch keeps on a stage from F to the end of its backward.
        input_bytes: the part of it that is the stage's input: all that recompute keeps.
        weight_bytes: weights, gradients and optimizer state of a stage together.
        boundary_bytes: what crosses a boundary for one micro-batch.
    """

    forward: PerStage = 1.0
    backward: PerStage = None
    input_grad: PerStage = None
    weight_grad: PerStage = None
    update: PerStage = 0.0
    transfer: PerStage = 0.0
    transfer_back: PerStage = None
    activation_bytes: PerStage = None
    input_bytes: PerStage = None
    weight_bytes: PerStage = None
    boundary_bytes: PerStage = None

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            listed = isinstance(value, Sequence) and not isinstance(value, str)
            for number in value if listed else () if value is None else (value,):
                if not _is_amount(number):
                    raise SettingError(f"costs: {field.name} has {number!r}; seconds and bytes are finite and not below 0")
            if listed:
                object.__setattr__(self, field.name, tuple(map(float, value)))

    def spread(self, name: str, count: int) -> tuple[float, ...] | None:
        """The named costs as `count` numbers, or None if they were not given.

        Raises:
            SettingError: there are more or fewer.
        """
        value = getattr(self, name)
        if value is None:
            return None
        if isinstance(value, tuple):
            if len(value) != count:
                raise SettingError(f"costs: {name} has {len(value)} entries, the schedule needs {count}")
            return value
        return (float(value),) * count
