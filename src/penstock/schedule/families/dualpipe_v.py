"""DualPipe-V: DeepSeek's DualPipe on a V, so that one copy of every stage is enough."""

from __future__ import annotations

from penstock.errors import ScheduleError
from penstock.schedule.catalogue import register
from penstock.schedule.op import Program, Schedule
from penstock.schedule.v_shape import VProgram, ranks_of_v


@register("dualpipe-v", synchronous=True, stages_per_rank="2", splits_backward=True,
          source="DeepSeek-AI 2024, DualPipeV in github.com/deepseek-ai/DualPipe")  # fmt: skip
def dualpipe_v(stages: int, micro_batches: int) -> Schedule:
    """In the steady state the forward of one way stands beside the backward of the other, to hide each other's transfers.

    A pair of an F and a B stands here as F, then B: an op is one unit of work, and a rank does one at a time. Both may begin
    and end by themselves, so the programs take no longer than the published ones, whose pairs begin and end together.

    Facts for equal costs f, b = i + w per stage (half a rank's) and free links, p ranks, 2p stages, m micro-batches:
        makespan            for w <= i and w <= f <= b at most 2m(f + b) + (p - 1)(f + 2b - 3w), the published figure,
                            which pairs that begin and end together take for f = i = w; as written here it is
                            2m(f + b) + (p - 1)f then
        in flight           2p + 1 stages on every rank: p + 1/2 whole micro-batches

    >>> print(dualpipe_v(4, 4))
    rank 0 | 0F0 0F1 0F2 3F0 3I0 3W0 3F1 0F3 3B1 3F2 0B0 3B2 3F3 0B1 3B3 3U1 0I2 0W2 0I3 0W3 0U1
    rank 1 | 1F0 2F0 1F1 2F1 1F2 2B0 2F2 1B0 1F3 2B1 2F3 1B1 2B2 1B2 2I3 1I3 2W3 2U1 1W3 1U1

    Raises:
        ScheduleError: the number of stages is odd, or there are fewer micro-batches than stages.
    """
    ranks = ranks_of_v("dualpipe-v", stages)
    if micro_batches < stages:
        raise ScheduleError(f"dualpipe-v of {stages} stages takes {stages} micro-batches or more and got {micro_batches}; "
                            "zb-v takes any number")  # fmt: skip

    def program(rank: int) -> Program:
        below = ranks - rank - 1
        line = VProgram(rank, ranks)
        line.write(2 * below, "F0")
        line.write(rank + 1, "F0 F1")
        line.write(below, "I1 W F1")
        line.write(micro_batches - 2 * ranks + rank + 1, "F0 B1 F1 B0")
        line.write(below, "B1 F1 B0")
        # 2 (rank + 1) backwards, of which the second half are split.
        line.write((rank + 1) // 2, "B1 B0")
        line.write((rank + 1) % 2, "B1 I0")
        line.write((rank + 1) // 2, "I1 I0")
        line.write(below, "W I0")
        line.write(rank + 1, "W")
        return line.ops(micro_batches)

    return Schedule(tuple(map(program, range(ranks))))
