"""The catalogue's schedules that the runtime plays, in the sizes that each can be made in."""

from __future__ import annotations

import itertools

import penstock as ps
from penstock.errors import ScheduleError
from penstock.schedule.op import Schedule

#: Those made to measure have their own tests.
SYNCHRONOUS = [
    name for name, facts in ps.schedules().items() if facts.synchronous and not facts.needs_costs
]


def made_as(name: str, stages: int, micro_batches: int) -> Schedule | None:
    """The schedule, or None if it does not take these numbers."""
    try:
        return ps.schedule(name, stages, micro_batches)
    except ScheduleError:
        return None


#: Every schedule in stages 1, 2, 4 and micro-batches 1, 3, 8, as far as it goes, by name and sizes.
MADE = {
    f"{name}-{stages}-{micro_batches}": schedule
    for name, stages, micro_batches in itertools.product(SYNCHRONOUS, (1, 2, 4), (1, 3, 8))
    if (schedule := made_as(name, stages, micro_batches)) is not None
}
#: Data parallelism on top: whole pipelines, split backwards, several stages per rank, bidirectional
#: ones, and single stages.
REPLICATED = {
    f"{name}-{stages}-{micro_batches}-x{str(replicas).strip('()').replace(', ', '+')}": ps.schedule(name, stages, micro_batches, replicas=replicas)
    for name, stages, micro_batches, replicas in (
        ("1f1b", 1, 3, 3), ("zb-h1", 2, 8, 2), ("interleaved", 4, 8, 2), ("chimera", 2, 8, 2), ("1f1b", 2, 8, (2, 1)),
        ("gpipe", 4, 8, (1, 3, 2, 1)),
    )
}  # fmt: skip
#: Those whose micro-batches are equal parts of the batch, which any model takes, and those that cut
#: them further.
EVERY = {key: schedule for key, schedule in (MADE | REPLICATED).items() if schedule.slicing is None}
SLICED = {key: schedule for key, schedule in MADE.items() if schedule.slicing is not None}


def one_of_each(micro_batches: int) -> dict[str, Schedule]:
    """Every schedule that does not cut its micro-batches once, by name, in three stages, or else
    four, two, or one.
    """
    schedules = {
        name: [made_as(name, stages, micro_batches) for stages in (3, 4, 2, 1)]
        for name in SYNCHRONOUS
    }
    whole = {
        name: [schedule for schedule in sizes if schedule and schedule.slicing is None]
        for name, sizes in schedules.items()
    }
    return {name: sizes[0] for name, sizes in whole.items() if sizes}
