"""Concurrent measurement: every rank measures some of the layers while the others measure theirs.

Ranks of one host share resources in training: caches, memory, its bandwidth, the power of the chip.
A layer that is measured while the other cores are idle seems faster than it will be (VGG-11 on 2
cores: by 5 to 10 %, most for layers that are bound by memory).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import TypeVar, final

import torch
import torch.distributed as dist

from penstock.transport.collectives import all_gather, barrier, begin_barrier
from penstock.transport.devices.device_discovery import assign_device, local_device
from penstock.transport.process_group import join

T = TypeVar("T")


@final
class ConcurrentRanks:
    """The ranks that measure at the same time; a single one unless requested.

    All ranks call the same methods in the same order.

    Args:
        together: whether the other ranks take part, or the group of those that do.

    Raises:
        RunError: other ranks are requested, but this process was not started as a rank.
    """

    def __init__(self, together: bool | dist.ProcessGroup) -> None:
        self.together = bool(together)
        self.group = None if isinstance(together, bool) else together
        if together is True:
            join()
        self.ranks = dist.get_world_size(self.group) if together else 1
        self.rank = dist.get_rank(self.group) if together else 0
        self._ready: dist.Work | None = None

    def device(self, request: str | torch.device | None) -> torch.device:
        """Return the requested device, or the one assigned to this rank if others measure too."""
        name = None if request == "auto" else request
        if not self.together:
            return local_device(name)
        return torch.device(assign_device(name, self.group).device)

    def share(self, seconds: Sequence[float]) -> range:
        """Return the indices of this rank's layers: consecutive, with about equal seconds per rank.

        The seconds are those that rank 0 has measured.
        """
        if self.ranks == 1:
            return range(len(seconds))
        return shares(self.gather(list(seconds), list[float])[0], self.ranks)[self.rank]

    def wait_for_all(self) -> None:
        """Wait until all ranks are ready."""
        if self.ranks > 1:
            barrier(self.group)

    def all_done(self) -> bool:
        """Return whether all ranks have called this; a rank keeps working until they have."""
        if self.ranks == 1:
            return True
        if self._ready is None:
            self._ready = begin_barrier(self.group)
        # torch returns no work to a rank outside the group, which has nothing to wait for.
        if self._ready is None:
            return True
        if not self._ready.is_completed():
            return False
        self._ready = None
        return True

    def gather(self, value: T, kind: type[T]) -> list[T]:
        """Return the values of all ranks, of the type `kind`, by rank."""
        return [value] if self.ranks == 1 else all_gather(value, kind, self.group)


def shares(seconds: Sequence[float], ranks: int) -> list[range]:
    """Divide layers into consecutive parts of about equal seconds.

    With fewer layers than ranks, the last ranks also measure the last layer.

    >>> shares([1.0, 1.0, 1.0, 3.0], 2)
    [range(0, 3), range(3, 4)]
    """
    if len(seconds) < ranks:
        layers = [min(rank, len(seconds) - 1) for rank in range(ranks)]
        return [range(layer, layer + 1) for layer in layers]
    sums = [0.0, *accumulate(seconds)]
    bounds = [0]
    for rank in range(1, ranks):
        target = sums[-1] * rank / ranks
        # Leave at least one layer for this rank and for every later one.
        low, high = bounds[-1] + 1, len(seconds) - (ranks - rank)
        distances = [abs(total - target) for total in sums[low : high + 1]]
        bounds.append(low + distances.index(min(distances)))
    ends = [*bounds[1:], len(seconds)]
    return [range(start, end) for start, end in zip(bounds, ends, strict=True)]
