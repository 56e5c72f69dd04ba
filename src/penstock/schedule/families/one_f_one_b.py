"""One forward, one backward: warm up, alternate, drain."""

from __future__ import annotations

from penstock.schedule.catalogue import register
from penstock.schedule.op import Kind, Op, Schedule


@register("1f1b", aliases=("dapple", "pipedream-flush"), synchronous=True, stages_per_rank="1", splits_backward=False,
          source="Narayanan et al. 2021, PipeDream-Flush, section 3.4; Fan et al. 2021, DAPPLE, policy A")  # fmt: skip
def one_f_one_b(stages: int, micro_batches: int) -> Schedule:
    """Stage s runs p - s forwards ahead, then one backward and one forward in turn, then the backwards left.

    Facts for equal costs f and b and free links, p stages, m micro-batches:
        makespan            (m + p - 1)(f + b)
        in flight           min(m, p - s) on stage s

    >>> print(one_f_one_b(3, 4))
    rank 0 | 0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3 0U1
    rank 1 | 1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3 1U1
    rank 2 | 2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3 2U1
    """

    def program(stage: int) -> tuple[Op, ...]:
        ahead = min(micro_batches, stages - stage)
        ops = [Op(Kind.F, stage, m) for m in range(ahead)]
        for m in range(micro_batches):
            ops.append(Op(Kind.B, stage, m))
            if ahead + m < micro_batches:
                ops.append(Op(Kind.F, stage, ahead + m))
        return (*ops, Op(Kind.U, stage, 1))

    return Schedule(tuple(map(program, range(stages))))
