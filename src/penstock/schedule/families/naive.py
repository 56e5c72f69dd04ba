"""Plain model parallelism: one stage works at a time."""

from __future__ import annotations

from penstock.schedule.catalogue import register
from penstock.schedule.op import Kind, Op, Schedule


@register(
    "naive",
    synchronous=True,
    stages_per_rank="1",
    splits_backward=False,
    source="the baseline of GPipe (Huang et al. 2019, figure 2b)",
)
def naive(stages: int, micro_batches: int = 1) -> Schedule:
    """Run a micro-batch forward and backward through all stages before the next one.

    Usually there is only one micro-batch.

    Facts for equal costs f and b and free links, p stages, m micro-batches:
        makespan            m p (f + b)
        in flight           1 on every stage

    >>> print(naive(2, 2))
    rank 0 | 0F0 0B0 0F1 0B1 0U1
    rank 1 | 1F0 1B0 1F1 1B1 1U1
    """
    programs = []
    for stage in range(stages):
        ops = [Op(kind, stage, m) for m in range(micro_batches) for kind in (Kind.F, Kind.B)]
        programs.append((*ops, Op(Kind.U, stage, 1)))
    return Schedule(tuple(programs))
