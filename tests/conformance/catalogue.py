"""The catalogue's schedules that the runtime plays, in the sizes that each can be made in."""

from __future__ import annotations

import itertools

import penstock as ps
from penstock.errors import ScheduleError
from penstock.schedule.op import Schedule

SYNCHRONOUS = [name for name, facts in ps.schedules().items() if facts.synchronous]


def made_as(name: str, stages: int, micro_batches: int) -> Schedule | None:
    """The schedule, or None if it does not take these numbers, or places a stage on several ranks, which cannot be run yet."""
    try:
        schedule = ps.schedule(name, stages, micro_batches)
    except ScheduleError:
        return None
    return schedule if all(len(ranks) == 1 for ranks in schedule.ranks_of_stage) else None


#: Every schedule in stages 1, 2, 4 and micro-batches 1, 3, 8, as far as it goes, by name and sizes.
EVERY = {
    f"{name}-{stages}-{micro_batches}": schedule
    for name, stages, micro_batches in itertools.product(SYNCHRONOUS, (1, 2, 4), (1, 3, 8))
    if (schedule := made_as(name, stages, micro_batches)) is not None
}


def one_of_each(micro_batches: int) -> dict[str, Schedule]:
    """Every schedule once, by name, in three stages, or else four, two, or one."""
    made = {name: [made_as(name, stages, micro_batches) for stages in (3, 4, 2, 1)] for name in SYNCHRONOUS}
    return {name: next(filter(None, sizes)) for name, sizes in made.items() if any(sizes)}
