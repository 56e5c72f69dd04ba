"""Placement of stages on ranks for schedules with several stages per rank.

A placement gives the rank of every stage, in the order of the stages.

    4 ranks                   rank 0     rank 1     rank 2      rank 3
    linear, 4 stages          0          1          2           3
    ring, 8 stages            0 4        1 5        2 6         3 7
    vee, 8 stages             0 7        1 6        2 5         3 4
    zigzag, 16 stages         0 7 8 15   1 6 9 14   2 5 10 13   3 4 11 12
    bidirectional, 4 stages   0 3        1 2        2 1         3 0

In a ring the last rank feeds the first. In a vee no transfer is needed where the pipeline turns,
and in a zigzag at none of its turns. Bidirectional has two copies of every stage: one pipeline down
the ranks, one up.

Source: ring, Narayanan et al. 2021 (Megatron-LM), section 2.2; vee, Qi et al. 2024 (zero bubble),
section 6; zigzag, Liu et al. 2023 (Hanayo); bidirectional, Li and Hoefler 2021 (Chimera), section
3.1.
"""

from __future__ import annotations

from penstock.errors import ScheduleError


def ranks_for(name: str, stages: int, option: str, number: int, *, factor: int = 1) -> int:
    """Return the number of ranks when every rank holds `number` times `factor` stages.

    Args:
        name, option: the schedule, and its option whose value is `number`; for messages.
        stages: number of stages.
        number: at least 1.
        factor: number of stages per unit of `number`.

    Raises:
        ScheduleError: `number` is not a positive integer, or the stages cannot be distributed
            evenly.
    """
    if isinstance(number, bool) or not isinstance(number, int) or number < 1:
        raise ScheduleError(f"{name} needs at least 1 of {option} and got {number!r}")
    stages_per_rank = number * factor
    if stages % stages_per_rank:
        below = stages - stages % stages_per_rank
        valid = str(stages_per_rank)
        if stages > stages_per_rank:
            valid = f"{below} or {below + stages_per_rank}"
        raise ScheduleError(
            f"{name} with {option}={number} has {stages_per_rank} stages on every rank, so it "
            f"takes a multiple of {stages_per_rank} stages, not {stages}: use {valid}, or another "
            f"value of {option}"
        )
    return stages // stages_per_rank


def linear(stages: int) -> tuple[int, ...]:
    """Place stage s on rank s.

    >>> linear(3)
    (0, 1, 2)
    """
    return tuple(range(stages))


def ring(stages: int, ranks: int) -> tuple[int, ...]:
    """Place stage s on rank s mod `ranks`.

    >>> ring(6, 3)
    (0, 1, 2, 0, 1, 2)
    """
    return tuple(stage % ranks for stage in range(stages))


def zigzag(stages: int, ranks: int) -> tuple[int, ...]:
    """Place stages up and down the ranks in turn; the two stages at a turn share a rank.

    >>> zigzag(8, 2)
    (0, 1, 1, 0, 0, 1, 1, 0)
    """
    return tuple(
        stage % ranks if stage // ranks % 2 == 0 else ranks - 1 - stage % ranks
        for stage in range(stages)
    )


def vee(stages: int, ranks: int) -> tuple[int, ...]:
    """Place 2 `ranks` stages up and down once: stages s and 2 `ranks` - 1 - s share rank s.

    >>> vee(6, 3)
    (0, 1, 2, 2, 1, 0)
    """
    return zigzag(stages, ranks)


def bidirectional(stages: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Place two copies of every stage, as two pipelines in opposite directions.

    Stage s is on rank s of the pipeline down the ranks, and on rank `stages` - 1 - s of the one up.

    >>> bidirectional(3)
    ((0, 1, 2), (2, 1, 0))
    """
    return linear(stages), linear(stages)[::-1]


def stages_of(placement: tuple[int, ...], rank: int) -> tuple[int, ...]:
    """Return the stages on `rank`, ascending.

    >>> stages_of(vee(6, 3), 1)
    (1, 4)
    """
    return tuple(stage for stage, stage_rank in enumerate(placement) if stage_rank == rank)
