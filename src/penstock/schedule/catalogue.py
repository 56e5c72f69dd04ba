"""All schedules by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from inspect import signature

from penstock.errors import ScheduleError
from penstock.registry import Registered, Registry
from penstock.schedule.op import Schedule
from penstock.schedule.replicas import check_replicas, pipelines, round_robin

FAMILIES: Registry[Callable[..., Schedule]] = Registry("schedule", "penstock.schedule.families")
register = FAMILIES.register


@dataclass(frozen=True)
class ScheduleFacts:
    """What is known of a schedule before it is made. Those that need costs are made by
    `penstock.search.schedules`.
    """

    name: str
    synchronous: bool
    stages_per_rank: str
    splits_backward: bool
    source: str
    aliases: tuple[str, ...] = ()
    needs_costs: bool = False
    #: Whether it takes models only in which no token depends on a later one.
    causal: bool = False
    #: The weight rule that the order of its ops is made for.
    weights: str = "flush"


def schedules() -> dict[str, ScheduleFacts]:
    """Every schedule's name and short facts."""
    return {
        name: ScheduleFacts(name=name, **entry.facts)  # type: ignore[arg-type]  # facts are checked by this call
        for name, entry in FAMILIES.entries().items()
    }


def schedule(
    name: str,
    stages: int,
    micro_batches: int = 1,
    replicas: int | Sequence[int] = 1,
    **options: object,
) -> Schedule:
    """Make the schedule called `name` (or by an alias).

    >>> print(schedule("1f1b", stages=2, micro_batches=4, replicas=(2, 1)))
    rank 0 | 0F0 0F2 0B0 0B2 0U1
    rank 1 | 0F1 0F3 0B1 0B3 0U1
    rank 2 | 1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3 1U1

    Args:
        name: one of `schedules()`.
        stages: number of stages, at least 1.
        micro_batches: micro-batches per batch, at least 1.
        replicas: how many times the whole pipeline stands there (data parallelism): of R pipelines
        each takes every R-th
            micro-batch. Or how many ranks each stage has, where the schedule has one stage per
            rank: they take its micro-batches in turn. The copies of a stage add up their gradients
            at U.
        options: what this schedule takes besides; its own docstring says.

    Raises:
        UnknownName: no schedule has that name.
        ScheduleError: this schedule does not take these numbers or options.
    """
    entry = FAMILIES.find(name)
    for word, number in (("stages", stages), ("micro-batches", micro_batches)):
        if isinstance(number, bool) or not isinstance(number, int) or number < 1:
            raise ScheduleError(f"{entry.name} needs at least 1 of {word} and got {number!r}")
    check_replicas(entry.name, stages, replicas)
    try:
        made = _made(entry, stages, micro_batches, replicas, options)
    except TypeError as error:
        if not options:
            raise
        raise ScheduleError(f"{entry.name} does not take {', '.join(options)}: {error}") from error
    said = options if replicas == 1 else {"replicas": replicas, **options}
    plain = {
        option: tuple(value) if isinstance(value, list) else value for option, value in said.items()
    }
    return replace(made, name=entry.name, options=tuple(plain.items()))


def _made(
    entry: Registered[Callable[..., Schedule]],
    stages: int,
    micro_batches: int,
    replicas: int | Sequence[int],
    options: dict[str, object],
) -> Schedule:
    """The family's schedule, as often as `replicas` says. A family with an argument of that name
    sees to single stages itself.
    """
    if not isinstance(replicas, int):
        if "replicas" in signature(entry.make).parameters:
            return entry.make(stages, micro_batches, replicas=replicas, **options)
        return round_robin(
            replace(entry.make(stages, micro_batches, **options), name=entry.name), replicas
        )
    if replicas > micro_batches:
        raise ScheduleError(
            f"{entry.name} with replicas={replicas} needs {replicas} micro-batches or more, one for each, and got "
            f"{micro_batches}"
        )
    each = -(-micro_batches // replicas)
    try:
        made = entry.make(stages, each, **options)
    except ScheduleError as error:
        if replicas == 1:
            raise
        raise ScheduleError(
            f"{error} (with replicas={replicas}, {each} of the {micro_batches} go to the first)"
        ) from error
    if replicas > 1 and made.stream is not None and micro_batches % replicas:
        raise ScheduleError(
            f"{entry.name} goes on from batch to batch, so with replicas={replicas} every one of them needs as many "
            f"micro-batches of a batch as the others: {micro_batches} is no multiple of {replicas}"
        )
    return made if replicas == 1 else pipelines(made, replicas, micro_batches * made.batches)
