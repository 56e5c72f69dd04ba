"""ZB-H1 and ZB-H2: split backwards, whose weight half (W) fills what would be bubble."""

from __future__ import annotations

from penstock.schedule.catalogue import register
from penstock.schedule.op import Kind, Op, Schedule

_SOURCE = "Qi et al. 2024, Zero Bubble Pipeline Parallelism (arXiv 2401.10241), section 2.2"


@register(
    "zb-h1", synchronous=True, stages_per_rank="1", splits_backward=True, source=f"{_SOURCE}, ZB-H1"
)
def zb_h1(stages: int, micro_batches: int) -> Schedule:
    """Run 1F1B with a third of its bubble in the same memory: stage s delays W by s micro-batches.

    Facts for equal costs f, i, w with w <= f and w <= i, and free links, p stages, m micro-batches:
        makespan            m(f + i + w) + (p - 1)(f + i - w) for m >= p; (m + p - 1)(f + i) + w for
                            m <= p
        in flight           min(m, p) on every stage, of which min(m, p - s) still wait for their I
                            on stage s

    >>> print(zb_h1(3, 4))
    rank 0 | 0F0 0F1 0F2 0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3 0U1
    rank 1 | 1F0 1F1 1I0 1F2 1I1 1W0 1F3 1I2 1W1 1I3 1W2 1W3 1U1
    rank 2 | 2F0 2I0 2F1 2I1 2F2 2I2 2W0 2F3 2I3 2W1 2W2 2W3 2U1
    """
    return Schedule(
        tuple(
            _program(stage, micro_batches, ahead=stages - stage, lag=stage)
            for stage in range(stages)
        )
    )


@register(
    "zb-h2", synchronous=True, stages_per_rank="1", splits_backward=True, source=f"{_SOURCE}, ZB-H2"
)
def zb_h2(stages: int, micro_batches: int) -> Schedule:
    """Run twice the warm-up and delay of ZB-H1: no stage idles between its first op and its last.

    Facts for equal costs f, i, w with w <= f and w <= i, and free links, p stages, m micro-batches,
    m >= 2p - 1:
        longest span        m(f + i + w) + (p - 1)(f + i - 2w): without bubble for f = i = w, in the
                            span definition; the makespan is then that of zb-h1,
                            m(f + i + w) + (p - 1)f
        in flight           2p - 1 on every stage, of which 2(p - s) - 1 still wait for their I on
                            stage s

    Below 2p - 1 micro-batches it is sound, but the warm-up lasts too long: for 3 <= m <= 2p - 3 and
    f = i = w the makespan is above that of zb-h1.

    >>> print(zb_h2(3, 5))
    rank 0 | 0F0 0F1 0F2 0F3 0F4 0I0 0W0 0I1 0W1 0I2 0W2 0I3 0W3 0I4 0W4 0U1
    rank 1 | 1F0 1F1 1F2 1I0 1F3 1I1 1F4 1I2 1W0 1I3 1W1 1I4 1W2 1W3 1W4 1U1
    rank 2 | 2F0 2I0 2F1 2I1 2F2 2I2 2F3 2I3 2F4 2I4 2W0 2W1 2W2 2W3 2W4 2U1
    """
    return Schedule(
        tuple(
            _program(stage, micro_batches, ahead=2 * (stages - stage) - 1, lag=2 * stage)
            for stage in range(stages)
        )
    )


def _program(stage: int, micro_batches: int, ahead: int, lag: int) -> tuple[Op, ...]:
    """Return the program of a stage.

    It has `ahead` forwards; then I, the W of `lag` micro-batches before, and F in turn; then the
    remaining W.
    """
    ahead = min(micro_batches, ahead)
    ops = [Op(Kind.F, stage, m) for m in range(ahead)]
    for m in range(micro_batches):
        ops.append(Op(Kind.I, stage, m))
        if m >= lag:
            ops.append(Op(Kind.W, stage, m - lag))
        if ahead + m < micro_batches:
            ops.append(Op(Kind.F, stage, ahead + m))
    ops += [Op(Kind.W, stage, m) for m in range(max(0, micro_batches - lag), micro_batches)]
    return (*ops, Op(Kind.U, stage, 1))
