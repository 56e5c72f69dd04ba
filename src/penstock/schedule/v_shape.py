"""What schedules on a V share: how many ranks they have, and which two stages stand on each."""

from __future__ import annotations

from penstock.errors import ScheduleError
from penstock.schedule.placement import stages_of, vee


def ranks_of_v(name: str, stages: int) -> int:
    """The number of ranks of the schedule called `name`: half that of its stages.

    Raises:
        ScheduleError: the number of stages is odd.
    """
    if stages % 2:
        around = f"{stages - 1} or {stages + 1}" if stages > 1 else "2"
        raise ScheduleError(
            f"{name} goes down the ranks and back up, two stages on each: it takes an even number of stages "
            f"and got {stages}; ask for {around}"
        )
    return stages // 2


def stages_of_v(rank: int, ranks: int) -> tuple[int, int]:
    """The two stages of `rank`, the one on the way down first."""
    down, back = stages_of(vee(2 * ranks, ranks), rank)
    return down, back
