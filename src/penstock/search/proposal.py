"""A way to run, as a planner puts it forward: what `score` simulates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, final

from penstock.plan.plan import Objective, Option, Recompute

__all__ = ["Objective", "Proposal"]


@final
@dataclass(frozen=True)
class Proposal:
    """Where to cut, how to schedule it, and on which devices.

    Attributes:
        lengths: layers in every stage.
        schedule: name of a schedule of the catalogue, or of one that is made to measure.
        micro_batches: parts of a batch.
        options: what the schedule takes besides; a hybrid has `("replicas", 4)` for so many whole
        pipelines, or
            `("replicas", (2, 1))` for ranks per stage.
        recompute: "never", "except_last", "always", "selective", or "auto": as little as fits.
        weights: name of the weight rule; None is the schedule's own.
        devices: the cluster's rank that each rank of the schedule is; empty: rank r is r.
        objective: what the planner's own paper makes least.
    """

    lengths: tuple[int, ...]
    schedule: str
    micro_batches: int
    options: tuple[tuple[str, Option], ...] = ()
    recompute: Recompute | Literal["auto"] = "auto"
    weights: str | None = None
    devices: tuple[int, ...] = ()
    objective: Objective | None = None

    @property
    def stages(self) -> int:
        """Number of stages."""
        return len(self.lengths)

    @property
    def replicas(self) -> int | tuple[int, ...]:
        """Whole pipelines, or ranks for every stage."""
        found = dict(self.options).get("replicas", 1)
        return found if isinstance(found, (int, tuple)) else 1
