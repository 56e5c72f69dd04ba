"""Eager 1F1B: a warm-up twice as long, which hides the time of transfers."""

from __future__ import annotations

from penstock.schedule.catalogue import register
from penstock.schedule.families.one_f_one_b import one_f_one_b
from penstock.schedule.op import Schedule


@register(
    "eager-1f1b",
    aliases=("dapple-b", "1f1b-so"),
    synchronous=True,
    stages_per_rank="1",
    splits_backward=False,
    source="Zhuang et al. 2023, eager 1F1B (Alpa's 1f1b_overlap_friendly); Fan et al. 2021, "
    "DAPPLE, policy B; Zhao et al. 2020, BaPipe, 1F1B-SO; Chen et al. 2023, AvgPipe, advance "
    "forward propagation at its full depth",
)
def eager_one_f_one_b(stages: int, micro_batches: int) -> Schedule:
    """Run 1F1B with 2(p - s) - 1 forwards ahead on stage s, so transfers overlap with compute.

    Facts for equal costs f and b, p stages, m micro-batches:
        makespan            (m + p - 1)(f + b) on free links, that of 1F1B
                            (m + p - 1)(f + b) + (p - 1) 2c with c seconds per transfer, while 2c
                            <= f + b: 1F1B loses 2c for nearly every micro-batch instead of every
                            stage
        in flight           min(m, 2(p - s) - 1) on stage s, up to twice as many as 1F1B

    >>> print(eager_one_f_one_b(3, 6))
    rank 0 | 0F0 0F1 0F2 0F3 0F4 0B0 0F5 0B1 0B2 0B3 0B4 0B5 0U1
    rank 1 | 1F0 1F1 1F2 1B0 1F3 1B1 1F4 1B2 1F5 1B3 1B4 1B5 1U1
    rank 2 | 2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3 2F4 2B4 2F5 2B5 2U1
    """
    return one_f_one_b(stages, micro_batches, [2 * (stages - stage) - 1 for stage in range(stages)])
