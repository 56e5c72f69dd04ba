"""DualPipe: two pipelines that meet, and in the steady state the forward of one runs together with
the backward of the other.
"""

from __future__ import annotations

from penstock.errors import ScheduleError
from penstock.schedule.catalogue import register
from penstock.schedule.meetings import with_meetings
from penstock.schedule.op import Op, Schedule
from penstock.schedule.two_ways import TwoWays


@register(
    "dualpipe",
    synchronous=True,
    stages_per_rank="2",
    splits_backward=True,
    source="DeepSeek-AI 2024, DeepSeek-V3, section 3.2.1, and github.com/deepseek-ai/DualPipe",
)
def dualpipe(stages: int, micro_batches: int) -> Schedule:
    """One pipeline goes down the ranks, one up, each through a copy of every stage: even
    micro-batches down, odd ones up.

        rank 0   stages 0 and p - 1       F0 I0 W0: the way of the nearer end, which is down on the
                 first half of the ranks
        rank 1   stages 1 and p - 2       F1 I1 W1: the other way
        ...      F0&B1: both as one, so that each other's transfers can hide behind the computing

    Facts for f = i = w, b = i + w, and free links, p stages on p ranks, m micro-batches, a pair
    taking FB = f + b:
        makespan            m(f + b) + (p/2 - 1)(FB + b - 3w)
        in flight           p + 1 micro-batches on every rank, of both stages together
        weights             two copies of every stage: rank s and rank p - 1 - s add up their
                            gradients

    >>> print(dualpipe(2, 4))
    rank 0 | 0F0 1F1 0F2 1B1 1F3&0B0 1B3 0I2 0W2 1U1 0U1
    rank 1 | 0F1 1F0 0F3 1B0 1F2&0B1 1B2 0I3 0W3 1U1 0U1

    Raises:
        ScheduleError: the stages or the micro-batches are odd in number, or there are fewer than
        two micro-batches per stage.
    """
    if stages % 2:
        raise ScheduleError(
            f"dualpipe puts two stages on every rank, s and {stages - 1} - s, which must differ: it takes an even "
            f"number of stages and got {stages}"
        )
    if micro_batches % 2 or micro_batches < 2 * stages:
        raise ScheduleError(
            f"dualpipe sends half of the micro-batches each way: in {stages} stages it takes an even number of "
            f"{2 * stages} or more and got {micro_batches}; chimera takes fewer"
        )
    lines = []
    for rank in range(stages):
        near = min(rank, stages - 1 - rank)
        odd = int(rank != near)
        line = TwoWays((near, stages - 1 - near), first=(odd, 1 - odd), step=2)
        write_steps(line, near, stages // 2, micro_batches // 2 - stages)
        lines.append(line)
    pairs = frozenset[tuple[Op, Op]]().union(*(line.pairs(micro_batches) for line in lines))
    return Schedule(with_meetings([line.ops(micro_batches) for line in lines], pairs), pairs=pairs)


def write_steps(line: TwoWays, rank: int, ranks: int, more: int) -> None:
    """DeepSeek's eight steps for a rank so many places from the end of a pipeline that turns, or
    meets another, after `ranks`.

    `more` is by how many every stage's micro-batches pass the least number. The first F0&B1 where
    the pipeline turns is not one: that backward is of the forward before it, which has just come
    from the same rank.
    """
    below = ranks - rank - 1
    line.write(2 * below, "F0")
    line.write(rank + 1, "F0 F1")
    line.write(below, "I1 W F1")
    line.write(1, "F0 B1 F1&B0" if below == 0 else "F0&B1 F1&B0")
    line.write(more + rank, "F0&B1 F1&B0")
    line.write(below, "B1 F1&B0")
    # 2 (rank + 1) backwards, of which the second half are split.
    line.write((rank + 1) // 2, "B1 B0")
    line.write((rank + 1) % 2, "B1 I0")
    line.write((rank + 1) // 2, "I1 I0")
    line.write(below, "W I0")
    line.write(rank + 1, "W")
