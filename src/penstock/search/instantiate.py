"""Turn proposals into placed schedules with costs, so that one simulator scores them all."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, final

from penstock.errors import PlanError
from penstock.plan.plan import Option
from penstock.plan.prediction import Candidate
from penstock.plan.segments import Selection
from penstock.profile.profile import Profile
from penstock.schedule.op import Schedule
from penstock.schedule.recompute import Recompute
from penstock.search.bottleneck import describe_bottleneck
from penstock.search.proposal import Proposal
from penstock.search.request import PlanRequest
from penstock.search.schedules import COST_SCHEDULES
from penstock.search.schedules import schedule as make_schedule
from penstock.simulate.costs import Costs
from penstock.simulate.overlapped_sums import (
    hidden_sum_seconds,
    with_overlapped_sums,
    with_shorter_updates,
)
from penstock.simulate.plan_costs import schedule_costs, stage_costs, with_plan_zero
from penstock.simulate.rank_memory import StoredParameters
from penstock.simulate.selective_recompute import with_selective_recompute
from penstock.simulate.stage_seconds import micro_batch_sizes, parts_of
from penstock.simulate.steady_state import Steady, steady
from penstock.simulate.zero import with_zero
from penstock.weights.catalogue import WeightRule
from penstock.weights.compatibility import rule_of

#: Relative difference of times that counts as equal: then memory decides, then the number of
#: micro-batches. No more than the rounding of sums: a larger one would choose a plan that is slower
#: than the one that results from naming its schedule.
CLOSE = 1e-6

#: Peaks of memory whose logarithms round to one multiple of this count as equal: a simpler plan is
#: worth that little memory.
LEAN = 0.02

#: Stages times micro-batches up to which a schedule is small: about 0.1 MB with its dependencies.
SMALL = 256


@final
@dataclass(frozen=True)
class PlacedSchedule:
    """A proposal with its schedule, weight rule and costs.

    Attributes:
        request: the request for the devices of the schedule, in their order.
        proposal: what was proposed.
        schedule: the schedule.
        rule: the weight rule.
        costs: seconds and bytes of its ops, with those of selective recompute.
        pipelines: above 1 where `schedule` is that of one pipeline which represents this number.
        selection: the layers that are recomputed, if recompute is selective.
    """

    request: PlanRequest
    proposal: Proposal
    schedule: Schedule
    rule: WeightRule
    costs: Costs
    pipelines: int = 1
    selection: Selection | None = None

    @property
    def sizes(self) -> list[float]:
        """Samples of every micro-batch of `schedule`; of several pipelines those of the first."""
        return _sizes(self.request, self.proposal, self.schedule, self.pipelines)

    def with_selective_recompute(self, selection: Selection | None) -> PlacedSchedule:
        """Return the same with these layers recomputed; None changes nothing."""
        if selection is None:
            return self
        profiles = [self.request.profile_of(rank) for rank in range(self.schedule.ranks)]
        costs = with_selective_recompute(
            self.costs, self.schedule, profiles, self.proposal.lengths, self.sizes, selection
        )
        return replace(self, costs=costs, selection=selection)


@final
@dataclass(frozen=True)
class Evaluated:
    """A placed schedule with its memory and time.

    Attributes:
        placed: the placed schedule.
        recompute: the recompute policy.
        memory: per rank, its peak in bytes.
        memory_ratio: peak / capacity of the fullest rank.
        memory_shortfall: empty if it fits; else what the fullest rank needs and has, as text.
        steady_state: the simulated time; None if it was not simulated.
    """

    placed: PlacedSchedule
    recompute: Recompute
    memory: tuple[int, ...]
    memory_ratio: float
    memory_shortfall: str
    steady_state: Steady | None = None

    @cached_property
    def bottleneck(self) -> str:
        """The bottleneck of its time, as text; empty if it was not simulated."""
        if self.steady_state is None:
            return ""
        seconds = self.steady_state.batches * self.steady_state.seconds_per_batch
        return describe_bottleneck(self.steady_state.timeline, seconds)

    @property
    def step_s(self) -> float:
        """Seconds per step; 0 if it was not simulated."""
        return self.steady_state.seconds_per_batch if self.steady_state else 0.0

    @property
    def preference(self) -> tuple[bool, int, int, int, float, str, str]:
        """Sort key among candidates whose times count as equal; the smallest is preferred."""
        schedule = self.placed.schedule
        lean = round(math.log(max(1, *self.memory)) / LEAN)
        return (
            not schedule.synchronous,
            lean,
            schedule.micro_batches,
            schedule.stages,
            self.step_s,
            schedule.name,
            self.recompute,
        )

    @property
    def kind(self) -> tuple[str, int, int | tuple[int, ...]]:
        """The key of which a table has one row: schedule, stages and replicas. With one stage all
        schedules are the same.
        """
        schedule = self.placed.schedule
        return schedule.name if schedule.stages > 1 else "", schedule.stages, self.replicas

    @property
    def replicas(self) -> int | tuple[int, ...]:
        """Number of ranks that hold each stage: one number if it is the same for all stages."""
        counts = tuple(
            self.placed.pipelines * len(ranks) for ranks in self.placed.schedule.ranks_of_stage
        )
        return counts[0] if len(set(counts)) == 1 else counts

    @property
    def candidate(self) -> Candidate:
        """The row of the plan's table of candidates."""
        schedule, proposal = self.placed.schedule, self.placed.proposal
        return Candidate(
            schedule.name,
            schedule.stages,
            proposal.micro_batches,
            self.recompute,
            proposal.lengths,
            self.step_s,
            max(self.memory),
            self.memory_shortfall or self.bottleneck,
            self.placed.rule.name,
            self.replicas,
        )

    def simulated(self) -> Evaluated:
        """Return the same with its simulated time."""
        steady_state = steady(self.placed.schedule, self.placed.costs, self.recompute)
        return replace(self, steady_state=steady_state)


