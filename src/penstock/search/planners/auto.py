"""The default planner: pipelines on all shapes of the cluster with all requested schedules, cut
exactly and simulated in full.

The search has these steps, in this order. Each has a limit on simulated ops, which follows from the
budget; the clock is a hard stop for all where the request has a time limit:

    1. all shapes and numbers of micro-batches with one schedule; of few devices, all placements
    2. the proposals of the other planners
    3. stages with different numbers of replicas
    4. all other configurations that can win, most promising first, each with the cut that balances
       its stages or ranks
    5. local search on the cuts of all candidates near the best, and their cuts with all schedules
    6. every configuration with every cut that can win
    7. schedules that are built from the costs of the best candidates
    8. local search on the cuts and the devices of the best candidates

Most configurations are never simulated: one whose lower bound exceeds the best time cannot win.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import product

from penstock.errors import PenstockError
from penstock.partition.uniform import partition_uniform
from penstock.plan.plan import Plan
from penstock.search.best_pipeline import best_pipeline, pipeline_note
from penstock.search.build_plan import ROWS, build_plan
from penstock.search.catalogue import PLANNERS, register
from penstock.search.cut_search.explore_cuts import explore_cuts
from penstock.search.cut_search.refine_cut import refine_cut
from penstock.search.cut_search.refine_devices import refine_devices
from penstock.search.cut_search.share_cuts import share_cuts
from penstock.search.cut_search.uneven_replication import (
    uneven,
    uneven_configurations,
    uneven_placements,
)
from penstock.search.cuts import Balance
from penstock.search.device_groups import (
    best_zero_level,
    group_requests,
    has_groups,
    plan_device_groups,
)
from penstock.search.evaluate import infeasible_error, refine_recompute
from penstock.search.instantiate import (
    Evaluated,
    best,
    by_memory,
    by_time,
    first_of_kind,
)
from penstock.search.plan_search import PlanSearch, fastest_of_kinds
from penstock.search.proposal import Proposal
from penstock.search.propose_cost_schedules import cost_schedules, is_plain
from penstock.search.request import PlanRequest
from penstock.search.search_space import Configuration, SearchSpace
from penstock.search.shapes import Shape, placements, shapes
from penstock.search.suggestions import suggestions
from penstock.synthesis.deadline import Deadline

NAME = "auto"

#: Maximum number of ops simulated in the usual budget: with one schedule, with all others, and in
#: the search over cuts. All of it takes 1 to 5 of the 10 seconds on one core (GPT of 24 blocks on 8
#: devices; VGG-16 on 2 and 4), which leaves a busy machine twice the time.
SCAN, SEARCH, CUTS = 400_000, 2_000_000, 4_000_000

#: The search stops to look at a schedule with its number of stages and replicas once this number of
#: its configurations came to nothing, or if its best is this many times slower than the best of
#: all.
MISSES, FAR = 4, 1.2

#: Number of candidates of different kinds that are refined, and that cost schedules are built for.
POLISHED = 3

#: Number of placements that are searched with all schedules for every number of pipelines and
#: ranks, and of counts of micro-batches by which they are compared.
PLACED, PLACED_COUNTS = 3, 2

#: Maximum number of candidates in the table that do not fit.
INFEASIBLE_ROWS = 4


@register(
    NAME,
    source="Penstock: enumeration with lower bounds, exact cuts, full simulation, local search",
)
def auto(request: PlanRequest) -> Plan:
    """Return the fastest plan that fits; of equally fast ones a synchronous one, then the one with
    the least memory (to about 2 %), then the one with the fewest micro-batches. It is never slower
    than what any other planner proposes for the same request, nor than what results if one of the
    schedules is named, if the budget suffices: else the plan says that the search was cut short.

    Every configuration is cut exactly for its devices and links at its micro-batch size. If that
    does not fit, it is cut within the limits of memory. If nothing fits at all, all configurations
    are tried again with cuts that balance memory alone. Then every configuration is tried with
    every cut that may be faster, where these are few; else with those that a local search reaches.

    Raises:
        PlanError: nothing fits, and the message says what the nearest candidates need; or no
            schedule takes these numbers.
    """
    request = replace(request, deadline=request.deadline or Deadline())
    if has_groups(request):
        return plan_device_groups(request, group_requests(request, request.sharding_options))
    if request.sharding_options.zero is None:
        return best_zero_level(request, auto)
    search = PlanSearch(request)
    space, others_s = _search_with_others(search)
    _refine_fastest(search)
    if not search.feasible:
        _reject_each_schedule(search, space)
        raise infeasible_error(request, search.infeasible, list(search.rejected), search.note)
    _simulate_skipped_kinds(search, space)
    return _explained_plan(search, space, best(search.feasible, others_s))


def _search_with_others(search: PlanSearch) -> tuple[SearchSpace, float]:
    """Evaluate all configurations and the plans of the other planners, each phase within a budget
    of its own.

    Returns:
        The search space, and the seconds per step of the fastest plan of another planner.
    """
    request = search.request
    space = SearchSpace(request, shapes(request))
    slowdown = _scan(search, space)
    placed = _best_placements(search)
    if placed:
        space = SearchSpace(request, list(dict.fromkeys([*space.shapes, *placed])))
    # If the scan finds nothing that fits, the search finds it sooner than the other planners do.
    others_first = bool(search.feasible)
    others_s = _evaluate_other_planners(search) if others_first else math.inf
    search.allow(SEARCH)
    _evaluate_all(search, uneven(request))
    replicated = _best_uneven_placements(search)
    search.allow(SEARCH)
    _search(search, space, slowdown, "time")
    if not search.feasible:
        _search(search, space, {}, "memory")
    if not others_first:
        others_s = _evaluate_other_planners(search)
    search.allow(CUTS)
    share_cuts(search)
    search.allow(CUTS)
    explore_cuts(search, [*space.configurations, *uneven_configurations(request, replicated)])
    return space, others_s


def _refine_fastest(search: PlanSearch) -> None:
    """Refine cut, order of ops, devices and recompute of the fastest candidates."""
    search.allow(SEARCH / 4)
    # The fastest kinds may all have several stages per rank, which no cost schedule has.
    for candidate in _fastest_plain(search):
        refine_cut(search, candidate)
    _evaluate_all(search, cost_schedules(search.request, _fastest_plain(search)))
    search.allow(SEARCH / 4)
    for candidate in fastest_of_kinds(search.feasible, POLISHED):
        refine_devices(search, refine_cut(search, candidate))
    for candidate in fastest_of_kinds(search.feasible, POLISHED):
        search.feasible.append(refine_recompute(candidate))


def _explained_plan(search: PlanSearch, space: SearchSpace, chosen: Evaluated) -> Plan:
    """Return the plan of the chosen candidate, with what explains it: a lower bound, the table of
    candidates, suggestions, and the best pipeline if it is none.
    """
    bounds = [configuration.bound_s for configuration in space.configurations]
    bound = min([*bounds, space.least_s, chosen.step_s])
    table = _table(search, chosen)
    changes = suggestions(search.request, chosen) if search.may_explain else []
    plan = build_plan(search.request, chosen, table, bound, changes)
    pipeline = best_pipeline(search, space, chosen)
    if pipeline is not None:
        note = pipeline_note(chosen, pipeline)
        plan = replace(plan, pipeline=pipeline.candidate, pipeline_note=note)
    return replace(plan, search_note=search.note)


def _fastest_plain(search: PlanSearch) -> list[Evaluated]:
    """Return the fastest candidates of different kinds with one stage per rank and no replicas."""
    plain = [candidate for candidate in search.feasible if is_plain(candidate)]
    return fastest_of_kinds(plain, POLISHED)


def _scan(search: PlanSearch, space: SearchSpace) -> dict[tuple[Shape, int], float]:
    """Evaluate the configurations with the leading schedules only.

    Returns the ratio of their simulated to their estimated time, by shape and number of
    micro-batches: it corrects the estimates of the other schedules.
    """
    search.allow(SCAN)
    slowdown: dict[tuple[Shape, int], float] = {}
    for configuration in space.configurations:
        if search.is_over:
            break
        if configuration.schedule in space.leading or configuration.stages == 1:
            candidate = search.evaluate_configuration(configuration, "time")
            if candidate is not None and configuration.estimate_s:
                key = configuration.shape, configuration.micro_batches
                slowdown[key] = candidate.step_s / configuration.estimate_s
    return slowdown


def _best_placements(search: PlanSearch) -> list[Shape]:
    """Return the best placements of few devices, for every number of pipelines and of ranks in
    each, as the leading schedule has them.
    """
    search.allow(SCAN)
    groups: dict[tuple[int, int], list[Shape]] = {}
    for shape in placements(search.request):
        groups.setdefault((shape.pipelines, shape.ranks), []).append(shape)
    best_shapes: list[Shape] = []
    for group in groups.values():
        step_of: dict[Shape, float] = {}
        for shape in group:
            if search.is_over:
                break
            space = SearchSpace(search.request, [shape])
            leading = [entry for entry in space.configurations if entry.schedule in space.leading]
            for configuration in leading[:PLACED_COUNTS]:
                candidate = search.evaluate_configuration(configuration)
                step_s = math.inf if candidate is None else candidate.step_s
                step_of[shape] = min(step_s, step_of.get(shape, math.inf))
        best_shapes += sorted(step_of, key=lambda shape: step_of[shape])[:PLACED]
    return best_shapes


def _best_uneven_placements(search: PlanSearch) -> list[tuple[tuple[int, ...], Shape]]:
    """Return the best placements of few devices for all numbers of replicas that differ by stage,
    as the leading schedule has them.
    """
    best_placements: list[tuple[tuple[int, ...], Shape]] = []
    for shape, proposals in uneven_placements(search.request):
        seconds: dict[Proposal, float] = {}
        for proposal in proposals:
            candidate = None if search.is_over else search.evaluate(proposal)
            seconds[proposal] = math.inf if candidate is None else candidate.step_s
        for proposal in sorted(seconds, key=lambda proposal: seconds[proposal])[:PLACED]:
            replicas = proposal.replicas
            assert isinstance(replicas, tuple)
            best_placements.append((replicas, replace(shape, devices=proposal.devices)))
    return best_placements


@dataclass
class _Kind:
    """The configurations with one schedule and the same numbers of stages and of replicas.

    Attributes:
        configurations: most promising first.
        nearest_s: the least seconds per step of those that gave a plan.
        misses: number of those that gave none.
    """

    configurations: list[Configuration] = field(default_factory=list)
    nearest_s: float = math.inf
    misses: int = 0

    def is_hopeless(self, search: PlanSearch) -> bool:
        """Return whether the kind has not come near the best plan so far, or has given no plan in
        several configurations. As long as nothing fits, every kind may still be the one that does.
        """
        if not search.feasible:
            return False
        if self.nearest_s == math.inf:
            return self.misses >= MISSES
        return self.nearest_s > FAR * search.best_s

    def evaluate(self, search: PlanSearch, configuration: Configuration, balance: Balance) -> None:
        """Evaluate one of the configurations, and note how near it came."""
        # It cannot win, and says nothing about its kind: neither a miss nor near.
        if configuration.bound_s > search.cutoff_s:
            return
        candidate = search.evaluate_configuration(configuration, balance)
        if candidate is None:
            self.misses += 1
        else:
            self.nearest_s = min(self.nearest_s, candidate.step_s)


def _search(
    search: PlanSearch,
    space: SearchSpace,
    slowdown: Mapping[tuple[Shape, int], float],
    balance: Balance,
) -> None:
    """Evaluate all configurations that were not tried yet: the most promising of every kind, then
    the second of those kinds that came near the best, and so on.
    """

    def corrected_estimate(configuration: Configuration) -> float:
        """Return the estimate, corrected by the scan."""
        key = configuration.shape, configuration.micro_batches
        return configuration.estimate_s * slowdown.get(key, 1.0)

    untried = [
        configuration
        for configuration in space.configurations
        if (configuration, balance) not in search.tried
    ]
    kinds: defaultdict[tuple[str, int, int], _Kind] = defaultdict(_Kind)
    for configuration in sorted(untried, key=corrected_estimate):
        key = configuration.schedule, configuration.stages, configuration.shape.pipelines
        kinds[key].configurations.append(configuration)
    for turn in range(max((len(kind.configurations) for kind in kinds.values()), default=0)):
        for kind in kinds.values():
            if turn >= len(kind.configurations) or kind.is_hopeless(search):
                continue
            if search.is_over:
                return
            kind.evaluate(search, kind.configurations[turn], balance)


def _evaluate_all(search: PlanSearch, proposals: Iterable[Proposal]) -> None:
    """Evaluate proposals until the budget is spent."""
    for proposal in proposals:
        if search.is_over:
            break
        search.evaluate(proposal)


def _evaluate_other_planners(search: PlanSearch) -> float:
    """Evaluate the plans of all other planners that match the request; if asynchronous schedules
    are allowed, also their plans with synchronous ones. Return the seconds per step of the fastest.
    """
    requests = [search.request]
    if search.request.asynchronous:
        requests.append(replace(search.request, asynchronous=False))
    fastest = math.inf
    for request, entry in product(requests, PLANNERS.entries().values()):
        if entry.name == NAME or search.is_over:
            continue
        try:
            plan = entry.make(request)
        except PenstockError as error:
            # A planner of one paper may refuse what the others accept; its reason is reported.
            search.reject(f"{entry.name}: {error}")
            continue
        if not _matches(search.request, plan):
            continue
        fastest = min(fastest, plan.predicted.step_s)
        # Its plan becomes a proposal like any other, so that one simulation compares all of them.
        if plan.predicted.step_s <= search.cutoff_s:
            search.evaluate(
                Proposal(
                    plan.lengths,
                    plan.schedule_name,
                    plan.micro_batches,
                    plan.schedule_options,
                    plan.recompute,
                    plan.weights,
                    plan.devices,
                )
            )
    return fastest


def _matches(request: PlanRequest, plan: Plan) -> bool:
    """Return whether the plan of another planner is within the request."""
    if request.schedules is None:
        schedule_allowed = plan.synchronous or request.asynchronous
    else:
        schedule_allowed = plan.schedule_name in {facts.name for facts in request.families()}
    replicas = plan.schedule.copies
    return all(
        (
            schedule_allowed,
            request.stages in (None, plan.stages),
            request.micro_batches in (None, plan.micro_batches),
            replicas <= request.copies_allowed,
            request.by in ("bottleneck", plan.lengths),
            request.weights in (None, plan.weights),
        )
    )


def _reject_each_schedule(search: PlanSearch, space: SearchSpace) -> None:
    """If no shape takes the requested number of stages, record the reason of each schedule."""
    if space.configurations or search.request.stages is None:
        return
    lengths = tuple(partition_uniform(len(search.request.profile), search.request.stages))
    for facts in search.request.families():
        search.evaluate(Proposal(lengths, facts.name, search.request.micro_batch_counts()[-1]))


def _simulate_skipped_kinds(search: PlanSearch, space: SearchSpace) -> None:
    """Simulate the best configuration of each kind that was skipped, so that the table shows by how
    much it loses.
    """
    evaluated = {candidate.kind for candidate in search.feasible + search.representatives}
    skipped: dict[object, Configuration] = {}
    for configuration in space.configurations:
        name = configuration.schedule if configuration.stages > 1 else ""
        kind = name, configuration.stages, configuration.shape.pipelines
        if kind not in evaluated:
            skipped.setdefault(kind, configuration)
    for configuration in list(skipped.values())[: max(0, ROWS - len(evaluated))]:
        if search.may_explain:
            search.evaluate_configuration(configuration, force=configuration.shape.pipelines == 1)


def _table(search: PlanSearch, chosen: Evaluated) -> list[Evaluated]:
    """Return the rows of the plan's table: the best of each kind, and candidates that would be
    faster if they fitted.
    """
    nearest = first_of_kind(sorted(search.infeasible, key=by_memory))[:INFEASIBLE_ROWS]
    simulated = [
        replace(candidate.simulated(), memory_shortfall=candidate.memory_shortfall)
        for candidate in nearest
    ]
    faster = [candidate for candidate in simulated if candidate.step_s < chosen.step_s]
    by_speed = sorted(search.feasible + search.representatives, key=by_time)
    others = first_of_kind([chosen, *by_speed])
    return [*others[: ROWS - len(faster)], *sorted(faster, key=by_time)]
