"""Interleaved zero bubble: several stages on every rank, and split backwards, whose weight half (W)
fills what would be bubble.
"""

from __future__ import annotations

from collections.abc import Sequence

from penstock.schedule.catalogue import register
from penstock.schedule.families.interleaved import group_size_for, visiting_order
from penstock.schedule.op import Kind, Op, Program, Schedule
from penstock.schedule.placement import ranks_for, ring, stages_of
from penstock.schedule.updates import with_updates

NAME = "interleaved-zero-bubble"


@register(
    NAME,
    aliases=("interleaved-zb",),
    synchronous=True,
    stages_per_rank="chunks",
    splits_backward=True,
    source="ScheduleInterleavedZeroBubble of torch.distributed.pipelining (torch 2.13): ZB-H1 of "
    "Qi et al. 2024 (arXiv 2401.10241) with the stages of Narayanan et al. 2021, Megatron-LM",
)
def interleaved_zero_bubble(
    stages: int, micro_batches: int, chunks: int = 2, group: int | None = None
) -> Schedule:
    """Run ZB-H1 over v stages on every rank, in groups of g micro-batches as in `interleaved`.

    Stages s, s + p, s + 2p … are on rank s. Rank r starts with (v - 1)g + p - r forwards, then runs
    one I, one W and one forward in turn; every W comes r backwards after its I.

    Facts for equal costs f, i, w per rank (f/v, i/v, w/v per stage) with w <= f and w <= i, and
    free links, p ranks, m micro-batches:
        makespan            m(f + i + w) + (p - 1)(f + i - w)/v: the bubble of zb-h1, divided by v
        in flight           min(mv, (v - 1)g + p) on every rank, over all its stages, of which
                            min(mv, (v - 1)g + p - r) still wait for their I on rank r
    With v = 1 it is `zb-h1` for m >= p.

    >>> print(interleaved_zero_bubble(4, 3, chunks=2))
    rank 0 | 0F0 0F1 0F2 2F0 2F1 2I0 2W0 2F2 2I1 2W1 2I2 2W2 2U1 0I0 0W0 0I1 0W1 0I2 0W2 0U1
    rank 1 | 1F0 1F1 1F2 3F0 3I0 3F1 3I1 3W0 3F2 3I2 3W1 1I0 3W2 3U1 1I1 1W0 1I2 1W1 1W2 1U1

    Args:
        stages: number of stages, a multiple of `chunks`; there are p = stages / chunks ranks.
        micro_batches: micro-batches per batch, at least p.
        chunks: stages on every rank (v).
        group: micro-batches in a group (g), at least p; the last group must be empty, or have p or
            more. By default the minimum. torch has max(1, m // p) groups of equal size.

    Raises:
        ScheduleError: a number is out of range.
    """
    ranks = ranks_for(NAME, stages, "chunks", chunks)
    group_size = group_size_for(NAME, ranks, micro_batches, group)
    order = visiting_order(chunks, micro_batches, group_size)
    placement = ring(stages, ranks)
    programs = []
    for rank in range(ranks):
        ahead = (chunks - 1) * group_size + ranks - rank
        programs.append(_program(stages_of(placement, rank), order, ahead, lag=rank))
    return Schedule(tuple(programs))


def _program(
    rank_stages: Sequence[int], order: Sequence[tuple[int, int]], ahead: int, lag: int
) -> Program:
    """Return the program of a rank.

    Args:
        rank_stages: the stages of the rank.
        order: the order of its forwards, as `visiting_order` returns it.
        ahead: number of forwards before the first backward.
        lag: number of backwards between an I and its W, fewer than there are.
    """
    forwards = [Op(Kind.F, rank_stages[chunk], m) for chunk, m in order]
    input_grads = [Op(Kind.I, rank_stages[-1 - chunk], m) for chunk, m in order]
    weight_grads = [Op(Kind.W, op.stage, op.micro_batch) for op in input_grads]
    ops = forwards[:ahead]
    for n, input_grad in enumerate(input_grads):
        ops.append(input_grad)
        if n >= lag:
            ops.append(weight_grads[n - lag])
        # Empty in the cool-down, where no forwards are left.
        ops += forwards[ahead + n : ahead + n + 1]
    ops += weight_grads[len(weight_grads) - lag :]
    return with_updates(ops)