def by_time(candidate: Evaluated) -> tuple[float, tuple[object, ...]]:
    """Return the sort key that puts the fastest first, and among equals the preferred."""
    return candidate.step_s, candidate.preference


def by_memory(candidate: Evaluated) -> tuple[float, tuple[object, ...]]:
    """Return the sort key that puts the candidate nearest to fitting first."""
    return candidate.memory_ratio, candidate.preference


def instantiate(request: PlanRequest, proposal: Proposal) -> PlacedSchedule:
    """Make the proposed schedule, and compute the costs of its ops on their devices.

    Raises:
        ScheduleError: no such schedule can be made, or the weight rule does not go with it.
        PlanError: it needs more ranks or micro-batches than there are, puts all its stages on one
            rank, or replicates a layer that must not be replicated.
    """
    if proposal.micro_batches > request.batch:
        raise PlanError(
            f"{proposal.micro_batches} micro-batches are more than the {request.batch} samples of "
            "the batch"
        )
    schedule = _schedule_of(request, proposal)
    if schedule.ranks == 1 < schedule.stages:
        raise PlanError(
            f"{schedule.name} puts all {schedule.stages} stages on one rank, where one stage would "
            "do the same"
        )
    if schedule.ranks > request.cluster.ranks:
        raise PlanError(
            f"{schedule.name} in {schedule.stages} stages needs {schedule.ranks} ranks, "
            f"{request.cluster.name} has {request.cluster.ranks}"
        )
    local = _request_on_devices(request, proposal, schedule.ranks)
    if schedule.ranks > local.cluster.ranks:
        raise PlanError(
            f"{schedule.name} needs {schedule.ranks} ranks, and {local.cluster.ranks} devices are "
            "proposed for it"
        )
    check_replicable(request, schedule, proposal.lengths)
    rule = _rule(request, proposal, schedule)
    costs = _costs(local, proposal, schedule, rule)
    return PlacedSchedule(local, proposal, schedule, rule, costs)


def _costs(request: PlanRequest, proposal: Proposal, schedule: Schedule, rule: WeightRule) -> Costs:
    """Return the costs of a schedule on the devices of a request, with its gradient sums."""
    profiles = [request.profile_of(rank) for rank in range(schedule.ranks)]
    lengths, cluster = proposal.lengths, request.cluster
    costs = schedule_costs(schedule, profiles, lengths, cluster, request.batch, rule)
    if request.sharding.zero:
        zero = request.sharding.zero
        return with_plan_zero(costs, schedule, profiles[0], lengths, cluster, zero)
    samples = request.batch / proposal.micro_batches
    return with_overlapped_sums(costs, schedule, profiles, lengths, samples, cluster)


def _rule(request: PlanRequest, proposal: Proposal, schedule: Schedule) -> WeightRule:
    """Return the weight rule of a proposal: its own, or the request's, or the schedule's."""
    return rule_of(schedule, proposal.weights or request.rule, dict(request.weights_options))


