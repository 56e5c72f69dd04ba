"""TeraPipe: GPipe over slices of sequences, of which each stage needs only those before."""

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
    """All forwards slice by slice, then all backwards, of every micro-batch the last slice first.

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
        slices: into how many equal slices every sequence is cut; 2 if nothing is said.
        slice_shares: or the share of each slice, from the first token on, together 1. The more
        tokens before a slice, the longer
            it takes per token: slices that shall take equal time get shorter.

    Raises:
        ScheduleError: the slices are none, or their shares do not add up to 1.
    """
    slicing = along_tokens("terapipe", micro_batches, slices, slice_shares)
    forward = range(len(slicing.share))
    backward = backwards(slicing)
    return Schedule(
        tuple(
            (
                *(Op(Kind.F, stage, n) for n in forward),
                *(Op(Kind.B, stage, n) for n in backward),
                Op(Kind.U, stage, 1),
            )
            for stage in range(stages)
        ),
        slicing=slicing,
    )


def along_tokens(
    name: str, micro_batches: int, slices: int | None, slice_shares: Sequence[float] | None
) -> Slicing:
    """Every micro-batch cut into `slices` equal slices (2 if nothing is said), or into those of
    `slice_shares`.

    Raises:
        ScheduleError: the slices are none, are said twice, or have shares that do not add up to 1;
        `name` is for the message.
    """
    if slice_shares is not None:
        if slices is not None and slices != len(slice_shares):
            raise ScheduleError(
                f"{name} got slices={slices!r} and slice_shares for {len(slice_shares)}: one of them is enough"
            )
        return Slicing("tokens", (tuple(slice_shares),) * micro_batches)
    number = 2 if slices is None else slices
    if isinstance(number, bool) or not isinstance(number, int) or number < 1:
        raise ScheduleError(f"{name} needs at least 1 of slices and got {number!r}")
    return Slicing.even("tokens", number, micro_batches)


def backwards(slicing: Slicing) -> list[int]:
    """The slices in the order of their backwards: micro-batch after micro-batch, the last slice of
    each first.
    """
    return [
        first + n
        for first, row in zip(slicing.first_of, slicing.shares, strict=True)
        for n in reversed(range(len(row)))
    ]
