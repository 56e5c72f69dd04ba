"""All schedules by name: those of the zoo, which only need numbers, and cost schedules, which are
built from the costs of the stages.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace

from penstock.errors import ScheduleError, SettingError, UnknownName
from penstock.registry import Registry
from penstock.schedule import catalogue as zoo
from penstock.schedule.catalogue import ScheduleFacts
from penstock.schedule.op import Schedule
from penstock.schedule.options import option_error, option_names
from penstock.simulate.costs import PER_BOUNDARY, Costs

#: Registry of cost schedules: functions of (costs, micro_batches, **options). `costs.forward` has
#: one entry per stage, which tells the number of stages; an entry may be one number per
#: micro-batch. The facts are those of the zoo. Name and options of the schedule are set here.
COST_SCHEDULES: Registry[Callable[..., Schedule]] = Registry(
    "schedule", "penstock.search.cost_schedules"
)
register = COST_SCHEDULES.register


def schedules() -> dict[str, ScheduleFacts]:
    """Return every schedule's name and facts: the zoo first, then the cost schedules.

    Examples:
        >>> schedules()["1f1b"].synchronous
        True
    """
    cost_schedules = {
        name: ScheduleFacts(name=name, needs_costs=True, **entry.facts)  # type: ignore[arg-type]  # checked by this call
        for name, entry in COST_SCHEDULES.entries().items()
    }
    return {**zoo.schedules(), **cost_schedules}


def schedule(
    name: str,
    stages: int | None = None,
    micro_batches: int = 1,
    *,
    costs: Costs | None = None,
    **options: object,
) -> Schedule:
    """Make the schedule called `name` (or by an alias).

    >>> print(schedule("1f1b", stages=2, micro_batches=2))
    rank 0 | 0F0 0F1 0B0 0B1 0U1
    rank 1 | 1F0 1B0 1F1 1B1 1U1

    Args:
        name: one of `schedules()`.
        stages: number of stages, at least 1. Optional where `costs` have one entry per stage.
        micro_batches: micro-batches per batch, at least 1.
        costs: what to build the schedule from. Required for schedules whose facts say
            `needs_costs`, refused for all others.
        options: further options, as the docstring of the schedule describes them. All schedules of
            the zoo take `replicas`: a number of pipelines, or of ranks for every stage
            (`penstock.schedule.catalogue.schedule`).

    Raises:
        UnknownName: no schedule has that name.
        ScheduleError: this schedule does not take these numbers, costs or options.
        SettingError: the costs are for another number of stages.
    """
    facts = schedules()
    name = _full_name(name, facts)
    if facts[name].needs_costs:
        if not isinstance(costs, Costs):
            raise ScheduleError(
                f"{name} is built from costs: give them, such as "
                f"costs=ps.Costs(forward=[1, 2, 1]), not {costs!r}"
            )
        return _cost_schedule(name, costs, stages, micro_batches, options)
    if costs is not None:
        raise ScheduleError(
            f"{name} is the same for all costs: leave them out, and give them to simulate"
        )
    if stages is None:
        raise ScheduleError(f"{name} needs the number of stages, such as stages=4")
    return zoo.schedule(name, stages, micro_batches, **options)  # type: ignore[arg-type]  # replicas may be one: checked there


def _full_name(name: str, facts: dict[str, ScheduleFacts]) -> str:
    """Resolve an alias.

    Raises:
        UnknownName: `name` is neither a name nor an alias.
    """
    if name in facts:
        return name
    aliases = {alias: entry.name for entry in facts.values() for alias in entry.aliases}
    if name not in aliases:
        raise UnknownName("schedule", name, [*facts, *sorted(aliases.keys() - facts.keys())])
    return aliases[name]


def _cost_schedule(
    name: str, costs: Costs, stages: int | None, micro_batches: int, options: dict[str, object]
) -> Schedule:
    """Make a cost schedule, with its name and options."""
    if isinstance(micro_batches, bool) or not isinstance(micro_batches, int) or micro_batches < 1:
        raise ScheduleError(f"{name} needs at least 1 of micro-batches and got {micro_batches!r}")
    stage_costs = spread_forward(costs, stages, micro_batches)
    make = COST_SCHEDULES.find(name).make
    try:
        schedule = make(stage_costs, micro_batches, **options)
    except TypeError as error:
        if not options:
            raise
        raise option_error(name, options, option_names(make), error) from error
    requested = {
        option: tuple(value) if isinstance(value, list) else value
        for option, value in options.items()
    }
    # Results, such as a lower bound, come after the requested options.
    results = tuple((key, value) for key, value in schedule.options if key not in requested)
    return replace(schedule, name=name, options=(*requested.items(), *results))


def spread_forward(costs: Costs, stages: int | None, micro_batches: int) -> Costs:
    """Return `costs` with one entry per stage in `forward`, checked to be for `stages` stages if
    that is given.

    Raises:
        ScheduleError: the number of stages is unknown or below 1.
        SettingError: entries of the costs are for different numbers of stages, or for others than
            `stages`.
    """
    stages = _check_stages(costs, stages)
    forward = costs.forward
    if forward is None:
        raise SettingError("costs: forward is needed")
    if isinstance(forward, tuple):
        return costs
    if not callable(forward):
        return replace(costs, forward=costs.spread("forward", stages))
    rows = []
    for stage in range(stages):
        rows.append([forward(stage, micro_batch) for micro_batch in range(micro_batches)])
    return replace(costs, forward=rows)


def _check_stages(costs: Costs, stages: int | None) -> int:
    """Return the number of stages, and check that all costs are for it.

    Raises:
        ScheduleError, SettingError: as `spread_forward`.
    """
    counts = {}
    for field in fields(costs):
        value = getattr(costs, field.name)
        if isinstance(value, tuple):
            counts[field.name] = len(value) + (field.name in PER_BOUNDARY)
    if stages is None:
        if not counts:
            raise ScheduleError(
                "the costs do not say how many stages there are: give their number, such as "
                "stages=4"
            )
        stages = next(iter(counts.values()))
    if isinstance(stages, bool) or not isinstance(stages, int) or stages < 1:
        raise ScheduleError(f"a schedule needs at least 1 of stages and got {stages!r}")
    for name, count in counts.items():
        if count != stages:
            raise SettingError(f"costs: {name} is for {count} stages, the schedule has {stages}")
    return stages
