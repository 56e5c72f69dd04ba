"""FBP-AS: forward and backward of different micro-batches run on a stage at the same time, so that
its links are used evenly.
"""

from __future__ import annotations

from penstock.schedule.catalogue import register
from penstock.schedule.op import Kind, Op, Schedule


@register(
    "fbp-as",
    synchronous=True,
    stages_per_rank="1",
    splits_backward=False,
    source="Zhao et al. 2020, BaPipe (arXiv 2012.12544), FBP-AS; as a program at the grain of micro-batches",
)
def fbp_as(stages: int, micro_batches: int) -> Schedule:
    """Once a stage is warm, every forward and a backward share it: one compound op, `0F5&0B0`, that
    takes f + b. An activation and a gradient then have f + b to cross a link, where 1F1B leaves
    them f and b.

    Stage s runs 2(p - s) - 1 forwards ahead, then pairs, then the backwards left. While a forward
    or a backward is alone on its stage it has all of it, and takes f or b: the time modelled is
    then the published one. At BaPipe's fixed shares, where an op takes f + b with company or
    without, fill and drain take twice as long; only streaming inside a micro-batch would save that.

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
            beside = [Op(Kind.F, stage, n) for n in (ahead + m,) if n < micro_batches]
            backward = Op(Kind.B, stage, m)
            ops += [*beside, backward]
            pairs.update((forward, backward) for forward in beside)
        programs.append((*ops, Op(Kind.U, stage, 1)))
    return Schedule(tuple(programs), pairs=frozenset(pairs))
