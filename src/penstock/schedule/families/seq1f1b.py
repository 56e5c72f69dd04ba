"""Seq1F1B: 1F1B over slices of sequences, for a fraction of its bubble and of its memory."""

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
    """Stage s runs p - s - 2 + k slices ahead, then one forward and one backward in turn, then the
    backwards left.

    Of every micro-batch the last slice's backward comes first. Only for models in which a token
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
        slices: into how many equal slices every sequence is cut (k); 2 if nothing is said.
        slice_shares: or the share of each slice, from the first token on, together 1. The paper's
        shares make all slices take
            equal time (its cwp): the more tokens before a slice, the shorter it is.

    Raises:
        ScheduleError: the slices are none, or their shares do not add up to 1.
    """
    slicing = along_tokens("seq1f1b", micro_batches, slices, slice_shares)
    each, backward = len(slicing.shares[0]), backwards(slicing)

    def program(stage: int) -> tuple[Op, ...]:
        ahead = stages - stage - 2 + each
        forwards = [Op(Kind.F, stage, n) for n in range(len(backward))]
        ops = forwards[:ahead]
        for done, n in enumerate(backward, start=ahead):
            ops += [*forwards[done : done + 1], Op(Kind.B, stage, n)]
        return (*ops, Op(Kind.U, stage, 1))

    return Schedule(tuple(map(program, range(stages))), slicing=slicing)
