"""Slicing: micro-batches cut into slices, each with its own ops."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from penstock.errors import ScheduleError

ALONG = ("tokens", "samples")


@dataclass(frozen=True)
class Slicing:
    """How the micro-batches of a schedule are cut into slices.

    The ops of the schedule then count slices: those of micro-batch 0, then those of 1, and so on.

    >>> slicing = Slicing("tokens", ((0.5, 0.5), (0.5, 0.5)))
    >>> slicing.micro_batch_of, slicing.share
    ((0, 0, 1, 1), (0.5, 0.5, 0.5, 0.5))
    >>> print(slicing.label(3), slicing.neighbour(3, -1), slicing.neighbour(3, +1))
    1.1 2 None

    Attributes:
        along: "tokens" cuts sequences (causal attention): the forward of a slice needs that of the
            previous slice, the backward that of the next slice. "samples" gives smaller
            micro-batches, which are independent of each other.
        shares: per micro-batch, the shares of its slices in order; they add up to 1.

    Raises:
        ScheduleError: a micro-batch has no shares, a share is not positive, or they do not add up
            to 1.
    """

    along: str
    shares: tuple[tuple[float, ...], ...]

    def __post_init__(self) -> None:
        """Convert the shares to tuples of floats, and check them."""
        object.__setattr__(self, "shares", tuple(tuple(map(float, row)) for row in self.shares))
        if self.along not in ALONG:
            raise ScheduleError(f"slices are cut along {' or '.join(ALONG)}, not {self.along!r}")
        for micro_batch, row in enumerate(self.shares):
            if min(row, default=0) <= 0 or not math.isclose(sum(row), 1.0, rel_tol=1e-9):
                raise ScheduleError(
                    f"the slices of micro-batch {micro_batch} have shares {row}: shares must be "
                    "above 0 and add up to 1"
                )

    @classmethod
    def even(cls, along: str, slices: int, micro_batches: int) -> Slicing:
        """Cut every micro-batch into the same number of equal slices."""
        return cls(along, ((1 / slices,) * slices,) * micro_batches)

    @cached_property
    def share(self) -> tuple[float, ...]:
        """Share of each slice in its micro-batch."""
        return tuple(share for row in self.shares for share in row)

    @cached_property
    def micro_batch_of(self) -> tuple[int, ...]:
        """Micro-batch of each slice."""
        return tuple(micro_batch for micro_batch, row in enumerate(self.shares) for _ in row)

    @cached_property
    def first_of(self) -> tuple[int, ...]:
        """Number of the first slice of each micro-batch."""
        starts = [0]
        for row in self.shares:
            starts.append(starts[-1] + len(row))
        return tuple(starts[:-1])

    def neighbour(self, number: int, offset: int) -> int | None:
        """Return slice `number` + `offset`; None if it is not of the same micro-batch."""
        neighbour = number + offset
        same_micro_batch = (
            0 <= neighbour < len(self.micro_batch_of)
            and self.micro_batch_of[neighbour] == self.micro_batch_of[number]
        )
        return neighbour if same_micro_batch else None

    def label(self, number: int) -> str:
        """Return the text of a slice, e.g. `1.0` for slice 0 of micro-batch 1.

        Only the micro-batch (`1`) if it has a single slice.
        """
        micro_batch = self.micro_batch_of[number]
        if len(self.shares[micro_batch]) == 1:
            return str(micro_batch)
        return f"{micro_batch}.{number - self.first_of[micro_batch]}"


def micro_batches_in(shares: float) -> float | int:
    """Return a sum of shares without rounding errors, as an integer if it is one."""
    # Three thirds add up to 0.999…
    total = round(shares, 9)
    return int(total) if total == int(total) else total
