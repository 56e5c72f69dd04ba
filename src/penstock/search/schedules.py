"""Every schedule by name: those of the zoo, which numbers suffice to make, and those made to
measure, which need costs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace

from penstock.errors import ScheduleError, SettingError, UnknownName
from penstock.registry import Registry
from penstock.schedule import catalogue as zoo
from penstock.schedule.catalogue import ScheduleFacts
from penstock.schedule.op import Schedule
from penstock.simulate.costs import Costs

#: Functions of (costs, micro_batches, **options), where `costs.forward` has one entry per stage and
#: so tells their number; an entry
#: may be one number per micro-batch. Their facts are those of the zoo's; name and options are set
#: here.
MADE_TO_MEASURE: Registry[Callable[..., Schedule]] = Registry(
    "schedule", "penstock.search.made_to_measure"
)
register = MADE_TO_MEASURE.register

#: Costs that have one entry per boundary; all others have one per stage.
_PER_BOUNDARY = ("transfer", "transfer_back", "latency", "bandwidth", "boundary_bytes")


def schedules() -> dict[str, ScheduleFacts]:
    """Every schedule's name and short facts: the zoo first, then those that need costs."""
    made = {
        name: ScheduleFacts(name=name, needs_costs=True, **entry.facts)  # type: ignore[arg-type]  # checked by this call
        for name, entry in MADE_TO_MEASURE.entries().items()
    }
    return {**zoo.schedules(), **made}


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
        stages: number of stages, at least 1. May be left out where `costs` have one entry per
        stage. micro_batches: micro-batches per batch, at least 1. costs: what to measure it for:
        only for schedules whose facts say `needs_costs`, and these need it. options: what this
        schedule takes besides; its own docstring says. All of the zoo take `replicas`: a number of
        pipelines,
            or of ranks for every stage (`penstock.schedule.catalogue.schedule`).

    Raises:
        UnknownName: no schedule has that name.
        ScheduleError: this schedule does not take these numbers, costs or options.
        SettingError: the costs are for another number of stages.
    """
    facts = schedules()
    own = {alias: each.name for each in facts.values() for alias in each.aliases} | {
        word: word for word in facts
    }
    if name not in own:
        raise UnknownName("schedule", name, [*facts, *sorted(own.keys() - facts.keys())])
    name = own[name]
    if facts[name].needs_costs:
        if not isinstance(costs, Costs):
            raise ScheduleError(
                f"{name} is made to measure: say for what, such as costs=ps.Costs(forward=[1, 2, 1]), "
                f"not {costs!r}"
            )
        return _made_to_measure(name, costs, stages, micro_batches, options)
    if costs is not None:
        raise ScheduleError(
            f"{name} is the same for all costs: leave them out, and give them to simulate"
        )
    if stages is None:
        raise ScheduleError(f"{name} needs the number of stages, such as stages=4")
    return zoo.schedule(name, stages, micro_batches, **options)  # type: ignore[arg-type]  # replicas may be one: checked there


def _made_to_measure(
    name: str, costs: Costs, stages: int | None, micro_batches: int, options: dict[str, object]
) -> Schedule:
    if isinstance(micro_batches, bool) or not isinstance(micro_batches, int) or micro_batches < 1:
        raise ScheduleError(f"{name} needs at least 1 of micro-batches and got {micro_batches!r}")
    spread = spread_forward(costs, stages, micro_batches)
    try:
        made = MADE_TO_MEASURE.find(name).make(spread, micro_batches, **options)
    except TypeError as error:
        if not options:
            raise
        raise ScheduleError(f"{name} does not take {', '.join(options)}: {error}") from error
    plain = {
        option: tuple(value) if isinstance(value, list) else value
        for option, value in options.items()
    }
    # What the maker found out, such as a lower bound, stands behind what it was asked for.
    found = tuple((key, value) for key, value in made.options if key not in plain)
    return replace(made, name=name, options=(*plain.items(), *found))


def spread_forward(costs: Costs, stages: int | None, micro_batches: int) -> Costs:
    """`costs` with one entry per stage in `forward`, checked to be for `stages` if that is given.

    Raises:
        ScheduleError: nothing tells the number of stages, or it is below 1.
        SettingError: entries of the costs are for different numbers of stages, or for others than
        `stages`.
    """
    listed = {
        field.name: value
        for field in fields(costs)
        if isinstance(value := getattr(costs, field.name), tuple)
    }
    counts = {name: len(value) + (name in _PER_BOUNDARY) for name, value in listed.items()}
    if stages is None:
        if not counts:
            raise ScheduleError(
                "the costs do not say how many stages there are: give their number, such as stages=4"
            )
        stages = next(iter(counts.values()))
    if isinstance(stages, bool) or not isinstance(stages, int) or stages < 1:
        raise ScheduleError(f"a schedule needs at least 1 of stages and got {stages!r}")
    for name, count in counts.items():
        if count != stages:
            raise SettingError(f"costs: {name} is for {count} stages, the schedule has {stages}")
    forward = costs.forward
    if forward is None:
        raise SettingError("costs: forward is needed")
    if callable(forward):
        return replace(
            costs,
            forward=[[forward(stage, m) for m in range(micro_batches)] for stage in range(stages)],
        )
    return (
        costs
        if isinstance(forward, tuple)
        else replace(costs, forward=costs.spread("forward", stages))
    )
