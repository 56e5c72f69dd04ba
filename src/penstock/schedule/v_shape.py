"""Ranks and stages of V-shaped schedules, which go down the ranks and back up."""

from __future__ import annotations

from penstock.errors import ScheduleError
from penstock.schedule.placement import stages_of, vee


def ranks_of_v(name: str, stages: int) -> int:
    """Return the number of ranks of the schedule called `name`: half the number of stages.

    Raises:
        ScheduleError: the number of stages is odd.
    """
    if stages % 2:
        valid = f"{stages - 1} or {stages + 1}" if stages > 1 else "2"
        raise ScheduleError(
            f"{name} goes down the ranks and back up, with two stages on each: it takes an even "
            f"number of stages and got {stages}; use {valid}"
        )
    return stages // 2


def stages_of_v(rank: int, ranks: int) -> tuple[int, int]:
    """Return the two stages of `rank`, the one on the way down first."""
    down, up = stages_of(vee(2 * ranks, ranks), rank)
    return down, up
