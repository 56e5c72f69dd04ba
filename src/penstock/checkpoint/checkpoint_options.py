"""Options of saving and loading, and the parts of a checkpoint that `load` can skip."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from penstock.checkpoint.checkpoint_index import RuleFacts
from penstock.errors import SettingError
from penstock.optim.schedulers import Schedulers
from penstock.stage.stage import Stage

#: The parts of a checkpoint that `load` can skip. Skipping the optimizer skips all others too.
PARTS = ("optimizer", "schedulers", "scaler", "weight_rule", "averages")


class WeightAverage(Protocol):
    """A running average of the weights."""

    @property
    def n_averaged(self) -> int:
        """The number of updates so far."""
        ...

    def averaged(self, stage: Stage) -> dict[str, Tensor]:
        """Return the live averaged tensors of a local stage, by the names of the model."""
        ...

    def restart(self, count: int) -> None:
        """Set the number of updates; at 0 the next one copies the weights."""
        ...


@dataclass(frozen=True)
class CheckpointOptions:
    """Options of `save` and `load`.

    Attributes:
        rule: the weight rule of an asynchronous run.
        copies: the number of copies of each stage that have their own optimizers.
        nonfinite: whether NaN is allowed in parameters and optimizer state.
        skip: the `PARTS` that `load` leaves unchanged.
        schedulers: the learning-rate schedulers of the pipeline that loads.
        scaler: whether that pipeline has a loss scaler.
        averages: the running averages of the weights.
    """

    rule: RuleFacts | None = None
    copies: int = 1
    nonfinite: bool = False
    skip: frozenset[str] = frozenset()
    schedulers: Sequence[Schedulers] = ()
    scaler: bool = False
    averages: Sequence[WeightAverage] = ()


def parse_skip(skip: str | Collection[str]) -> frozenset[str]:
    """Return the parts of a checkpoint that the user's `skip=` names.

    Raises:
        SettingError: a name is not one of `PARTS`.
    """
    names = {skip} if isinstance(skip, str) and skip else set(skip)
    for name in names:
        if name not in PARTS:
            raise SettingError(f"skip is any of {', '.join(PARTS)}, not {name!r}")
    return frozenset(PARTS if "optimizer" in names else names)
