"""World: all ranks of a run, the local ones, and communication outside of programs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from penstock.ranks.calls import Calls
from penstock.ranks.status_board import Board
from penstock.shared_memory.segment import Segment
from penstock.transport.devices.device_collectives import DeviceCollectives
from penstock.transport.payload import TensorForm
from penstock.transport.replica_collectives import ReplicaCollectives
from penstock.transport.transport import Transport

T = TypeVar("T")


class World(Protocol):
    """All ranks of a run.

    Methods without an argument `rank` must be called by every process, in the same order.

    Attributes:
        size: number of ranks.
        local_ranks: ranks of this process.
        calls: compares the calls of all processes.
        collectives: operations of all ranks on tensors on their devices, where ranks exchange
            messages over NCCL; None elsewhere.
    """

    size: int
    local_ranks: tuple[int, ...]
    calls: Calls
    collectives: DeviceCollectives | None

    @property
    def receives_on_device(self) -> bool:
        """Whether a posted receive occupies the device until its message arrives, as with NCCL."""
        ...

    def device(self, rank: int) -> torch.device:
        """Return the device of a local rank."""
        ...

    def transport(self, rank: int) -> Transport:
        """Return a local rank's end of its links."""
        ...

    def open_segment(self, ranks: Sequence[int]) -> Callable[[int, int], Segment] | None:
        """Return the function that opens shared memory of another of these ranks.

        It takes the rank and the file descriptor that the rank has. None unless all of them are
        processes of one host whose tensors are in host memory; the same on each of them.
        """
        ...

    def replica_collectives(self, stage: int) -> ReplicaCollectives | None:
        """Return the collective operations among the replicas of a stage; None without any.

        There are some if the replicas are CPU processes, and not all on one host.
        """
        ...

    @property
    def has_replica_collectives(self) -> bool:
        """Whether some stage has `replica_collectives`, on this process or others."""
        ...

    def board(self, rank: int) -> Board:
        """Return a local rank's view of the status board."""
        ...

    def buffer_bytes(self, rank: int) -> int:
        """Return the peak bytes of message buffers of a local rank, see `BufferMeter`."""
        ...

    def run(self, job: Callable[[int], T]) -> dict[int, T]:
        """Run `job(rank)` concurrently for every local rank.

        If one fails, all ranks of all processes are stopped and the first error is raised.
        """
        ...

    def broadcast(self, value: Any, source: int, form: TensorForm | None = None) -> Any:
        """Return the value of rank `source` on every rank.

        Args:
            value: on the source, a nested value of tensors.
            source: the rank.
            form: shape and type, if the value is a single tensor whose form all ranks know.
        """
        ...

    def gather(
        self, local: Mapping[int, Sequence[Tensor]], forms: Mapping[int, Sequence[TensorForm]]
    ) -> dict[int, list[Tensor]]:
        """Gather the tensors of all ranks in the process of rank 0, on the CPU.

        Args:
            local: by local rank, its tensors.
            forms: by rank, the shapes and types of its tensors.

        Returns:
            By rank, its tensors; empty in other processes.
        """
        ...

    def tell(self, numbers: Tensor) -> None:
        """Send some doubles to all other processes without waiting. Called by one rank only.

        The others receive them by `hear`, in the order in which they were sent.

        Raises:
            TransportLost: the links are closed.
        """
        ...

    def hear(self, source: int, count: int) -> Callable[[], Tensor]:
        """Post a receive of `count` doubles that rank `source` of another process will `tell`.

        Returns:
            A function that waits for them and returns them.
        """
        ...

    def to_first_clock(self) -> Callable[[float], float]:
        """Return a function from a time of this process's clock to the clock of rank 0.

        Offsets between the clocks of hosts are measured by this call; see `clock_offsets`.
        """
        ...

    def barrier(self) -> None:
        """Wait until all processes have called this."""
        ...

    def abandon(self, error: BaseException) -> None:
        """Stop all ranks of all processes because of an error outside of `run`."""
        ...

    def close(self) -> None:
        """End threads and close links."""
        ...
