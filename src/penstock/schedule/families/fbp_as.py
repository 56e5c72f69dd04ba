"""FBP-AS: forward and backward of different micro-batches run on a stage at the same time."""

from __future__ import annotations

from penstock.schedule.catalogue import register
from penstock.schedule.op import Kind, Op, Schedule


@register(
    "fbp-as",
    synchronous=True,
    stages_per_rank="1",
    splits_backward=False,
    source="Zhao et al. 2020, BaPipe (arXiv 2012.12544), FBP-AS; for whole micro-batches",
)
def fbp_as(stages: int, micro_batches: int) -> Schedule:
    """Run every forward together with a backward after the warm-up, to use links evenly.

    The two are one compound op, `0F5&0B0`, that takes f + b. An activation and a gradient then have
    f + b to cross a link, where 1F1B leaves them f and b.

    Stage s runs 2(p - s) - 1 forwards ahead, then pairs, then the remaining backwards. A forward or
    a backward that is alone on its stage takes f or b: the makespan is then the published one. With
    BaPipe's fixed shares of a device, where an op takes f + b whether or not it is in a pair, fill
    and drain take twice as long; only streaming within a micro-batch would avoid that.

    Facts for equal costs f and b and free links, p stages, m micro-batches:
        makespan            (m + p - 1)(f + b), as 1F1B; (m + 2p - 1)(f + b) if ops alone take f + b
                            too
        in flight           min(m, 2(p - s)) on stage s

    >>> print(fbp_as(2, 5))
    rank 0 | 0F0 0F1 0F2 0F3&0B0 0F4&0B1 0B2 0B3 0B4 0U1
    rank 1 | 1F0 1F1&1B0 1F2&1B1 1F3&1B2 1F4&1B3 1B4 1U1
    """
    programs = []
    pairs: set[tuple[Op, Op]] = set()
    for stage in range(stages):
        ahead = min(micro_batches, 2 * (stages - stage) - 1)
        ops = [Op(Kind.F, stage, m) for m in range(ahead)]
        for m in range(micro_batches):
            backward = Op(Kind.B, stage, m)
            if ahead + m < micro_batches:
                forward = Op(Kind.F, stage, ahead + m)
                ops.append(forward)
                pairs.add((forward, backward))
            ops.append(backward)
        programs.append((*ops, Op(Kind.U, stage, 1)))
    return Schedule(tuple(programs), pairs=frozenset(pairs))
