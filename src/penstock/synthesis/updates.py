"""Move updates before the end of the batch where that shortens a schedule, although other ops of
their ranks then start later.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from penstock.errors import ScheduleError
from penstock.schedule.op import Kind, Op, Program, Schedule


def with_early_updates(schedule: Schedule, seconds: Callable[[Schedule], float]) -> Schedule:
    """Return the schedule with the U of some stages right after their last backward, on all ranks
    that hold them: of those stages where it shortens the schedule.

    Decoded programs have the updates of two copies at the end, and others only in idle time that is
    long enough.
    """
    best_s = seconds(schedule)
    for stage in reversed(range(schedule.stages)):
        update = Op(Kind.U, stage, 1)
        programs = tuple(_with_early_update(program, update) for program in schedule.programs)
        moved = replace(schedule, programs=programs)
        try:
            moved_s = seconds(moved)
        except ScheduleError:
            # Two ranks have the updates of two stages in different orders, and deadlock.
            continue
        if moved_s < best_s:
            schedule, best_s = moved, moved_s
    return schedule


def _with_early_update(program: Program, update: Op) -> Program:
    """Return a program with an update right after the last other op of its stage."""
    if update not in program:
        return program
    others = [op for op in program if op != update]
    places = [
        place
        for place, op in enumerate(others)
        if op.stage == update.stage and op.kind is not Kind.U
    ]
    after = max(places) + 1
    return (*others[:after], update, *others[after:])
