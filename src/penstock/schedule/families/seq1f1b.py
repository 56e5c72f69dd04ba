"""Seq1F1B: 1F1B over slices of sequences, with a fraction of its bubble and of its memory."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.schedule.catalogue import register
from penstock.schedule.families.terapipe import along_tokens, backwards
from penstock.schedule.op import Kind, Op, Schedule


@register(
    "seq1f1b",
    synchronous=True,
    stages_per_rank="1",
    splits_backward=False,
    causal=True,
    source="Sun et al. 2024, Seq1F1B (arXiv 2406.03488), section 3",
)
def seq1f1b(
    stages: int,
    micro_batches: int,
    slices: int | None = None,
    slice_shares: Sequence[float] | None = None,
) -> Schedule:
    """Run 1F1B over slices: p - s - 2 + k forwards ahead on stage s, then one of each in turn.

    The backward of a micro-batch's last slice comes first. Only for models in which a token
    depends on those before it and on no later one (causal attention).

    Facts for equal costs f and b of a whole micro-batch and free links, p stages, m micro-batches,
    k equal slices:
        makespan            m(f + b) + (p - 1)(f + b)/k
        in flight           min(m, (p - s - 1 + k)/k) micro-batches on stage s
    With k = 1 it is `1f1b`.

    >>> print(seq1f1b(3, 2, slices=2))
    rank 0 | 0F0 0F1 0F2 0F3 0B1 0B0 0B3 0B2 0U1
    rank 1 | 1F0 1F1 1F2 1B1 1F3 1B0 1B3 1B2 1U1
    rank 2 | 2F0 2F1 2B1 2F2 2B0 2F3 2B3 2B2 2U1

    Args:
        stages: number of stages.
        micro_batches: micro-batches per batch.
        slices: number of equal slices of every sequence (k); 2 by default.
        slice_shares: instead, the share of each slice, starting at the first token, with sum 1. The
            paper's shares give all slices equal time (its cwp): the more tokens precede a slice,
            the shorter it is.

    Raises:
        ScheduleError: there is no slice, or the shares do not add up to 1.
    """
    slicing = along_tokens("seq1f1b", micro_batches, slices, slice_shares)
    slices_per_micro_batch = len(slicing.shares[0])
    backward_order = backwards(slicing)

    def program(stage: int) -> tuple[Op, ...]:
        ahead = stages - stage - 2 + slices_per_micro_batch
        forwards = [Op(Kind.F, stage, n) for n in range(len(backward_order))]
        ops = forwards[:ahead]
        for next_forward, n in enumerate(backward_order, start=ahead):
            ops += [*forwards[next_forward : next_forward + 1], Op(Kind.B, stage, n)]
        return (*ops, Op(Kind.U, stage, 1))

    return Schedule(tuple(map(program, range(stages))), slicing=slicing)
