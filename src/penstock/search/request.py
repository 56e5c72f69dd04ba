"""What a planner is asked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, final

from penstock.cluster.cluster import Cluster
from penstock.errors import PlanError, SettingError
from penstock.plan.plan import Recompute
from penstock.profile.paced import Profiles, profiles_of, with_optimizer_states
from penstock.profile.profile import Profile
from penstock.schedule.catalogue import FAMILIES, ScheduleFacts, schedules
from penstock.simulate.simulate import RECOMPUTE
from penstock.weights.catalogue import WeightRule, weight_rule
from penstock.weights.choice import does_not_go, schedule_for

#: Numbers of micro-batches that are tried: doubling more gains little bubble and pays every call's
#: fixed cost.
MICRO_BATCHES = tuple(2**power for power in range(13))

#: Micro-batches of one pipeline beyond this many gain little.
MOST_IN_A_PIPELINE = 64


@final
@dataclass(frozen=True)
class PlanRequest:
    """A model, a cluster, a batch, and what the plan may and must be. None leaves the planner free.

    `profiles` is one profile, or one for every kind of device (`profiles_of`). `max_replicas` is
    the most copies of a stage, which a schedule that is named may have all the same if it is made
    of copies, as Chimera is. `memory_limit` is in bytes for every rank, besides what its device
    has. `recompute` is one of `RECOMPUTE`, or "auto". `by` says how to cut: a partition method's
    name, or the lengths of the stages (`stages` is then their number). `asynchronous` says to weigh
    asynchronous schedules too. `weights` is the weight rule, where it is not to be each schedule's
    own, and `weights_options` is what that is given. `optimizer` is the name of torch's class,
    where it is known, and `optimizer_states` the numbers that it keeps for each parameter; by
    default as many as the profiles say.

    Raises:
        PlanError: a number is out of its range, or the weight rule does not go with the schedules.
        UnknownName: no schedule or weight rule has such a name.
        SettingError: the weight rule has no such option, or no formula for the optimizer.
    """

    profiles: Profiles
    cluster: Cluster
    batch: int
    schedules: tuple[str, ...] | None = None
    memory_limit: int | None = None
    recompute: Recompute | Literal["auto"] = "auto"
    budget_s: float = 10.0
    stages: int | None = None
    micro_batches: int | None = None
    by: str | tuple[int, ...] = "bottleneck"
    asynchronous: bool = False
    weights: str | None = None
    weights_options: tuple[tuple[str, float], ...] = ()
    optimizer: str | None = None
    max_replicas: int | None = None
    optimizer_states: float | None = None

    def __post_init__(self) -> None:
        layers = len(self.profile)
        if not isinstance(self.by, str):
            if self.stages not in (None, len(self.by)):
                raise PlanError(
                    f"the cut {list(self.by)} has {len(self.by)} stages, but {self.stages} are asked for"
                )
            object.__setattr__(self, "stages", len(self.by))
        for name, number, most, of in (
            ("batch", self.batch, None, ""),
            ("stages", self.stages, layers, "layers"),
            ("micro_batches", self.micro_batches, self.batch, "samples in the batch"),
            ("memory_limit", self.memory_limit, None, ""),
            ("max_replicas", self.max_replicas, None, ""),
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
            raise PlanError(
                f"recompute is {self.recompute!r}; it must be one of auto, {', '.join(RECOMPUTE)}"
            )
        if not self.budget_s >= 0:
            raise PlanError(f"budget_s is {self.budget_s!r}; it must be 0 s or more")
        for facts in self.families():
            rule = weight_rule(self.weights or facts.weights)
            rule.with_defaults(dict(self.weights_options))
            if rule.synchronous != facts.synchronous:
                raise PlanError(does_not_go(rule.name, facts.name, facts.synchronous))
            if not self._has_formula(rule):
                raise SettingError(
                    f"weight rule {rule.name!r} has no formula for {self.optimizer}: {rule.because}; it goes with "
                    f"{', '.join(rule.optimizers)}"
                )

    def families(self) -> tuple[ScheduleFacts, ...]:
        """The schedules to weigh: those asked for, in that order and each once; or all that any
        model can run, asynchronous ones only where those are asked for, and with a weight rule only
        such as it goes with.

        Slices of sequences need a causal model, which a profile does not tell: they are weighed
        when asked for; so are schedules with copies of stages.

        Raises:
            PlanError: the list is empty.
            UnknownName: there is no such schedule or weight rule.
        """
        known = schedules()
        if self.schedules is not None:
            if not self.schedules:
                raise PlanError(
                    "schedules is empty: name at least one, or leave it out to weigh all"
                )
            return tuple(
                known[name]
                for name in dict.fromkeys(FAMILIES.find(name).name for name in self.schedules)
            )
        kinds = {True, not self.asynchronous}
        if self.weights is not None:
            kinds = {weight_rule(self.weights).synchronous}
            if kinds == {False} and not self.asynchronous:
                return (known[schedule_for(self.weights)],)
        return tuple(
            facts
            for facts in known.values()
            if facts.synchronous in kinds
            and not facts.causal
            and (self.weights or self._has_formula(weight_rule(facts.weights)))
        )

    def _has_formula(self, rule: WeightRule) -> bool:
        """Whether the rule's paper covers the optimizer, as far as that is known."""
        return self.optimizer is None or not rule.optimizers or self.optimizer in rule.optimizers

    @cached_property
    def profile(self) -> Profile:
        """What the layers cost on the cluster's first device."""
        return self._profiles[0]

    @cached_property
    def _profiles(self) -> tuple[Profile, ...]:
        found = profiles_of(self.profiles, self.cluster)
        if self.optimizer_states is None:
            return found
        return with_optimizer_states(found, self.optimizer_states)

    def profile_of(self, rank: int) -> Profile:
        """What the layers cost on the device of the cluster's rank `rank`; one object for all
        devices of a kind.
        """
        return self._profiles[rank]

    def micro_batch_counts(self, pipelines: int = 1) -> tuple[int, ...]:
        """The numbers of micro-batches to try, ascending: powers of two up to the batch, no more
        than 64 for each of so many pipelines; or the one that is asked for.
        """
        if self.micro_batches is not None:
            return (self.micro_batches,)
        most = min(self.batch, MOST_IN_A_PIPELINE * pipelines)
        return tuple(count for count in MICRO_BATCHES if count <= most)

    def on(self, devices: Sequence[int]) -> PlanRequest:
        """The same question about some of the cluster's devices, in this order."""
        kinds = {self.cluster.devices[rank].name: self.profile_of(rank) for rank in devices}
        return replace(self, profiles=kinds, cluster=self.cluster.on(devices))

    @cached_property
    def single_copies(self) -> dict[int, str]:
        """The layers that several ranks cannot hold at once, by their places, and why."""
        return {
            index: layer.single_copy_reason
            for index, layer in enumerate(self.profile.layers)
            if layer.single_copy_reason
        }

    @property
    def copies_allowed(self) -> int:
        """The most copies of a stage; one, if there is a layer that cannot have any."""
        most = self.cluster.ranks if self.max_replicas is None else self.max_replicas
        return 1 if self.single_copies else min(most, self.cluster.ranks)

    @property
    def held_per_parameter_byte(self) -> float:
        """Bytes of weights, their gradients and the optimizer's numbers for each byte of
        parameters: what `stage_costs` counts.
        """
        return 2 + self.profile.optimizer_states

    def memory_bytes(self, rank: int) -> int:
        """What rank `rank` may hold."""
        has = self.cluster.devices[rank].memory_bytes
        return has if self.memory_limit is None else min(has, self.memory_limit)
