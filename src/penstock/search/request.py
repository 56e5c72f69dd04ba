"""What a planner is asked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, final

from penstock.cluster.cluster import Cluster
from penstock.errors import PlanError
from penstock.plan import Recompute
from penstock.profile.profile import Profile
from penstock.schedule.catalogue import FAMILIES, ScheduleFacts, schedules
from penstock.simulate.simulate import RECOMPUTE


@final
@dataclass(frozen=True)
class PlanRequest:
    """A model, a cluster, a batch, and what the plan may and must be. None leaves the planner free.

    `memory_limit` is in bytes for every rank, besides what its device has. `recompute` is one of `RECOMPUTE`, or "auto".
    `by` says how to cut: a partition method's name, or the lengths of the stages (`stages` is then their number).

    Raises:
        PlanError: a number is out of its range, or a schedule is asynchronous.
        UnknownName: no schedule has such a name.
    """

    profile: Profile
    cluster: Cluster
    batch: int
    schedules: tuple[str, ...] | None = None
    memory_limit: int | None = None
    recompute: Recompute | Literal["auto"] = "auto"
    budget_s: float = 10.0
    stages: int | None = None
    micro_batches: int | None = None
    by: str | tuple[int, ...] = "bottleneck"

    def __post_init__(self) -> None:
        layers = len(self.profile)
        if not isinstance(self.by, str):
            if self.stages not in (None, len(self.by)):
                raise PlanError(f"the cut {list(self.by)} has {len(self.by)} stages, but {self.stages} are asked for")
            object.__setattr__(self, "stages", len(self.by))
        for name, number, most, of in (
            ("batch", self.batch, None, ""),
            ("stages", self.stages, layers, "layers"),
            ("micro_batches", self.micro_batches, self.batch, "samples in the batch"),
            ("memory_limit", self.memory_limit, None, ""),
        ):
            if number is None:
                continue
            if isinstance(number, bool) or not isinstance(number, int) or number < 1:
                raise PlanError(f"{name} is {number!r}; it must be a whole number of 1 or more")
            if most is not None and number > most:
                raise PlanError(f"{name} is {number}, but there are only {most} {of}")
        if layers == 0:
            raise PlanError("the profile has no layers: there is nothing to plan")
        if self.recompute != "auto" and self.recompute not in RECOMPUTE:
            raise PlanError(f"recompute is {self.recompute!r}; it must be one of auto, {', '.join(RECOMPUTE)}")
        if not self.budget_s >= 0:
            raise PlanError(f"budget_s is {self.budget_s!r}; it must be 0 s or more")
        self.families()

    def families(self) -> tuple[ScheduleFacts, ...]:
        """The schedules to weigh: those asked for, in that order and each once, or all synchronous ones that any model can run.

        Slices of sequences need a causal model, which a profile does not tell: they are weighed when asked for; so are schedules
        with copies of stages.

        Raises:
            PlanError: one that was asked for is asynchronous, or the list is empty.
            UnknownName: there is no such schedule.
        """
        known = schedules()
        if self.schedules is None:
            return tuple(facts for facts in known.values() if facts.synchronous and not facts.causal)
        asked = tuple(known[name] for name in dict.fromkeys(FAMILIES.find(name).name for name in self.schedules))
        late = [facts.name for facts in asked if not facts.synchronous]
        if late:
            raise PlanError(f"{', '.join(late)}: asynchronous schedules cannot be planned yet; name synchronous ones")
        if not asked:
            raise PlanError("schedules is empty: name at least one, or leave it out to weigh all")
        return asked

    def memory_bytes(self, rank: int) -> int:
        """What rank `rank` may hold."""
        has = self.cluster.devices[rank].memory_bytes
        return has if self.memory_limit is None else min(has, self.memory_limit)
