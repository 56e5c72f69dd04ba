"""Collective operations of gloo among the replicas of one stage on several hosts.

A stage has process groups of its own, so that ranks that hold several stages may sum their
gradients in any order. What takes two rounds has one group for each: a round of one bucket may begin
before or after another bucket's other round, but the order within a group is the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store

from penstock.transport.exchange import Exchanger
from penstock.transport.transport import TransportLost
from penstock.transport.wire import PendingWork, Wire, is_lost


@dataclass(frozen=True)
class ReplicaCollectives:
    """The process groups of the replicas of a stage.

    Attributes:
        wire: the links of this rank.
        first: the group of the first round.
        second: the group of the second round.
        count: number of replicas.
    """

    wire: Wire
    first: dist.ProcessGroup
    second: dist.ProcessGroup
    count: int

    @cached_property
    def _first_exchanger(self) -> Exchanger:
        """The exchanges of the first round."""
        return Exchanger(self.first, self.wire.deadline_s)

    @cached_property
    def _second_exchanger(self) -> Exchanger:
        """The exchanges of the second round."""
        return Exchanger(self.second, self.wire.deadline_s)

    def all_reduce(self, tensor: Tensor, *, second: bool = False) -> PendingWork:
        """Start to sum a tensor over the replicas, in place."""
        group = self.second if second else self.first
        return self._start(lambda: dist.all_reduce(tensor, group=group, async_op=True))

    def all_to_all(self, received: Tensor, sent: Tensor) -> PendingWork:
        """Start to send piece n of a tensor of bytes to replica n, and to receive one from each."""
        exchanger = self._first_exchanger
        return self._start(
            lambda: exchanger.start(received.chunk(self.count), sent.chunk(self.count))
        )

    def all_gather(self, received: Tensor, sent: Tensor) -> PendingWork:
        """Start to gather the tensors of bytes of all replicas, one after the other."""
        exchanger = self._second_exchanger
        return self._start(lambda: exchanger.start(received.chunk(self.count), [sent] * self.count))

    def wait(self, work: PendingWork) -> None:
        """Wait for an operation. Raises as `Wire.wait`."""
        self.wire.wait(work)

    def is_completed(self, work: PendingWork) -> bool:
        """Whether an operation has ended."""
        return work.is_completed()

    def _start(self, operation: Callable[[], PendingWork | None]) -> PendingWork:
        """Start an operation.

        Raises:
            TransportLost: the links are closed.
        """
        if self.wire.lost:
            raise TransportLost("the run was stopped")
        try:
            work = operation()
        except RuntimeError as error:
            if self.wire.lost or is_lost(error):
                raise TransportLost(str(error)) from error
            raise
        assert work is not None
        return work


def make_replica_collectives(
    wire: Wire, stages: Mapping[int, Sequence[int]]
) -> dict[int, ReplicaCollectives]:
    """Create the process groups of replicated stages. Every rank calls it with the same stages.

    Args:
        wire: the links of this rank.
        stages: by stage, the ranks that hold a replica; not of stages on one host.

    Returns:
        By stage, the groups that this rank is part of.
    """
    timeout = timedelta(seconds=wire.deadline_s)
    collectives = {}
    for stage, ranks in sorted(stages.items()):
        processes = [wire.ranks[rank] for rank in ranks]
        groups = [dist.new_group(processes, timeout, "gloo") for _ in range(2)]
        if wire.rank in ranks:
            wire.replica_groups.extend(groups)
            collectives[stage] = ReplicaCollectives(wire, groups[0], groups[1], len(ranks))
    return collectives


def all_on_host(store: Store, rank: int, size: int, device: torch.device) -> bool:
    """Whether the tensors of all ranks are in host memory. Every rank calls it."""
    store.set(f"device-type/{rank}", device.type)
    types = store.multi_get([f"device-type/{other}" for other in range(size)])
    return all(value == b"cpu" for value in types)
