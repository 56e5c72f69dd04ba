"""What a planner proposes: a cut, a schedule and devices, for `evaluate` to simulate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, final

from penstock.plan.plan import Option
from penstock.plan.prediction import Objective
from penstock.schedule.recompute import Recompute

__all__ = ["Objective", "Proposal", "replica_options"]


@final
@dataclass(frozen=True)
class Proposal:
    """Where to cut a model, how to schedule it, and on which devices.

    Attributes:
        lengths: number of layers in every stage.
        schedule: name of a schedule of the catalogue, or of one that is built from costs.
        micro_batches: number of micro-batches in a batch.
        options: further options of the schedule. `("replicas", 4)` asks for four whole pipelines,
            `("replicas", (2, 1))` for that number of ranks per stage.
        recompute: "never", "except_last", "always", "selective", or "auto": as little as fits.
        weights: name of the weight rule; None is the schedule's default.
        devices: per rank of the schedule, the rank of the cluster; empty for rank r on rank r.
        objective: what the planner's own paper minimizes.
    """

    lengths: tuple[int, ...]
    schedule: str
    micro_batches: int
    options: tuple[tuple[str, Option], ...] = ()
    recompute: Recompute | Literal["auto"] = "auto"
    weights: str | None = None
    devices: tuple[int, ...] = ()
    objective: Objective | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "recompute", Recompute.parse_or_auto(self.recompute))

    @property
    def stages(self) -> int:
        """Number of stages."""
        return len(self.lengths)

    @property
    def replicas(self) -> int | tuple[int, ...]:
        """Number of whole pipelines, or of ranks per stage."""
        replicas = dict(self.options).get("replicas", 1)
        return replicas if isinstance(replicas, (int, tuple)) else 1


def replica_options(replicas: int | tuple[int, ...]) -> tuple[tuple[str, Option], ...]:
    """Return the option of a schedule for replicas; none where every stage is on one rank.

    >>> replica_options(1), replica_options((1, 1)), replica_options((2, 1))
    ((), (), (('replicas', (2, 1)),))

    Args:
        replicas: number of whole pipelines, or of ranks per stage.
    """
    numbers = {replicas} if isinstance(replicas, int) else set(replicas)
    return () if numbers == {1} else (("replicas", replicas),)
