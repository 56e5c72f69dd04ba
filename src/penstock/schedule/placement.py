"""Where stages stand when a rank holds several: the rank of every stage, in the order of the
stages.

    4 ranks              rank 0     rank 1     rank 2      rank 3
    linear, 4 stages     0          1          2           3
    ring, 8 stages       0 4        1 5        2 6         3 7           the last rank feeds the
                         first
    vee, 8 stages        0 7        1 6        2 5         3 4           no hop where the pipeline
                         turns
    zigzag, 16 stages    0 7 8 15   1 6 9 14   2 5 10 13   3 4 11 12     nor at its other turns
    both ways, 4 stages  0 3        1 2        2 1         3 0           two copies: one pipeline
                         down the ranks, one up

Source: ring, Narayanan et al. 2021 (Megatron-LM), section 2.2; vee, Qi et al. 2024 (zero bubble),
section 6; zigzag, Liu et al. 2023 (Hanayo); both ways, Li and Hoefler 2021 (Chimera), section 3.1.
"""

from __future__ import annotations

from penstock.errors import ScheduleError


def ranks_for(name: str, stages: int, option: str, number: int, *, each: int = 1) -> int:
    """How many ranks hold `stages` stages when every rank holds `number` times `each`.

    Args:
        name, option: the schedule and its option that has `number`, for messages.
        stages: number of stages.
        number: at least 1.
        each: stages that one of `number` stands for.

    Raises:
        ScheduleError: `number` counts nothing, or the stages cannot be dealt out evenly.
    """
    if isinstance(number, bool) or not isinstance(number, int) or number < 1:
        raise ScheduleError(f"{name} needs at least 1 of {option} and got {number!r}")
    held = number * each
    if stages % held:
        near = (
            f"{stages - stages % held} or {stages - stages % held + held}"
            if stages > held
            else str(held)
        )
        raise ScheduleError(
            f"{name} with {option}={number} holds {held} stages on every rank, so it takes a multiple of {held} "
            f"stages, not {stages}: say {near}, or other {option}"
        )
    return stages // held


def linear(stages: int) -> tuple[int, ...]:
    """Stage s on rank s.

    >>> linear(3)
    (0, 1, 2)
    """
    return tuple(range(stages))


def ring(stages: int, ranks: int) -> tuple[int, ...]:
    """Stage s on rank s mod `ranks`: round and round.

    >>> ring(6, 3)
    (0, 1, 2, 0, 1, 2)
    """
    return tuple(stage % ranks for stage in range(stages))


def zigzag(stages: int, ranks: int) -> tuple[int, ...]:
    """To and fro: `ranks` stages up, as many down, and so on; the two stages at a turn share a
    rank.

    >>> zigzag(8, 2)
    (0, 1, 1, 0, 0, 1, 1, 0)
    """
    return tuple(
        stage % ranks if stage // ranks % 2 == 0 else ranks - 1 - stage % ranks
        for stage in range(stages)
    )


def vee(stages: int, ranks: int) -> tuple[int, ...]:
    """Up and down once, `stages` being twice `ranks`: stages s and 2 `ranks` - 1 - s share rank s.

    >>> vee(6, 3)
    (0, 1, 2, 2, 1, 0)
    """
    return zigzag(stages, ranks)


def both_ways(stages: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Two copies of every stage: of the pipeline down the ranks stage s is on rank s, of the one up
    on rank `stages` - 1 - s.

    >>> both_ways(3)
    ((0, 1, 2), (2, 1, 0))
    """
    return linear(stages), linear(stages)[::-1]


def stages_of(placement: tuple[int, ...], rank: int) -> tuple[int, ...]:
    """The stages on `rank`, ascending.

    >>> stages_of(vee(6, 3), 1)
    (1, 4)
    """
    return tuple(stage for stage, home in enumerate(placement) if home == rank)
