"""How the devices of a stage share its layers and its state."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from penstock.errors import PlanError

#: Levels of ZeRO among the replicas of a stage; `Sharding` says what each shares.
ZERO_LEVELS = (0, 1, 2, 3)


@final
@dataclass(frozen=True)
class Sharding:
    """Properties of a stage's device group.

    Attributes:
        tensor_parallel: devices that share every layer of a replica.
        sequence_parallel: whether they also share, along the sequence, what lies between.
        zero: level of ZeRO among the replicas of a stage: 1 shares optimizer states, 2 gradients as
            well, 3 parameters as well.

    Raises:
        PlanError: a value is out of its range.
    """

    tensor_parallel: int = 1
    sequence_parallel: bool = False
    zero: int = 0

    def __post_init__(self) -> None:
        if self.tensor_parallel < 1:
            raise PlanError(f"tensor_parallel is {self.tensor_parallel}; it is 1 or more")
        check_zero(self.zero)
        if self.sequence_parallel and self.tensor_parallel == 1:
            raise PlanError(
                "sequence_parallel is for tensor_parallel of 2 or more, and it is 1: leave it out"
            )

    @property
    def words(self) -> str:
        """The properties as text; empty if nothing is shared."""
        words = []
        if self.tensor_parallel > 1:
            words.append(f"tensor parallel {self.tensor_parallel}")
        if self.sequence_parallel:
            words.append("sequence parallel")
        if self.zero:
            words.append(f"ZeRO {self.zero}")
        return ", ".join(words)


def check_zero(zero: int) -> None:
    """Refuse a level of ZeRO that does not exist.

    Raises:
        PlanError: there is no such level.
    """
    if zero not in ZERO_LEVELS:
        raise PlanError(f"zero is {zero!r}; its levels are 0, 1, 2 and 3")


@final
@dataclass(frozen=True)
class ShardingOptions:
    """What a request says about sharing; None leaves it to the planner.

    Attributes:
        tensor_parallel, sequence_parallel, zero: see `Sharding`.
    """

    tensor_parallel: int | None = None
    sequence_parallel: bool | None = None
    zero: int | None = 0
