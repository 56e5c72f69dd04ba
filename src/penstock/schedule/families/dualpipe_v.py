"""DualPipe-V: DeepSeek's DualPipe on a V, with a single copy of every stage."""

from __future__ import annotations

from penstock.errors import ScheduleError
from penstock.schedule.bidirectional import BidirectionalProgram
from penstock.schedule.catalogue import register
from penstock.schedule.families.dualpipe import write_steps
from penstock.schedule.op import Op, Program, Schedule
from penstock.schedule.updates import with_updates
from penstock.schedule.v_shape import ranks_of_v, stages_of_v


@register(
    "dualpipe-v",
    synchronous=True,
    stages_per_rank="2",
    splits_backward=True,
    source="DeepSeek-AI 2024, DualPipeV in github.com/deepseek-ai/DualPipe",
)
def dualpipe_v(stages: int, micro_batches: int) -> Schedule:
    """Overlap forwards on the way down with backwards on the way up in the steady state.

    So the transfers of each overlap with the compute of the other. `0F3&3B1` is such a pair: both
    start when the inputs of both are available, and both end together.

    Facts for f = i = w, b = i + w per stage (half a rank's) and free links, p ranks, 2p stages, m
    micro-batches, a pair taking FB = f + b:
        makespan            2m(f + b) + (p - 1)(FB + b - 3w)
                            2m(f + b) + (p - 1)f if the ops of a pair run one after the other and
                            each waits only for its own inputs
        in flight           2p + 1 stages on every rank: p + 1/2 whole micro-batches

    >>> print(dualpipe_v(4, 4))
    rank 0 | 0F0 0F1 0F2 3F0 3I0 3W0 3F1 0F3&3B1 3F2&0B0 3B2 3F3&0B1 3B3 3U1 0I2 0W2 0I3 0W3 0U1
    rank 1 | 1F0 2F0 1F1 2F1 1F2 2B0 2F2&1B0 1F3&2B1 2F3&1B1 2B2 1B2 2I3 1I3 2W3 2U1 1W3 1U1

    Raises:
        ScheduleError: the number of stages is odd, or there are fewer micro-batches than stages.
    """
    ranks = ranks_of_v("dualpipe-v", stages)
    if micro_batches < stages:
        raise ScheduleError(
            f"dualpipe-v of {stages} stages takes {stages} micro-batches or more and got "
            f"{micro_batches}; zb-v takes any number"
        )
    programs: list[Program] = []
    pairs: set[tuple[Op, Op]] = set()
    for rank in range(ranks):
        program = BidirectionalProgram(stages_of_v(rank, ranks))
        write_steps(program, rank, ranks, micro_batches - 2 * ranks)
        programs.append(with_updates(program.ops(micro_batches)))
        pairs |= program.pairs(micro_batches)
    return Schedule(tuple(programs), pairs=frozenset(pairs))
