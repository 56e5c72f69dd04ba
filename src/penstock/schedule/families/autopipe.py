"""AutoPipe's slicer: 1F1B whose first micro-batches are halved, for a shorter warm-up."""

from __future__ import annotations

from penstock.errors import ScheduleError
from penstock.schedule.catalogue import register
from penstock.schedule.families.one_f_one_b import one_f_one_b
from penstock.schedule.op import Op, Program, Schedule
from penstock.schedule.slicing import Slicing


@register(
    "autopipe",
    synchronous=True,
    stages_per_rank="1",
    splits_backward=False,
    source="Liu et al. 2022, AutoPipe, its slicer; the number of halved micro-batches is that for "
    "equal stages, the paper computes it from their times",
)
def autopipe(stages: int, micro_batches: int, sliced: int | None = None) -> Schedule:
    """Run 1F1B with the first k micro-batches cut into two halves along their samples.

    A half reaches the last stage (p - 1)f/2 earlier than a whole micro-batch. The first whole one
    must arrive before that stage has finished the halves, or the time is lost again: this holds
    from k = (p - 1)f/2b on.

    Facts for equal costs f and b and free links, p stages, m micro-batches, (p - 1)f/2b <= k < m:
        makespan            (m + p - 1)(f + b) - (p - 1)f/2; with k = m the drain is halved too,
                            and it is (m + p - 1)(f + b) - (p - 1)(f + b)/2
        in flight           min(m, p - s) on stage s, as 1F1B

    >>> schedule = autopipe(3, 3, sliced=1)
    >>> print(schedule)
    rank 0 | 0F0 0F1 0F2 0F3 0B0 0B1 0B2 0B3 0U1
    rank 1 | 1F0 1F1 1F2 1B0 1B1 1F3 1B2 1B3 1U1
    rank 2 | 2F0 2F1 2B0 2B1 2F2 2B2 2F3 2B3 2U1
    >>> schedule.slicing.micro_batch_of, schedule.slicing.share
    ((0, 0, 1, 2), (0.5, 0.5, 1.0, 1.0))

    Args:
        stages: number of stages.
        micro_batches: micro-batches per batch.
        sliced: number of micro-batches that are halved (k), 0 for none. By default the minimum that
            suffices for b = 2f: (p - 1)/4, rounded up.

    Raises:
        ScheduleError: `sliced` is not an integer from 0 to `micro_batches`.
    """
    if sliced is None:
        sliced = min(micro_batches, -(-(stages - 1) // 4))
    if isinstance(sliced, bool) or not isinstance(sliced, int) or not 0 <= sliced <= micro_batches:
        raise ScheduleError(
            f"autopipe cuts 0 to {micro_batches} of {micro_batches} micro-batches in two, "
            f"not {sliced!r}"
        )
    plain = one_f_one_b(stages, micro_batches)
    if sliced == 0:
        return plain
    slicing = Slicing("samples", ((0.5, 0.5),) * sliced + ((1.0,),) * (micro_batches - sliced))
    programs = tuple(_slice_ops(program, slicing) for program in plain.programs)
    return Schedule(programs, slicing=slicing)


def _slice_ops(program: Program, slicing: Slicing) -> Program:
    """Replace every op by one op per slice of its micro-batch."""
    # A program of 1F1B ends with its only update.
    *work, update = program
    ops = []
    for op in work:
        first_slice = slicing.first_of[op.micro_batch]
        for i in range(len(slicing.shares[op.micro_batch])):
            ops.append(Op(op.kind, op.stage, first_slice + i))
    return (*ops, update)
