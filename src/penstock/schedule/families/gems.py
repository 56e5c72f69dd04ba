"""GEMS: two pipelines in opposite directions with one micro-batch in flight, for large models."""

from __future__ import annotations

from penstock.schedule.catalogue import register
from penstock.schedule.gradient_sync import with_gradient_sync
from penstock.schedule.op import Kind, Op, Schedule
from penstock.schedule.placement import bidirectional


@register(
    "gems",
    synchronous=True,
    stages_per_rank="2",
    splits_backward=False,
    source="Jain et al. 2020, GEMS: GPU-enabled memory-aware model-parallelism system",
)
def gems(stages: int, micro_batches: int) -> Schedule:
    """Send even micro-batches down the ranks and odd ones up, each when the one before turns back.

    Facts for equal costs f and b >= f and free links, p stages on p ranks, m micro-batches:
        makespan            m(f + pb) + (p - 1)f: a bubble ratio that approaches
                            (p - 1)/(p + 1/2) for b = 2f
        in flight           1 micro-batch on every rank, of both stages together
        weights             two copies of every stage, but one of the middle stage where p is odd

    >>> print(gems(3, 3))
    rank 0 | 0F0 0B0 2F1 2B1 0F2 2U1 0B2 0U1
    rank 1 | 1F0 1B0 1F1 1B1 1F2 1B2 1U1
    rank 2 | 2F0 2B0 0F1 0B1 2F2 2B2 2U1 0U1

    With one micro-batch there is one direction, and no copy: it is `naive`.
    """
    programs: list[list[Op]] = [[] for _ in range(stages)]
    for micro_batch in range(micro_batches):
        for stage, rank in enumerate(bidirectional(stages)[micro_batch % 2]):
            programs[rank] += [Op(Kind.F, stage, micro_batch), Op(Kind.B, stage, micro_batch)]
    return Schedule(with_gradient_sync(programs))
