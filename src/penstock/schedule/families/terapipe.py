"""TeraPipe: GPipe over slices of sequences; a slice needs only the slices before it."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.errors import ScheduleError
from penstock.schedule.catalogue import register
from penstock.schedule.op import Kind, Op, Schedule
from penstock.schedule.slicing import Slicing


@register(
    "terapipe",
    synchronous=True,
    stages_per_rank="1",
    splits_backward=False,
    causal=True,
    source="Li et al. 2021, TeraPipe (arXiv 2102.07988), section 3",
)
def terapipe(
    stages: int,
    micro_batches: int,
    slices: int | None = None,
    slice_shares: Sequence[float] | None = None,
) -> Schedule:
    """Run all forwards slice by slice, then all backwards, with the last slice first.

    Only for models in which a token depends on those before it and on no later one (causal
    attention).

    Facts for equal costs f and b of a whole micro-batch and free links, p stages, m micro-batches,
    x the largest share:
        makespan            (m + (p - 1)x)(f + b): with k equal slices m(f + b) + (p - 1)(f + b)/k
        in flight           m on every stage

    >>> print(terapipe(2, 2, slices=2))
    rank 0 | 0F0 0F1 0F2 0F3 0B1 0B0 0B3 0B2 0U1
    rank 1 | 1F0 1F1 1F2 1F3 1B1 1B0 1B3 1B2 1U1

    Args:
        stages: number of stages.
        micro_batches: micro-batches per batch.
        slices: number of equal slices of every sequence; 2 by default.
        slice_shares: instead, the share of each slice, starting at the first token, with sum 1. The
            more tokens precede a slice, the longer it takes per token: for equal times, later
            slices must be shorter.

    Raises:
        ScheduleError: there is no slice, or the shares do not add up to 1.
    """
    slicing = along_tokens("terapipe", micro_batches, slices, slice_shares)
    backward_order = backwards(slicing)
    programs = []
    for stage in range(stages):
        ops = [Op(Kind.F, stage, n) for n in range(len(slicing.share))]
        ops += [Op(Kind.B, stage, n) for n in backward_order]
        programs.append((*ops, Op(Kind.U, stage, 1)))
    return Schedule(tuple(programs), slicing=slicing)


def along_tokens(
    name: str, micro_batches: int, slices: int | None, slice_shares: Sequence[float] | None
) -> Slicing:
    """Cut every micro-batch along its tokens.

    Args:
        name: the schedule, for messages.
        micro_batches: number of micro-batches.
        slices: number of equal slices; 2 by default.
        slice_shares: instead, the shares of the slices.

    Raises:
        ScheduleError: there is no slice, both options are given and differ, or the shares do not
            add up to 1.
    """
    if slice_shares is not None:
        if slices is not None and slices != len(slice_shares):
            raise ScheduleError(
                f"{name} got slices={slices!r} and slice_shares for {len(slice_shares)}: "
                "one of them is enough"
            )
        return Slicing("tokens", (tuple(slice_shares),) * micro_batches)
    number = 2 if slices is None else slices
    if isinstance(number, bool) or not isinstance(number, int) or number < 1:
        raise ScheduleError(f"{name} needs at least 1 of slices and got {number!r}")
    return Slicing.even("tokens", number, micro_batches)


def backwards(slicing: Slicing) -> list[int]:
    """Return the slices in the order of their backwards.

    The micro-batches are in order, the slices of each in reverse.
    """
    order: list[int] = []
    for first, shares in zip(slicing.first_of, slicing.shares, strict=True):
        # In reverse, since later slices send gradients for the state of earlier ones.
        order += reversed(range(first, first + len(shares)))
    return order
