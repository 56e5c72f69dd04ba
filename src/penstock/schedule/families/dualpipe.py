"""DualPipe: two pipelines in opposite directions, which overlap forwards with backwards."""

from __future__ import annotations

from penstock.errors import ScheduleError
from penstock.schedule.bidirectional import BidirectionalProgram
from penstock.schedule.catalogue import register
from penstock.schedule.gradient_sync import with_gradient_sync
from penstock.schedule.op import Op, Schedule


@register(
    "dualpipe",
    synchronous=True,
    stages_per_rank="2",
    splits_backward=True,
    source="DeepSeek-AI 2024, DeepSeek-V3, section 3.2.1, and github.com/deepseek-ai/DualPipe",
)
def dualpipe(stages: int, micro_batches: int) -> Schedule:
    """Send even micro-batches down the ranks and odd ones up, each through a copy of every stage.

        rank 0   stages 0 and p - 1       F0 I0 W0: the pipeline that starts at the nearer end,
                                          which is the one down on the first half of the ranks
        rank 1   stages 1 and p - 2       F1 I1 W1: the other pipeline
        ...                               F0&B1: both as one, so that the transfers of each overlap
                                          with the compute of the other

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
        ScheduleError: the number of stages or of micro-batches is odd, or there are fewer than two
            micro-batches per stage.
    """
    if stages % 2:
        raise ScheduleError(
            f"dualpipe puts two stages on every rank, s and {stages - 1} - s, which must differ: "
            f"it takes an even number of stages and got {stages}"
        )
    if micro_batches % 2 or micro_batches < 2 * stages:
        raise ScheduleError(
            f"dualpipe sends half of the micro-batches each way: in {stages} stages it takes an "
            f"even number of {2 * stages} or more and got {micro_batches}; chimera takes fewer"
        )
    programs: list[list[Op]] = []
    pairs: set[tuple[Op, Op]] = set()
    for rank in range(stages):
        # Even micro-batches start at rank 0, odd ones at the last: those of the nearer end come
        # first.
        near = min(rank, stages - 1 - rank)
        parity = int(rank != near)
        program = BidirectionalProgram(
            (near, stages - 1 - near), first=(parity, 1 - parity), step=2
        )
        write_steps(program, near, stages // 2, micro_batches // 2 - stages)
        programs.append(program.ops(micro_batches))
        pairs |= program.pairs(micro_batches)
    return Schedule(with_gradient_sync(programs, frozenset(pairs)), pairs=frozenset(pairs))


def write_steps(program: BidirectionalProgram, rank: int, ranks: int, extra: int) -> None:
    """Write DeepSeek's eight steps for one rank.

    Args:
        program: the program to write to.
        rank: distance of the rank from the nearer end of the pipeline.
        ranks: number of ranks from the end to the point where the pipeline turns, or where the two
            pipelines cross.
        extra: number of micro-batches of each stage beyond the minimum.
    """
    ranks_after = ranks - rank - 1
    program.write(2 * ranks_after, "F0")
    program.write(rank + 1, "F0 F1")
    program.write(ranks_after, "I1 W F1")
    # Where the pipeline turns, the first F0 and B1 are not a pair: the backward is that of the
    # forward before it, on the same rank.
    program.write(1, "F0 B1 F1&B0" if ranks_after == 0 else "F0&B1 F1&B0")
    program.write(extra + rank, "F0&B1 F1&B0")
    program.write(ranks_after, "B1 F1&B0")
    # 2 (rank + 1) backwards, of which the second half are split.
    program.write((rank + 1) // 2, "B1 B0")
    program.write((rank + 1) % 2, "B1 I0")
    program.write((rank + 1) // 2, "I1 I0")
    program.write(ranks_after, "W I0")
    program.write(rank + 1, "W")
