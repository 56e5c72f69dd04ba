"""V-Half and V-Min: less memory than 1F1B on a V, at the cost of some bubble."""

from __future__ import annotations

from collections.abc import Callable

from penstock.schedule.catalogue import register
from penstock.schedule.list_schedule import from_block
from penstock.schedule.op import Kind, Schedule
from penstock.schedule.updates import with_updates
from penstock.schedule.v_shape import ranks_of_v, stages_of_v

_SOURCE = "Qi et al. 2024, Pipeline Parallelism with Controllable Memory (arXiv 2405.15362)"

#: Slots of a micro-batch on a rank: F on the way down, F on the way up, I of the stage on the way
#: up, I of the stage on the way down.
Offsets = tuple[int, int, int, int]


@register(
    "v-half",
    synchronous=True,
    stages_per_rank="2",
    splits_backward=True,
    source=f"{_SOURCE}, V-Half",
)
def v_half(stages: int, micro_batches: int) -> Schedule:
    """Run a V with half the activations of 1F1B, and about half its bubble.

    Facts for f = i = w = 1 on both stages of a rank together and free links, p ranks, 2p stages, m
    micro-batches, m >= p:
        makespan            3m + (3p - 7)/2 for even p, + (3p - 4)/2 for odd p, but + 1/2 for p = 2
                            and + 0 for p = 1 (1F1B: 3m + 3(p - 1)); the longest span too, for m >=
                            2p
        in flight           p // 2 + 1 whole micro-batches

    >>> print(v_half(4, 3))
    rank 0 | 0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 0I0 3W1 0W0 3F2 3I2 0I1 3W2 3U1 0I2 0W1 0W2 0U1
    rank 1 | 1F0 2F0 1F1 2F1 2I0 1I0 2W0 1F2 1W0 2F2 2I1 1I1 2I2 1I2 2W1 2W2 2U1 1W1 1W2 1U1

    Raises:
        ScheduleError: the number of stages is odd.
    """
    ranks = ranks_of_v("v-half", stages)
    # For even p two slots of a rank would else be equal modulo six, see `from_block`.
    late = 3 if ranks % 2 == 0 else 0
    return _schedule(
        ranks,
        micro_batches,
        lambda rank: (
            2 * rank,
            3 * ranks - rank - 2,
            3 * ranks + late + 2 * rank - 1,
            6 * ranks + late - rank - 2,
        ),
    )


@register(
    "v-min", synchronous=True, stages_per_rank="2", splits_backward=True, source=f"{_SOURCE}, V-Min"
)
def v_min(stages: int, micro_batches: int) -> Schedule:
    """Run a V with a third of the activations of 1F1B, and about two thirds of its bubble.

    Of these schedules, its time increases most if f, i and w differ.

    Facts for f = i = w = 1 on both stages of a rank together and free links, p ranks, 2p stages, m
    micro-batches, m > p:
        makespan            3m + 2p - 3.5 if 3 divides p, else 3m + 2p - 2.5, but 3m for p = 1
                            (1F1B: 3m + 3(p - 1)); the longest span too, for m >= 2p
        in flight           2, 2, 2, 3, 4, 5, 6 whole micro-batches for p = 2, 3, 4, 6, 8, 12, 16

    >>> print(v_min(4, 3))
    rank 0 | 0F0 0F1 3F0 3I0 3W0 0I0 0W0 3F1 3I1 3W1 0F2 0I1 0W1 3F2 3I2 3W2 3U1 0I2 0W2 0U1
    rank 1 | 1F0 2F0 2I0 1I0 1F1 2F1 2W0 1W0 2I1 1I1 1F2 2F2 2W1 1W1 2I2 1I2 2W2 2U1 1W2 1U1

    Raises:
        ScheduleError: the number of stages is odd.
    """
    ranks = ranks_of_v("v-min", stages)
    # For a p that 3 divides, two slots of a rank would else be equal modulo six.
    late = 2 if ranks % 3 == 0 else 0
    return _schedule(
        ranks,
        micro_batches,
        lambda rank: (
            rank,
            2 * ranks - rank - 1,
            2 * ranks + late + rank,
            4 * ranks + late - rank - 1,
        ),
    )


def _schedule(ranks: int, micro_batches: int, offsets: Callable[[int], Offsets]) -> Schedule:
    """Repeat a V-shaped block every six slots: F, I and W for each of two stages.

    Args:
        ranks, micro_batches: their numbers.
        offsets: returns the slots of micro-batch 0 on a rank.
    """
    block = []
    for rank in range(ranks):
        down, up = stages_of_v(rank, ranks)
        places = (Kind.F, down), (Kind.F, up), (Kind.I, up), (Kind.I, down)
        block.append(dict(zip(places, offsets(rank), strict=True)))
    return Schedule(tuple(map(with_updates, from_block(block, 6, micro_batches))))