def _request_on_devices(request: PlanRequest, proposal: Proposal, ranks: int) -> PlanRequest:
    """Return the request for the proposal's devices, or as it is if that names none; with their
    seconds while `ranks` of them are busy.
    """
    if any(device.together > 1 for device in request.cluster.devices):
        devices = proposal.devices or tuple(range(request.cluster.ranks))
        return request.busy_on(devices[:ranks])
    return request.on(proposal.devices) if proposal.devices else request


def check_replicable(request: PlanRequest, schedule: Schedule, lengths: Sequence[int]) -> None:
    """Refuse a schedule that replicates a stage with a layer that must not be replicated.

    Raises:
        PlanError: it does; the message names the layer and the reason.
    """
    first = next(unreplicable_copies(request, schedule, lengths), None)
    if first is None:
        return
    layer, ranks = first
    raise PlanError(
        f"{schedule.name} holds {len(ranks)} copies of the stage with layer "
        f"{request.profile.layers[layer].name}, and copies of that layer would train to other "
        f"numbers than one: {request.unreplicable_layers[layer]}. Request schedules with one copy "
        "of each stage, such as schedules='1f1b' with max_replicas=1"
    )


def unreplicable_copies(
    request: PlanRequest, schedule: Schedule, lengths: Sequence[int]
) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Yield the layers that must not be replicated and are, each with the ranks of its copies."""
    if not request.unreplicable_layers:
        return
    for part, ranks in zip(parts_of(lengths), schedule.ranks_of_stage, strict=True):
        if len(ranks) == 1:
            continue
        for layer in range(part.start, part.stop):
            if layer in request.unreplicable_layers:
                yield layer, ranks


def with_request(placed: PlacedSchedule, request: PlanRequest) -> PlacedSchedule:
    """Return the same schedule, cut and devices with the costs of another cluster or profile."""
    local = _request_on_devices(request, placed.proposal, placed.schedule.ranks)
    costs = _costs(local, placed.proposal, placed.schedule, placed.rule)
    return replace(placed, request=local, costs=costs).with_selective_recompute(placed.selection)


def cached_schedule(
    name: str, stages: int, micro_batches: int, options: tuple[tuple[str, Option], ...]
) -> Schedule:
    """Return a schedule that needs no costs. A search asks for the same ones again and again: the
    last few are cached, and of small ones many.
    """
    make = _small_schedule if stages * micro_batches <= SMALL else _large_schedule
    return make(name, stages, micro_batches, options)


def _make_schedule(
    name: str, stages: int, micro_batches: int, options: tuple[tuple[str, Any], ...]
) -> Schedule:
    """Return a schedule that needs no costs."""
    return make_schedule(name, stages, micro_batches, **dict(options))


# A search goes through many small schedules again and again. A large one may have millions of ops,
# so that only a few of them fit into memory.
_small_schedule = lru_cache(maxsize=512)(_make_schedule)
_large_schedule = lru_cache(maxsize=8)(_make_schedule)


def representative_pipeline(request: PlanRequest, proposal: Proposal) -> PlacedSchedule | None:
    """Return the first of several equal pipelines, to be simulated in place of all.

    With the time of its stages' gradient sync it takes as long as all pipelines where they have
    equal devices and links, and never longer. With recompute "except_last" it keeps the activations
    of its last micro-batch, where really only one of the pipelines does.

    Returns None if the proposal does not consist of several equal pipelines.

    Raises:
        ScheduleError, PlanError: as `instantiate`.
    """
    pipelines = proposal.replicas
    if not isinstance(pipelines, int):
        return None
    if not 1 < pipelines <= proposal.micro_batches <= request.batch:
        return None
    schedule = _schedule_of_first_pipeline(proposal, pipelines)
    if schedule.stream is not None or schedule.copies > 1:
        return None
    all_devices = proposal.devices or tuple(range(request.cluster.ranks))
    needed = pipelines * schedule.ranks
    if needed > len(all_devices):
        raise PlanError(f"{schedule.name} needs {needed} ranks, and there are {len(all_devices)}")
    devices = all_devices[:needed]
    local = request.busy_on(devices[: schedule.ranks], devices)
    rule = _rule(request, proposal, schedule)
    profiles = [local.profile_of(rank) for rank in range(schedule.ranks)]
    sizes = _sizes(request, proposal, schedule, pipelines)
    costs = schedule_costs(schedule, profiles, proposal.lengths, local.cluster, sizes, rule)
    costs = _with_sync_of_pipelines(costs, request, proposal, schedule, profiles, devices)
    # Messages of the other pipelines, which are left out, use the same cards.
    network = None if costs.network is None else costs.network.unshared
    costs = replace(costs, network=network)
    return PlacedSchedule(local, proposal, schedule, rule, costs, pipelines)


def _schedule_of_first_pipeline(proposal: Proposal, pipelines: int) -> Schedule:
    """Return the schedule of the first of several pipelines, which take micro-batches in turn."""
    options = tuple((name, value) for name, value in proposal.options if name != "replicas")
    # Rounded up: the first pipeline has the most micro-batches, and so the longest step.
    micro_batches = -(-proposal.micro_batches // pipelines)
    return cached_schedule(proposal.schedule, proposal.stages, micro_batches, options)


def _with_sync_of_pipelines(
    costs: Costs,
    request: PlanRequest,
    proposal: Proposal,
    schedule: Schedule,
    profiles: Sequence[Profile],
    devices: Sequence[int],
) -> Costs:
    """Return the costs of the first of several pipelines, with what it shares with the others:
    the sync of gradients, and the parts of parameters and optimizer state that ZeRO divides.

    Args:
        costs: of the pipeline alone.
        request: for the whole cluster.
        proposal: what was proposed.
        schedule: of one pipeline.
        profiles: per rank of the schedule.
        devices: of all pipelines; rank r of the n-th is on entry n x (ranks of a pipeline) + r.
    """
    lengths, zero = proposal.lengths, request.sharding.zero
    indices_of_stage = [
        range(first_rank, len(devices), schedule.ranks)
        for first_rank, *_ in schedule.ranks_of_stage
    ]
    replicas = [[devices[index] for index in indices] for indices in indices_of_stage]
    stored = StoredParameters(profiles[0], lengths, indices_of_stage, zero)
    shares = stored.largest_shares()
    costs = with_zero(costs, replicas, request.cluster, lengths, zero, shares)
    costs = stored.add_to(costs, len(devices) // schedule.ranks)
    if zero:
        return costs
    samples = request.batch / proposal.micro_batches
    hidden_s = hidden_sum_seconds(schedule, replicas, profiles, lengths, samples, request.cluster)
    return with_shorter_updates(costs, hidden_s)


def _sizes(
    request: PlanRequest, proposal: Proposal, schedule: Schedule, pipelines: int
) -> list[float]:
    """Return the samples of every micro-batch; those of the first of several pipelines."""
    # Pipelines take micro-batches in turn.
    return micro_batch_sizes(request.batch, schedule, proposal.micro_batches)[::pipelines]


def _schedule_of(request: PlanRequest, proposal: Proposal) -> Schedule:
    """Make the schedule of a proposal. One that is built from costs gets those of the stages, with
    stage s on rank s.
    """
    if not needs_costs(proposal.schedule):
        return cached_schedule(
            proposal.schedule, proposal.stages, proposal.micro_batches, proposal.options
        )
    local = _request_on_devices(request, proposal, request.cluster.ranks)
    costs = stage_costs(
        local.profile,
        proposal.lengths,
        request.batch / proposal.micro_batches,
        local.cluster,
        micro_batches=proposal.micro_batches,
    )
    options: dict[str, Any] = dict(proposal.options)
    return make_schedule(
        proposal.schedule, proposal.stages, proposal.micro_batches, costs=costs, **options
    )


def needs_costs(name: str) -> bool:
    """Return whether a schedule is built from costs."""
    return name in COST_SCHEDULES.entries()


def best(feasible: Iterable[Evaluated], most_s: float = math.inf) -> Evaluated:
    """Return the fastest candidate; of those as fast, up to rounding, a synchronous one, then the
    one with the least memory (to about 2 %), then the one with the fewest micro-batches.

    No candidate slower than `most_s` is preferred to a faster one.
    """
    candidates = list(feasible)
    fastest = min(candidate.step_s for candidate in candidates)
    cutoff_s = min(fastest * (1 + CLOSE), max(fastest, most_s))
    close = [candidate for candidate in candidates if candidate.step_s <= cutoff_s]
    return min(close, key=lambda candidate: candidate.preference)


def first_of_kind(candidates: Iterable[Evaluated]) -> list[Evaluated]:
    """Return the first candidate for every schedule, number of stages and of replicas: in a table,
    rows that differ in the number of micro-batches alone would explain nothing.
    """
    kinds: dict[object, Evaluated] = {}
    for candidate in candidates:
        kinds.setdefault(candidate.kind, candidate)
    return list(kinds.values())
