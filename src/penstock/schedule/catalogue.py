"""Catalogue of schedule families: generate a schedule by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from inspect import signature

from penstock.errors import ScheduleError
from penstock.registry import Registered, Registry
from penstock.schedule.op import Schedule
from penstock.schedule.options import option_error, option_names
from penstock.schedule.replicas import check_replicas, pipelines, round_robin
from penstock.schedule.size_limit import check_size

FAMILIES: Registry[Callable[..., Schedule]] = Registry("schedule", "penstock.schedule.families")
register = FAMILIES.register


@dataclass(frozen=True)
class ScheduleFacts:
    """Properties of a schedule family that do not depend on the number of stages.

    Attributes:
        name: name of the family.
        synchronous: whether the pipeline is flushed at the end of every batch.
        stages_per_rank: number of stages per rank, possibly as an expression of its options.
        splits_backward: whether backwards are split into I (input) and W (weights).
        source: publication or code that the schedule is taken from.
        aliases: other names of the family.
        needs_costs: whether it is generated from costs; `penstock.search.schedules` does that.
        causal: whether it requires a model in which no token depends on a later one.
        weights: the weight rule that the order of its ops is designed for.
    """

    name: str
    synchronous: bool
    stages_per_rank: str
    splits_backward: bool
    source: str
    aliases: tuple[str, ...] = ()
    needs_costs: bool = False
    causal: bool = False
    weights: str = "flush"


def schedules() -> dict[str, ScheduleFacts]:
    """Return the facts of all schedule families by name."""
    facts_by_name = {}
    for name, entry in FAMILIES.entries().items():
        # The constructor checks the names of the registered facts.
        facts_by_name[name] = ScheduleFacts(name=name, **entry.facts)  # type: ignore[arg-type]
    return facts_by_name


def schedule(
    name: str,
    stages: int,
    micro_batches: int = 1,
    replicas: int | Sequence[int] = 1,
    **options: object,
) -> Schedule:
    """Generate the schedule called `name`.

    >>> print(schedule("1f1b", stages=2, micro_batches=4, replicas=(2, 1)))
    rank 0 | 0F0 0F2 0B0 0B2 0U1
    rank 1 | 0F1 0F3 0B1 0B3 0U1
    rank 2 | 1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3 1U1

    Args:
        name: one of `schedules()`, or an alias.
        stages: number of stages, at least 1.
        micro_batches: micro-batches per batch, at least 1.
        replicas: number of copies of the whole pipeline (data parallelism): each of R pipelines
            takes every R-th micro-batch. Or the number of ranks of each stage, for schedules with
            one stage per rank: the ranks of a stage take its micro-batches in turn. The copies of
            a stage add up their gradients at U.
        options: options of this schedule; see the docstring of its function.

    Raises:
        UnknownName: no schedule has that name.
        ScheduleError: this schedule does not accept these numbers or options, or would not fit
            into memory.
    """
    entry = FAMILIES.find(name)
    for quantity, number in (("stages", stages), ("micro-batches", micro_batches)):
        if isinstance(number, bool) or not isinstance(number, int) or number < 1:
            raise ScheduleError(f"{entry.name} needs at least 1 of {quantity} and got {number!r}")
    check_size(entry.name, stages, micro_batches, options)
    check_replicas(entry.name, stages, replicas)
    try:
        new_schedule = _replicated(entry, stages, micro_batches, replicas, options)
    except TypeError as error:
        # Then it is no misspelt option, but an error inside the family.
        if not options:
            raise
        valid_names = dict.fromkeys((*option_names(entry.make), "replicas"))
        raise option_error(entry.name, options, valid_names, error) from error
    all_options = options if replicas == 1 else {"replicas": replicas, **options}
    # Tuples in place of lists, so that the schedule is hashable.
    hashable_options = tuple(
        (option, tuple(value) if isinstance(value, list) else value)
        for option, value in all_options.items()
    )
    return replace(new_schedule, name=entry.name, options=hashable_options)


def _replicated(
    entry: Registered[Callable[..., Schedule]],
    stages: int,
    micro_batches: int,
    replicas: int | Sequence[int],
    options: dict[str, object],
) -> Schedule:
    """Generate the family's schedule with replicas.

    Replicas per stage are passed on to a family that has a parameter `replicas`; for the others
    the schedule of single ranks is distributed round-robin.
    """
    if not isinstance(replicas, int):
        if "replicas" in signature(entry.make).parameters:
            return entry.make(stages, micro_batches, replicas=replicas, **options)
        single = replace(entry.make(stages, micro_batches, **options), name=entry.name)
        return round_robin(single, replicas)
    if replicas > micro_batches:
        raise ScheduleError(
            f"{entry.name} with replicas={replicas} needs at least {replicas} micro-batches, one "
            f"for each replica, and got {micro_batches}"
        )
    micro_batches_per_replica = -(-micro_batches // replicas)
    try:
        single = entry.make(stages, micro_batches_per_replica, **options)
    except ScheduleError as error:
        if replicas == 1:
            raise
        raise ScheduleError(
            f"{error} (with replicas={replicas}, the first replica has "
            f"{micro_batches_per_replica} of the {micro_batches} micro-batches)"
        ) from error
    if replicas > 1 and single.stream is not None and micro_batches % replicas:
        raise ScheduleError(
            f"{entry.name} runs batch after batch without a flush, so with replicas={replicas} "
            "every replica needs the same number of micro-batches of a batch: "
            f"{micro_batches} is not a multiple of {replicas}"
        )
    if replicas == 1:
        return single
    return pipelines(single, replicas, micro_batches * single.batches)
