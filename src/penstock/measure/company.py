"""Measuring in company: every rank measures some of the layers while the others measure theirs.

What ranks of one host share, they share in training too: caches, memory, its bandwidth, the power
of the chip. A layer that is measured while the other cores rest comes out faster than it will be
(VGG-11 on 2 cores: by 5 to 10 %, those that wait for memory most).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import TypeVar, final

import torch.distributed as dist

from penstock.transport.exchange import all_gather, barrier, begin_barrier, broadcast
from penstock.transport.group import join

T = TypeVar("T")


@final
class Company:
    """The ranks that measure together; one alone if it was not asked for. All call the same methods
    in the same order.

    Args:
        together: whether there are others.

    Raises:
        RunError: others are asked for, and this process was not started as a rank.
    """

    def __init__(self, together: bool) -> None:
        self.ranks = join() if together else 1
        self.rank = dist.get_rank() if together else 0
        self._ready: dist.Work | None = None

    def share(self, seconds: Sequence[float]) -> range:
        """The places of this rank's layers: consecutive ones, of about the same seconds on every
        rank, as rank 0 has measured them.
        """
        if self.ranks == 1:
            return range(len(seconds))
        return shares(broadcast(list(seconds), list[float], 0), self.ranks)[self.rank]

    def begin(self) -> None:
        """Wait until all are ready."""
        if self.ranks > 1:
            barrier()

    def done(self) -> bool:
        """Whether all have come to ask this; who has, goes on working until they have."""
        if self.ranks == 1:
            return True
        if self._ready is None:
            self._ready = begin_barrier()
        if self._ready is None or not self._ready.is_completed():
            return self._ready is None
        self._ready = None
        return True

    def gather(self, value: T, kind: type[T]) -> list[T]:
        """The values of all ranks, of the type `kind`, by rank."""
        return [value] if self.ranks == 1 else all_gather(value, kind)


def shares(seconds: Sequence[float], ranks: int) -> list[range]:
    """Layers in consecutive parts of about the same seconds; with fewer layers than ranks, the last
    ranks have the last layer too.

    >>> shares([1.0, 1.0, 1.0, 3.0], 2)
    [range(0, 3), range(3, 4)]
    """
    if len(seconds) < ranks:
        return [
            range(min(rank, len(seconds) - 1), min(rank, len(seconds) - 1) + 1)
            for rank in range(ranks)
        ]
    sums = [0.0, *accumulate(seconds)]
    bounds = [0]
    for rank in range(1, ranks):
        wanted = sums[-1] * rank / ranks
        low, high = bounds[-1] + 1, len(seconds) - (ranks - rank)
        bounds.append(min(range(low, high + 1), key=lambda place: abs(sums[place] - wanted)))
    return [
        range(start, end) for start, end in zip(bounds, [*bounds[1:], len(seconds)], strict=True)
    ]
