"""The request that a planner answers: a model, a cluster, a batch and constraints on the plan."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal, final

import numpy as np

from penstock.cluster.cluster import Cluster
from penstock.errors import PlanError, SettingError
from penstock.plan.sharding import Sharding, ShardingOptions
from penstock.profile.device_profiles import (
    Profiles,
    profiles_of,
    scale_profile,
    with_optimizer,
)
from penstock.profile.profile import PHASES, Phase, Profile
from penstock.schedule.arrays import Array
from penstock.schedule.catalogue import FAMILIES, ScheduleFacts, schedules
from penstock.schedule.recompute import Recompute
from penstock.synthesis.deadline import Deadline
from penstock.weights.catalogue import WeightRule, weight_rule
from penstock.weights.compatibility import mismatch_message, schedule_for

#: Numbers of micro-batches that are tried where no divisor of the batch is near. Doubling beyond
#: these shrinks the bubble little and pays the fixed cost of every call again.
MICRO_BATCHES = tuple(2**power for power in range(13))

#: More micro-batches per pipeline than this gain little.
MOST_IN_A_PIPELINE = 64


#: Up to this many samples, every divisor of the batch is a number of micro-batches to try.
FEW_SAMPLES = 64

#: Samples of a batch at most. Planners search its divisors, and schedules of a step of that many
#: micro-batches on 4 stages have 8 million ops.
MAX_BATCH = 2**20


@final
@dataclass(frozen=True)
class PlanRequest:
    """A model, a cluster, a batch, and constraints on the plan. None leaves the planner free.

    Attributes:
        profiles: one profile, or one per kind of device (see `profiles_of`).
        cluster: the devices and links to plan for.
        batch: samples in a batch.
        schedules: names of the schedules to consider.
        memory_limit: bytes for every rank, on top of the limit of its device.
        recompute: a policy, or "auto".
        budget_s: seconds that a search may take; the work that it may do follows from them.
        stages: number of stages.
        micro_batches: number of micro-batches in a batch.
        by: how to partition: the name of a partition method, or the lengths of the stages (`stages`
            is then their number).
        asynchronous: also consider asynchronous schedules.
        weights: the weight rule or its name, to replace the default of each schedule.
        weights_options: options of the weight rule.
        optimizer: name of the torch optimizer class, where it is known.
        max_replicas: maximum number of replicas of a stage. A schedule requested by name that
            consists of replicas, such as Chimera, may exceed it.
        optimizer_states: numbers that the optimizer keeps per parameter; by default the count that
            the profiles say.
        optimizer_fused: whether its step is one kernel.
        sharding: of the devices; the profile and the cluster are those of its groups.
        sharding_options: what the planner may choose there.
        deadline: the hard stop of the search that the request belongs to; None if it has none.

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
    optimizer_fused: bool = False
    sharding: Sharding = field(default_factory=Sharding)
    sharding_options: ShardingOptions = field(default_factory=ShardingOptions)
    deadline: Deadline | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        if not isinstance(self.by, str):
            if self.stages not in (None, len(self.by)):
                raise PlanError(
                    f"the cut {list(self.by)} has {len(self.by)} stages, but {self.stages} are "
                    "requested"
                )
            object.__setattr__(self, "stages", len(self.by))
        self._check_numbers()
        if self.batch > MAX_BATCH:
            raise PlanError(
                f"a batch of {self.batch:,} samples is more than {MAX_BATCH:,}: planners try each "
                "of its divisors as micro-batches. Plan for the samples of one step"
            )
        if len(self.profile) == 0:
            raise PlanError("the profile has no layers: there is nothing to plan")
        object.__setattr__(self, "recompute", Recompute.parse_or_auto(self.recompute))
        if not self.budget_s >= 0:
            raise PlanError(f"budget_s is {self.budget_s!r}; it must be 0 s or more")
        self._parse_names()
        for facts in self.families():
            self._check_weight_rule(facts)

    def _parse_names(self) -> None:
        """Replace aliases of schedules and of the weight rule by their names in the catalogues.

        Raises:
            PlanError: the list of schedules is empty.
            UnknownName: there is no such schedule or weight rule.
        """
        if self.rule is not None:
            object.__setattr__(self, "weights", self.rule.name)
        if self.schedules is None:
            return
        if not self.schedules:
            raise PlanError(
                "schedules is empty: name at least one, or leave it out to consider all"
            )
        names = dict.fromkeys(FAMILIES.find(name).name for name in self.schedules)
        object.__setattr__(self, "schedules", tuple(names))

    def _check_numbers(self) -> None:
        """Check that every count is a positive integer within its range.

        Raises:
            PlanError: one is not.
        """
        rows = (
            ("batch", self.batch, None, ""),
            ("stages", self.stages, len(self.profile), "layers"),
            ("micro_batches", self.micro_batches, self.batch, "samples in the batch"),
            ("memory_limit", self.memory_limit, None, ""),
            ("max_replicas", self.max_replicas, None, ""),
        )
        for name, number, maximum, unit in rows:
            if number is None:
                continue
            if isinstance(number, bool) or not isinstance(number, int) or number < 1:
                raise PlanError(f"{name} is {number!r}; it must be a whole number of 1 or more")
            if maximum is not None and number > maximum:
                raise PlanError(f"{name} is {number}, but there are only {maximum} {unit}")

    def _check_weight_rule(self, facts: ScheduleFacts) -> None:
        """Check that the weight rule fits a schedule, its options and the optimizer.

        Raises:
            PlanError, SettingError, UnknownName: it does not.
        """
        rule = self.rule or weight_rule(facts.weights)
        rule.with_defaults(dict(self.weights_options))
        if rule.synchronous != facts.synchronous:
            raise PlanError(mismatch_message(rule.name, facts.name, facts.synchronous))
        if not self._has_formula(rule):
            raise SettingError(
                f"weight rule {rule.name!r} has no formula for {self.optimizer}: {rule.because}; "
                f"it goes with {', '.join(rule.optimizers)}"
            )

    def families(self) -> tuple[ScheduleFacts, ...]:
        """Return the schedules to consider: the requested ones in their order, without duplicates,
        or else all that any model can run.

        By default asynchronous schedules are included only on request, and with a weight rule only
        the schedules that it goes with. Two kinds of schedules must be requested by name: those
        that slice sequences, since they need a causal model, which a profile does not reveal; and
        those with replicas of stages.
        """
        return self._families

    @cached_property
    def _families(self) -> tuple[ScheduleFacts, ...]:
        """What `families` returns."""
        catalogue = schedules()
        if self.schedules is not None:
            return tuple(catalogue[name] for name in self.schedules)
        kinds = {True, not self.asynchronous}
        if self.rule is not None:
            kinds = {self.rule.synchronous}
            if kinds == {False} and not self.asynchronous:
                return (catalogue[schedule_for(self.rule)],)
        return tuple(
            facts
            for facts in catalogue.values()
            if facts.synchronous in kinds and self._suits_any_model(facts)
        )

    @cached_property
    def rule(self) -> WeightRule | None:
        """The weight rule of the request; None for the default of each schedule.

        Raises:
            UnknownName: there is no such rule.
        """
        return None if self.weights is None else weight_rule(self.weights)

    def _suits_any_model(self, facts: ScheduleFacts) -> bool:
        """Return whether a schedule needs no causal model and its weight rule has a formula for the
        optimizer. A weight rule of the request is checked separately.
        """
        if facts.causal:
            return False
        return bool(self.weights) or self._has_formula(weight_rule(facts.weights))

    def _has_formula(self, rule: WeightRule) -> bool:
        """Return whether the rule's paper covers the optimizer, as far as that is known."""
        return self.optimizer is None or not rule.optimizers or self.optimizer in rule.optimizers

    @cached_property
    def profile(self) -> Profile:
        """The costs of the layers on the cluster's first device."""
        return self._profiles[0]

    @cached_property
    def _profiles(self) -> tuple[Profile, ...]:
        """The profile of every rank."""
        profiles = profiles_of(self.profiles, self.cluster)
        if self.optimizer_states is None:
            return profiles
        return with_optimizer(
            profiles, self.optimizer or "", self.optimizer_states, self.optimizer_fused
        )

    def profile_of(self, rank: int) -> Profile:
        """Return the costs of the layers on the device of the cluster's rank `rank`, while it
        computes alone.

        All devices of one kind share one object, so that its id identifies the kind.
        """
        return self._profiles[rank]

    def different_profiles(self, ranks: Iterable[int]) -> list[Profile]:
        """Return the profiles of these ranks, each once: ranks of one kind share an object."""
        return list({id(profile): profile for profile in map(self.profile_of, ranks)}.values())

    def mean_seconds(self, rank: int, phase: Phase, micro_batches: int) -> Array:
        """Return per layer the seconds of one phase of a micro-batch on a rank, on average over
        those of a batch, whose sizes may differ by one sample.
        """
        profile = self.profile_of(rank)
        smaller, rest = divmod(self.batch, micro_batches)
        seconds = np.array(profile.seconds(phase, smaller))
        if not rest:
            return seconds
        larger = np.array(profile.seconds(phase, smaller + 1))
        mean: Array = (rest * larger + (micro_batches - rest) * seconds) / micro_batches
        return mean

    def work_seconds(self, rank: int, micro_batches: int) -> Array:
        """Return per layer the mean seconds of a micro-batch's forward and backward on a rank; the
        backward is split where that is faster.
        """
        f, b, i, w = (self.mean_seconds(rank, phase, micro_batches) for phase in PHASES)
        work: Array = f + np.minimum(b, i + w)
        return work

    def micro_batch_counts(self, pipelines: int = 1) -> tuple[int, ...]:
        """Return the numbers of micro-batches to try, ascending, up to 64 per pipeline; or the
        requested number alone.

        These are divisors of the batch, with which all micro-batches have the same size: all of a
        small batch, and of a large one those nearest to powers of two and to the numbers halfway
        between. Where there is no divisor within a factor of 1.5, it is the power of two.
        """
        if self.micro_batches is not None:
            return (self.micro_batches,)
        maximum = min(self.batch, MOST_IN_A_PIPELINE * pipelines)
        divisors = [count for count in self._divisors if count <= maximum]
        counts = set(divisors if self.batch <= FEW_SAMPLES else ())
        for power in MICRO_BATCHES:
            if power <= maximum:
                nearest = _nearest(divisors, power)
                is_near = 2 * power < 3 * nearest and 2 * nearest < 3 * power
                counts |= {nearest if is_near else power, _nearest(divisors, 1.5 * power)}
        return tuple(sorted(counts))

    @cached_property
    def _divisors(self) -> list[int]:
        """The numbers that divide the batch, ascending."""
        return [count for count in range(1, self.batch + 1) if self.batch % count == 0]

    def on(self, devices: Sequence[int]) -> PlanRequest:
        """Return the same request for some of the cluster's devices, in this order."""
        chosen = tuple(devices)
        if chosen not in self._local_requests:
            kinds = {self.cluster.devices[rank].name: self.profile_of(rank) for rank in chosen}
            self._local_requests[chosen] = replace(
                self, profiles=kinds, cluster=self.cluster.on(chosen)
            )
        return self._local_requests[chosen]

    @cached_property
    def _local_requests(self) -> dict[tuple[int, ...], PlanRequest]:
        """Results of `on`."""
        return {}

    def busy_on(self, devices: Sequence[int], busy: Sequence[int] = ()) -> PlanRequest:
        """Return the same request for some of the cluster's devices, in this order, with their
        seconds while they are all busy. Devices that others slow down differently are of different
        kinds in it.

        Args:
            devices: ranks of the cluster.
            busy: all ranks that are busy at the same time; by default `devices`.
        """
        cluster, chosen = self.cluster, tuple(devices)
        if all(device.together == 1 for device in cluster.devices):
            return self if chosen == tuple(range(cluster.ranks)) else self.on(chosen)
        busy_ranks = tuple(busy or chosen)
        if (chosen, busy_ranks) not in self._busy_requests:
            kinds: dict[str, Profile] = {}
            devices_by_kind = []
            for rank in chosen:
                factor = cluster.slowdown(rank, busy_ranks)
                device = cluster.devices[rank]
                # With all digits: different factors must give different names.
                kind = f"{device.name}, {factor!r} times as long"
                kinds[kind] = scale_profile(self.profile_of(rank), factor)
                devices_by_kind.append(replace(device, name=kind))
            busy_cluster = replace(cluster.on(chosen), devices=tuple(devices_by_kind))
            self._busy_requests[chosen, busy_ranks] = replace(
                self, profiles=kinds, cluster=busy_cluster
            )
        return self._busy_requests[chosen, busy_ranks]

    @cached_property
    def _busy_requests(self) -> dict[tuple[tuple[int, ...], tuple[int, ...]], PlanRequest]:
        """Results of `busy_on`."""
        return {}

    @cached_property
    def unreplicable_layers(self) -> dict[int, str]:
        """The layers that must not be replicated: index to reason."""
        return {
            index: layer.single_copy_reason
            for index, layer in enumerate(self.profile.layers)
            if layer.single_copy_reason
        }

    @property
    def copies_allowed(self) -> int:
        """Maximum number of replicas of a stage; 1 if some layer must not be replicated."""
        maximum = self.cluster.ranks if self.max_replicas is None else self.max_replicas
        return 1 if self.unreplicable_layers else min(maximum, self.cluster.ranks)

    @property
    def state_per_parameter_byte(self) -> float:
        """Bytes of parameters, gradients and optimizer states per byte of parameters, as
        `stage_costs` counts them.
        """
        return 2 + self.profile.optimizer_states

    def memory_bytes(self, rank: int) -> int:
        """Return the memory that rank `rank` may use, in bytes."""
        capacity = self.cluster.devices[rank].memory_bytes
        return capacity if self.memory_limit is None else min(capacity, self.memory_limit)


def _nearest(counts: Sequence[int], target: float) -> int:
    """Return the count with the least ratio to a target; the smaller one of two."""
    return min(counts, key=lambda count: max(count / target, target / count))
