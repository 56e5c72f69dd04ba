"""ZB-V: no bubble between a rank's first op and its last, with the memory of 1F1B."""

from __future__ import annotations

from penstock.schedule.bidirectional import BidirectionalProgram
from penstock.schedule.catalogue import register
from penstock.schedule.op import Program, Schedule
from penstock.schedule.updates import with_updates
from penstock.schedule.v_shape import ranks_of_v, stages_of_v


@register(
    "zb-v",
    synchronous=True,
    stages_per_rank="2",
    splits_backward=True,
    source="Qi et al. 2024, Zero Bubble Pipeline Parallelism (arXiv 2401.10241), section 6; "
    "the order of torch's ScheduleZBVZeroBubble",
)
def zb_v(stages: int, micro_batches: int) -> Schedule:
    """Run a V: the last stage is on the rank of the first, so the first backward starts there.

        rank 0   stages 0 and 2p - 1        F0 I0 W0: the way down, stage r of rank r
        rank 1   stages 1 and 2p - 2        F1 I1 W1: the way up, stage 2p - 1 - r
        ...

    Facts for f = i = w and free links, p ranks, 2p stages, m micro-batches, m >= 2p:
        longest span        2m(f + i + w), of one stage each (half a rank's): no bubble in the span
                            definition
        makespan            (p - 1)f more
        in flight           2p stages on every rank: p whole micro-batches, as many as 1F1B's first
                            rank holds

    Below 2p - 1 micro-batches the order is that for 2p - 1 without the missing ones.

    >>> print(zb_v(4, 3))
    rank 0 | 0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0I0 0W0 3F2 3I2 3W2 3U1 0I1 0W1 0I2 0W2 0U1
    rank 1 | 1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1I1 2I2 1I2 1W1 2W2 2U1 1W2 1U1

    Raises:
        ScheduleError: the number of stages is odd.
    """
    ranks = ranks_of_v("zb-v", stages)

    def program(rank: int) -> Program:
        total = max(2 * ranks - 1, micro_batches)
        line = BidirectionalProgram(stages_of_v(rank, ranks))
        line.write(2 * (ranks - rank) - 1, "F0")
        line.write(rank, "F1 F0")
        line.write(ranks - rank, "F1 I1 W1")
        line.write(total - line.count("F1"), "F0 I0 W0 F1 I1 W1")
        line.write(rank, "I0 I1")
        line.write(ranks - rank, "I0 W0")
        line.write(total - line.count("W1"), "W1")
        line.write(total - line.count("W0"), "W0")
        return with_updates(line.ops(micro_batches))

    return Schedule(tuple(map(program, range(ranks))))
