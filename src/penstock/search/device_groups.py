"""Plans of device groups: tensor parallelism, sequence parallelism and ZeRO on large clusters.

Every width that the profile has, and every level of ZeRO that the request allows, is a request of
its own for a cluster of groups. All their configurations compete: equal pipelines are represented
by one, so that the work does not grow with the number of replicas, and a configuration whose lower
bound exceeds the best time is not simulated. Only numbers of pipelines and of micro-batches that
divide the batch are tried. The plan that is chosen is simulated with all its pipelines.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

from penstock.cluster.groups import group_devices
from penstock.errors import ClusterError, PenstockError, PlanError
from penstock.plan.plan import Plan
from penstock.plan.sharding import ZERO_LEVELS, Sharding, ShardingOptions
from penstock.profile.profile import Profile
from penstock.schedule.catalogue import ScheduleFacts
from penstock.search.build_plan import ROWS, build_plan
from penstock.search.cuts import Balance
from penstock.search.evaluate import evaluate, infeasible_error
from penstock.search.instantiate import (
    Evaluated,
    best,
    by_time,
    first_of_kind,
    instantiate,
    representative_pipeline,
)
from penstock.search.plan_search import PlanSearch
from penstock.search.request import PlanRequest
from penstock.search.search_space import Configuration, SearchSpace, layouts
from penstock.search.shapes import Shape
from penstock.simulate.plan_costs import width_profile

#: Schedules that are tried where none is named: those that Megatron and torchtitan run.
SCHEDULES = ("1f1b", "interleaved", "zb-h1", "zb-v")
#: Micro-batch sizes in samples, and the numbers of stages per rank of interleaved schedules.
SIZES, CHUNKS = (1, 2, 4, 8, 16), (2, 3, 4)
#: Simulated ops per second of the budget: about 40 % of what one core does.
OPS_PER_S = 200_000
#: Estimates leave out what differs by schedule and cut; a configuration whose estimate exceeds the
#: best time by more than this factor is not simulated.
FAR = 1.25


def has_groups(request: PlanRequest) -> bool:
    """Return whether the profile of a request has widths of tensor parallelism."""
    return isinstance(request.profiles, Profile) and bool(request.profiles.widths)


def group_requests(request: PlanRequest, options: ShardingOptions) -> list[PlanRequest]:
    """Return a request per way to share a stage that the arguments leave open.

    Sequence parallelism moves as many bytes and stores fewer: where it is left open, groups have
    it.

    Args:
        request: for single devices, whose profile has widths.
        options: what is fixed; None is every width of the profile, sequence parallelism where
            possible, and every level of ZeRO.

    Raises:
        PlanError: no group of these properties can be formed.
    """
    profile = request.profiles
    assert isinstance(profile, Profile)
    widths = sorted({1, *(shared.tensor_parallel for shared in profile.widths)})
    requests = []
    reasons = []
    for count in widths if options.tensor_parallel is None else [options.tensor_parallel]:
        parallel = options.sequence_parallel
        if parallel is None:
            parallel = count > 1
        if parallel and count == 1:
            reasons.append("sequence parallelism needs tensor_parallel of 2 or more")
            continue
        for level in ZERO_LEVELS if options.zero is None else (options.zero,):
            sharding = Sharding(count, parallel, level)
            try:
                shared = width_profile(profile, sharding)
                cluster = group_devices(request.cluster, count)
            except (PlanError, ClusterError) as error:
                reasons.append(str(error))
                continue
            # From here on a group is a device: its profile has one width.
            single = replace(shared, widths=())
            requests.append(replace(request, profiles=single, cluster=cluster, sharding=sharding))
    if not requests:
        raise PlanError("\n  ".join(["no device groups can be formed", *dict.fromkeys(reasons)]))
    return requests


def plan_device_groups(request: PlanRequest, requests: list[PlanRequest]) -> Plan:
    """Return the fastest plan over all ways to share stages.

    Args:
        request: for single devices.
        requests: for groups, see `group_requests`.

    Raises:
        PlanError: nothing fits, or the batch cannot be divided.
    """
    search = _GroupSearch(request)
    candidates = []
    for group_request in requests:
        space = SearchSpace(group_request, [])
        for configuration in _configurations(group_request, space):
            candidates.append((configuration, group_request))
    # Of equal estimates the fewest micro-batches come first.
    candidates.sort(key=lambda pair: (pair[0].estimate_s, pair[0].micro_batches))
    for configuration, group_request in candidates:
        if search.is_over:
            break
        search.evaluate_one(configuration, group_request)
    if not search.feasible:
        raise infeasible_error(request, search.infeasible, list(search.rejected), search.note)
    return search.plan(min(configuration.bound_s for configuration, _ in candidates))


class _GroupSearch:
    """Candidates of all group requests, until the budget of work is spent."""

    def __init__(self, request: PlanRequest) -> None:
        self.request = request
        self.feasible: list[Evaluated] = []
        self.infeasible: list[Evaluated] = []
        self.rejected: dict[str, None] = {}
        self.note = ""
        self._requests: dict[int, PlanRequest] = {}
        self._searches: dict[int, PlanSearch] = {}
        self._work = 0.0
        self._evaluations = 0

    @property
    def best_s(self) -> float:
        """Seconds per step of the fastest candidate; infinite before the first."""
        return min((candidate.step_s for candidate in self.feasible), default=math.inf)

    @property
    def is_over(self) -> bool:
        """Whether the work of the budget or the time limit is spent; `note` then says so."""
        # While nothing fits the search goes on, as `plan` promises.
        deadline = self.request.deadline
        if deadline is not None and self.feasible and deadline.is_over():
            self.note = (
                f"search cut short by the clock after {deadline.spent_s:.1f} s and "
                f"{self._evaluations} evaluations: another run may find another plan"
            )
        elif self.feasible and self._work >= OPS_PER_S * self.request.budget_s:
            self.note = (
                f"search cut short after {self._evaluations} evaluations, which is the work of "
                f"budget_s={self.request.budget_s:g} s: a larger budget may find a faster plan"
            )
        return bool(self.note)

    def evaluate_one(self, configuration: Configuration, request: PlanRequest) -> None:
        """Simulate one pipeline of a configuration, unless it cannot win."""
        limit = self.best_s
        if configuration.bound_s > limit or configuration.estimate_s > FAR * limit:
            return
        # By identity: the profiles of a request may be a mapping, which has no hash.
        helper = self._searches.setdefault(id(request), PlanSearch(request))
        try:
            schedule = helper.schedule_of(configuration)
            if schedule is None:
                return
            # The second cut is for what does not fit with the first.
            balances: tuple[Balance, ...] = ("time", "limits")
            for balance in balances:
                lengths = helper.lengths_of(configuration, schedule, balance)
                if lengths is None:
                    return
                proposal = helper.proposal_of(configuration, schedule, lengths)
                placed = representative_pipeline(request, proposal) or instantiate(
                    request, proposal
                )
                self._work += sum(map(len, schedule.programs))
                self._evaluations += 1
                variants = evaluate(placed, limit)
                if self._record(variants, request):
                    return
        except PenstockError as error:
            self.rejected[str(error)] = None

    def _record(self, variants: list[Evaluated], request: PlanRequest) -> bool:
        """Record what was simulated; return whether a variant fits."""
        chosen = variants[-1]
        self.infeasible += [variant for variant in variants if variant.memory_shortfall]
        if chosen.memory_shortfall:
            return False
        self.feasible.append(chosen)
        self._requests[id(chosen)] = request
        return True

    def plan(self, bound_s: float) -> Plan:
        """Return the plan of the best candidate, simulated with all its pipelines."""
        ranked = sorted(self.feasible, key=by_time)
        first = best(ranked)
        # Candidates were judged by one pipeline each: with all pipelines one may still not fit.
        for candidate in [first, *ranked]:
            request = self._requests[id(candidate)]
            placed = candidate.placed
            proposal = replace(placed.proposal, recompute=candidate.recompute)
            whole = instantiate(request, proposal).with_selective_recompute(placed.selection)
            fixed = replace(whole, request=replace(whole.request, recompute=candidate.recompute))
            chosen = evaluate(fixed)[-1]
            if not chosen.memory_shortfall:
                break
        else:
            raise infeasible_error(self.request, self.infeasible, list(self.rejected), self.note)
        rows = first_of_kind([chosen, *ranked])[:ROWS]
        plan = build_plan(request, chosen, rows, min(bound_s, chosen.step_s))
        return replace(plan, search_note=self.note)


def _configurations(request: PlanRequest, space: SearchSpace) -> Iterator[Configuration]:
    """Yield the configurations of one way to share stages."""
    names = request.schedules or SCHEDULES
    named = replace(request, schedules=tuple(names))
    groups, layers = request.cluster.ranks, len(request.profile)
    most = min(request.copies_allowed, request.batch, groups)
    for pipelines in range(1, most + 1):
        if request.batch % pipelines:
            continue
        for ranks in _pipeline_ranks(groups // pipelines, layers):
            shape = Shape(pipelines, ranks, tuple(range(pipelines * ranks)))
            for micro_batches in _micro_batch_counts(request, pipelines):
                for facts in named.families():
                    yield from _of_schedule(space, shape, micro_batches, facts)


def _pipeline_ranks(most: int, layers: int) -> list[int]:
    """Return the numbers of ranks of a pipeline: all there are, and the nearest smaller number with
    which stages of interior layers are equal.
    """
    longest = min(most, layers)
    if longest < 1:
        return []
    # Without embedding and head, whose neighbours, the blocks of a transformer, are alike.
    interior = max(1, layers - 2)
    even = max(count for count in range(1, longest + 1) if interior % count == 0)
    return sorted({longest, even} if even > longest // 2 else {longest})


def _micro_batch_counts(request: PlanRequest, pipelines: int) -> list[int]:
    """Return the numbers of micro-batches, of all pipelines together, that divide the batch."""
    if request.micro_batches is not None:
        return [request.micro_batches] if request.micro_batches % pipelines == 0 else []
    share = request.batch // pipelines
    return [request.batch // size for size in SIZES if share % size == 0]


def _of_schedule(
    space: SearchSpace, shape: Shape, micro_batches: int, facts: ScheduleFacts
) -> Iterator[Configuration]:
    """Yield the configurations of a schedule on a shape, with their estimates and bounds."""
    request = space.request
    for stages, options in layouts(facts, shape.ranks):
        if not 1 <= stages <= len(request.profile) or request.stages not in (None, stages):
            continue
        estimate_s, bound_s = space.estimate_and_bound(shape, micro_batches, facts, stages)
        yield Configuration(shape, facts.name, stages, micro_batches, options, estimate_s, bound_s)


def best_zero_level(request: PlanRequest, planner: Callable[[PlanRequest], Plan]) -> Plan:
    """Return the fastest plan over all levels of ZeRO; of equally fast ones the lowest level.

    Args:
        request: that leaves the level open, of a profile without widths. Every level has an equal
            part of its budget.
        planner: plans a request with a fixed level.

    Raises:
        PlanError: nothing fits at any level; the message is that of the highest.
    """
    # A part each, so that all levels together take as long as one search.
    budget_s = request.budget_s / len(ZERO_LEVELS)
    plans = []
    for level in ZERO_LEVELS:
        sharding = replace(request.sharding, zero=level)
        options = replace(request.sharding_options, zero=level)
        fixed = replace(request, sharding=sharding, sharding_options=options, budget_s=budget_s)
        try:
            plans.append(planner(fixed))
        except PlanError as error:
            # Another level of ZeRO may fit: the refusal counts only if none does.
            refusal = error
    if not plans:
        raise refusal
    return min(plans, key=lambda plan: (plan.predicted.step_s, plan.zero))
