"""Slicing: micro-batches cut into slices that are ops of their own."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from penstock.errors import ScheduleError

ALONG = ("tokens", "samples")


@dataclass(frozen=True)
class Slicing:
    """How the micro-batches of a schedule are cut further. Its ops then count slices through,
    micro-batch after micro-batch.

    >>> slicing = Slicing("tokens", ((0.5, 0.5), (0.5, 0.5)))
    >>> slicing.micro_batch_of, slicing.share
    ((0, 0, 1, 1), (0.5, 0.5, 0.5, 0.5))
    >>> print(slicing.label(3), slicing.neighbour(3, -1), slicing.neighbour(3, +1))
    1.1 2 None

    Attributes:
        along: "tokens" cuts sequences: a slice's forward needs that of the slice before it, a
        backward that of the slice after it
            (causal attention). "samples" makes smaller micro-batches, which need nothing of each
            other.
        shares: per micro-batch, the shares of its slices, in their order; they add up to 1.

    Raises:
        ScheduleError: the shares are none, or do not add up to 1.
    """

    along: str
    shares: tuple[tuple[float, ...], ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "shares", tuple(tuple(map(float, row)) for row in self.shares))
        if self.along not in ALONG:
            raise ScheduleError(f"slices are cut along {' or '.join(ALONG)}, not {self.along!r}")
        for micro_batch, row in enumerate(self.shares):
            if min(row, default=0) <= 0 or not math.isclose(sum(row), 1.0, rel_tol=1e-9):
                raise ScheduleError(
                    f"the slices of micro-batch {micro_batch} have shares {row}: they are above 0 and add up to 1"
                )

    @classmethod
    def even(cls, along: str, slices: int, micro_batches: int) -> Slicing:
        """Every micro-batch cut into as many equal slices."""
        return cls(along, ((1 / slices,) * slices,) * micro_batches)

    @cached_property
    def share(self) -> tuple[float, ...]:
        """Per slice, its share of its micro-batch."""
        return tuple(share for row in self.shares for share in row)

    @cached_property
    def micro_batch_of(self) -> tuple[int, ...]:
        """Per slice, its micro-batch."""
        return tuple(micro_batch for micro_batch, row in enumerate(self.shares) for _ in row)

    @cached_property
    def first_of(self) -> tuple[int, ...]:
        """Per micro-batch, its first slice."""
        starts = [0]
        for row in self.shares:
            starts.append(starts[-1] + len(row))
        return tuple(starts[:-1])

    def neighbour(self, number: int, offset: int) -> int | None:
        """The slice so many places on, if it is one of the same micro-batch's."""
        other = number + offset
        inside = (
            0 <= other < len(self.micro_batch_of)
            and self.micro_batch_of[other] == self.micro_batch_of[number]
        )
        return other if inside else None

    def label(self, number: int) -> str:
        """`1.0`: micro-batch 1, slice 0; only the micro-batch if that is not cut."""
        micro_batch = self.micro_batch_of[number]
        single = len(self.shares[micro_batch]) == 1
        return (
            str(micro_batch) if single else f"{micro_batch}.{number - self.first_of[micro_batch]}"
        )


def micro_batches_in(shares: float) -> float | int:
    """A sum of slices' shares without the dust of adding floats, as a whole number where it is one."""
    total = round(shares, 9)
    return int(total) if total == int(total) else total
