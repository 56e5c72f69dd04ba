"""From the state of the page to schedules and timelines.

Nothing is simulated here: `penstock.search.schedules` makes the schedules and
`penstock.simulate.simulate` their timelines.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import Any, Final

from penstock.errors import PenstockError, ScheduleError, SettingError
from penstock.event import Timeline
from penstock.explore.choices import Options, ScheduleChoice, choice
from penstock.explore.quantities import spread_over_boundaries, spread_over_stages
from penstock.explore.state import Choice, State
from penstock.schedule.op import Schedule
from penstock.schedule.size_limit import check_size
from penstock.schedule.streaming.period import with_batch_count
from penstock.search.schedules import schedule
from penstock.simulate.costs import Costs
from penstock.simulate.simulate import simulate_schedule
from penstock.simulate.steady_state import Steady, steady
from penstock.simulate.weight_versions import versions_per_stage

#: Stages x micro-batches that the page simulates: 64 ranks with 4 stages each and 256
#: micro-batches.
MAX_FORWARDS: Final = 65_536
#: Ops of an asynchronous schedule with its own number of batches, up to which its steady state is
#: computed: it takes several simulations of more batches.
_MAX_STEADY_OPS: Final = 6_000
#: Stages per rank that are tried for a schedule.
_MAX_STAGES_PER_RANK: Final = 32
#: Ranks and micro-batches with which the number of stages per rank is determined. Every schedule
#: supports these numbers.
_PROBE_RANKS, _PROBE_MICRO_BATCHES = 4, 16

#: The costs of a state: per stage, in seconds and in bytes, and per boundary.
STAGE_SECONDS = ("forward", "backward", "input_grad", "weight_grad", "update")
STAGE_BYTES = ("activation_bytes", "weight_bytes")
BOUNDARY_COSTS = ("boundary_bytes", "bandwidth", "latency")


@dataclass(frozen=True)
class Result:
    """What a schedule takes with the costs of the page.

    Attributes:
        whole: the schedule. If it is asynchronous, with its own number of batches.
        simulated: the simulated schedule: `whole`, or the first batches of it.
        costs: of its stages.
        timeline: of `simulated`.
        weight_copies: weight-sized tensors that each rank holds.
    """

    whole: Schedule
    simulated: Schedule
    costs: Costs
    timeline: Timeline
    weight_copies: tuple[float, ...]


@dataclass(frozen=True)
class Panel:
    """A schedule of the page with its result.

    Attributes:
        name: "a" or "b".
        choice: the schedule, as the catalogue describes it.
        options: the options that the user has set, or the page for the user.
        result: None if the schedule does not support the numbers of the page.
        error: why not.
    """

    name: str
    choice: ScheduleChoice
    options: Options
    result: Result | None
    error: str = ""


def evaluate(state: State) -> tuple[Panel, ...]:
    """Return the panels of a state: one per schedule."""
    panels = []
    for name, selected in (("a", state.a), ("b", state.b)):
        if selected is None:
            continue
        entry = choice(selected.schedule)
        options = tuple({**dict(entry.defaults), **dict(selected.options)}.items())
        try:
            panels.append(Panel(name, entry, options, result_of(state, selected)))
        except PenstockError as error:
            panels.append(Panel(name, entry, options, None, str(error)))
    return tuple(panels)


def result_of(state: State, selected: Choice) -> Result:
    """Return the result of one schedule.

    Raises:
        PenstockError: the schedule does not support the numbers of the page, or they do not go
            together.
    """
    entry = choice(selected.schedule)
    options = tuple({**dict(entry.defaults), **dict(selected.options)}.items())
    stages = state.ranks * stages_per_rank(selected.schedule, entry.structural(options))
    _check_size(selected.schedule, stages, state.micro_batches, options)
    costs = stage_costs(state, stages)
    if entry.facts.needs_costs:
        whole = _cost_schedule(state, entry, stages, costs, options)
        versions = versions_per_stage(whole)
    else:
        whole, versions = _zoo_schedule(
            selected.schedule, stages, state.micro_batches, options, state.replicas
        )
    if whole.stream is not None and costs.weight_bytes is not None:
        costs = replace(costs, weight_versions=versions)
    simulated = whole if whole.stream is None else with_batch_count(whole, state.batches)
    _check_ops(simulated)
    timeline = simulate_schedule(simulated, costs, overlap=state.overlap, recompute=state.recompute)
    copies = tuple(sum(versions[stage] for stage in on_rank) for on_rank in whole.stages_of_rank)
    return Result(whole, simulated, costs, timeline, copies)


def _check_size(name: str, stages: int, micro_batches: int, options: Options) -> None:
    """Refuse numbers that are too large for the page, before the schedule is made.

    Raises:
        ScheduleError: they are.
    """
    check_size(name, stages, micro_batches, dict(options))
    if stages * micro_batches > MAX_FORWARDS:
        raise ScheduleError(
            f"{name} with {stages} stages x {micro_batches} micro-batches is too large for this "
            f"page: stages x micro-batches may be {MAX_FORWARDS:,} at most. `penstock simulate` "
            "has no such limit"
        )


def _check_ops(schedule: Schedule) -> None:
    """Refuse a schedule with too many ops for the page; slices and batches multiply them.

    Raises:
        ScheduleError: it has too many.
    """
    forwards = sum(len(program) for program in schedule.programs) // 2
    # Updates, and W of split backwards, are not counted by the limit.
    if forwards > 2 * MAX_FORWARDS:
        raise ScheduleError(
            f"{schedule.name} has {2 * forwards:,} ops with these numbers, too many for this page: "
            "take fewer micro-batches, or `penstock simulate`"
        )


@cache
def stages_per_rank(name: str, options: Options) -> int:
    """Return how many stages a schedule puts on each rank of a pipeline.

    A stage that has copies on several ranks, as in bidirectional pipelines, counts once.

    Args:
        name: of the schedule.
        options: those on which the number depends.
    """
    if choice(name).facts.needs_costs:
        return 1
    arguments: dict[str, Any] = dict(options)
    for count in range(1, _MAX_STAGES_PER_RANK + 1):
        try:
            probe = schedule(name, count * _PROBE_RANKS, _PROBE_MICRO_BATCHES, **arguments)
        except ScheduleError:
            continue
        if probe.ranks >= _PROBE_RANKS:
            return count
    # The schedule refuses the options: its own message comes when it is made.
    return 1


def stage_costs(state: State, stages: int) -> Costs:
    """Return the costs of every stage.

    Raises:
        SettingError: a field has another number of values than the page has ranks, or fields
            contradict each other.
    """
    amounts: dict[str, Any] = {}
    for name in (*STAGE_SECONDS, *STAGE_BYTES):
        values = getattr(state, name)
        if values is None:
            continue
        spread = spread_over_stages(values, state.ranks, stages, name)
        # Whole bytes, as the command line reads them.
        amounts[name] = list(map(round, spread)) if name in STAGE_BYTES else list(spread)
    for name in BOUNDARY_COSTS:
        values = getattr(state, name)
        if values is not None:
            spread = spread_over_boundaries(values, state.ranks, stages, name)
            amounts[name] = list(spread)
    return Costs(**amounts, links=state.links)


def _replicas(values: tuple[int, ...]) -> int | tuple[int, ...]:
    """Return replicas as schedules take them: a number, or one per stage."""
    return values[0] if len(values) == 1 else values


@lru_cache(maxsize=16)
def _zoo_schedule(
    name: str, stages: int, micro_batches: int, options: Options, replicas: tuple[int, ...]
) -> tuple[Schedule, tuple[float, ...]]:
    """Return a schedule of the zoo, and the weight-sized tensors of its stages.

    The last few are remembered, with their dependencies.
    """
    arguments: dict[str, Any] = dict(options)
    if replicas != (1,):
        arguments["replicas"] = _replicas(replicas)
    whole = schedule(name, stages, micro_batches, **arguments)
    _check_ops(whole)
    return whole, versions_per_stage(whole)


def _cost_schedule(
    state: State, entry: ScheduleChoice, stages: int, costs: Costs, options: Options
) -> Schedule:
    """Return a schedule that is made from the costs.

    Raises:
        SettingError: there are replicas, which these schedules do not have.
    """
    name = entry.facts.name
    if state.replicas != (1,):
        raise SettingError(f"{name} is made for one pipeline: set the replicas to 1 to see it")
    arguments: dict[str, Any] = dict(options)
    return schedule(name, stages, state.micro_batches, costs=costs, **arguments)


def steady_state_of(state: State, result: Result) -> Steady | None:
    """Return the steady state of an asynchronous schedule.

    Returns None for a synchronous one, for one that does not repeat itself, and for one so large
    that it would take seconds.
    """
    whole = result.whole
    if whole.stream is None or sum(map(len, whole.programs)) > _MAX_STEADY_OPS:
        return None
    try:
        return steady(whole, result.costs, state.recompute, overlap=state.overlap)
    except ScheduleError:
        return None


def overfull_ranks(state: State, timeline: Timeline) -> tuple[int, ...]:
    """Return the ranks whose peak memory exceeds the limit of the page."""
    if state.memory_limit is None or timeline.peak_memory is None:
        return ()
    limit = state.memory_limit
    return tuple(rank for rank, peak in enumerate(timeline.peak_memory) if peak > limit)
