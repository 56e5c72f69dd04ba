"""GPipe: all forwards, then all backwards."""

from __future__ import annotations

from penstock.errors import ScheduleError
from penstock.schedule.catalogue import register
from penstock.schedule.op import Kind, Op, Schedule


@register(
    "gpipe",
    synchronous=True,
    stages_per_rank="1",
    splits_backward=False,
    source="Huang et al. 2019, GPipe, section 2 and figure 2c",
)
def gpipe(stages: int, micro_batches: int, backward_order: str = "forward") -> Schedule:
    """Run all forwards, then all backwards.

    Facts for equal costs f and b and free links, p stages, m micro-batches:
        makespan            (m + p - 1)(f + b), in either backward order
        in flight           m on every stage

    Backwards run in the order of the forwards, so that gradients are summed in the order of plain
    accumulation, with bitwise equal results. torchgpipe runs them in reverse
    (docs/literature/torchgpipe.md): `backward_order="reverse"`.

    >>> print(gpipe(2, 3))
    rank 0 | 0F0 0F1 0F2 0B0 0B1 0B2 0U1
    rank 1 | 1F0 1F1 1F2 1B0 1B1 1B2 1U1

    Raises:
        ScheduleError: `backward_order` is neither "forward" nor "reverse".
    """
    if backward_order not in ("forward", "reverse"):
        raise ScheduleError(
            f"gpipe takes backward_order 'forward' or 'reverse', not {backward_order!r}"
        )
    forward = range(micro_batches)
    backward = forward if backward_order == "forward" else forward[::-1]
    programs = []
    for stage in range(stages):
        ops = [Op(Kind.F, stage, m) for m in forward]
        ops += [Op(Kind.B, stage, m) for m in backward]
        programs.append((*ops, Op(Kind.U, stage, 1)))
    return Schedule(tuple(programs))
