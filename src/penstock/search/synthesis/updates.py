"""Updates before the end: where they shorten a schedule, although other ops of their ranks then
start later.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from penstock.errors import ScheduleError
from penstock.schedule.op import Kind, Op, Program, Schedule


def with_early_updates(schedule: Schedule, seconds: Callable[[Schedule], float]) -> Schedule:
    """The schedule with every stage's U right after its last backward, on all ranks that hold it,
    where that shortens it.

    Programs from words have the updates of two copies at the end, and others only in idle time that
    is long enough.
    """
    best = seconds(schedule)
    for stage in reversed(range(schedule.stages)):
        update = Op(Kind.U, stage, 1)
        moved = replace(
            schedule, programs=tuple(_early(program, update) for program in schedule.programs)
        )
        try:
            now = seconds(moved)
        # two ranks would come to the updates of two stages in different orders, and wait for each
        # other
        except ScheduleError:
            continue
        if now < best:
            schedule, best = moved, now
    return schedule


def _early(program: Program, update: Op) -> Program:
    if update not in program:
        return program
    left = [op for op in program if op != update]
    after = max(
        place for place, op in enumerate(left) if op.stage == update.stage and op.kind is not Kind.U
    )
    return (*left[: after + 1], update, *left[after + 1 :])
