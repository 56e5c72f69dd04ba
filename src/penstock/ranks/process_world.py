"""One rank per process, over torch.distributed.

The processes are started by torchrun or `launch`, or call init_process_group themselves.
"""

from __future__ import annotations

import atexit
import itertools
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.errors import DeadlineExceeded, PeerFailed, RanksDiffer, StageFailed
from penstock.ranks.calls import CLOSED, Calls, ComparedCalls
from penstock.ranks.clock_offsets import ClockOffsets
from penstock.ranks.rank_group import RankGroup
from penstock.ranks.status_board import reason_of
from penstock.ranks.store_status_board import StoreBoard
from penstock.schedule.lower import Link, Message
from penstock.schedule.op import Kind
from penstock.shared_memory.segment import Segment
from penstock.transport.communicators import LinkKey, communicator_keys
from penstock.transport.devices.device_collectives import DeviceCollectives
from penstock.transport.distributed import LOSS_TAG, MAX_IN_FLIGHT, DistributedTransport
from penstock.transport.hybrid import route
from penstock.transport.payload import Header, Payload, TensorForm
from penstock.transport.process_group import join, started
from penstock.transport.replica_collectives import (
    ReplicaCollectives,
    all_on_host,
    make_replica_collectives,
)
from penstock.transport.same_host import SameHostTransport
from penstock.transport.transport import Arrival, Transport, TransportLost, TransportTimeout
from penstock.transport.wire import Wire, is_lost

__all__ = ["DistributedWorld", "join", "started"]

T = TypeVar("T")

#: Why a link is closed if no rank has reported a failure.
_UNKNOWN_END = "a rank has ended without a message"

#: Name of messages outside of programs (`tell`): a stage number that no schedule uses.
_TELL_MESSAGE = Message(Kind.U, (1 << 20) - 1, 0)

#: Seconds for which a rank whose stage has failed waits for the calls of other ranks, which boards
#: publish every half second.
_COMPARE_CALLS_S = 1.2

#: Number of the next world, which is its prefix in the store. All processes make their worlds in
#: the same order.
_WORLDS = itertools.count()


class DistributedWorld:
    """A `World` with one rank per process.

    If every rank has its own GPU, messages between stages and between replicas use NCCL, with one
    communicator per direction of a link, and one of all ranks for losses and norms, all made by the
    constructor. All other messages, such as checkpoints, use gloo. Under NCCL a failure may leave
    weights that were updated with garbage: the batch raises, and training must continue from a
    checkpoint.

    Args:
        device: device of this rank, None to choose.
        deadline_s: seconds for which a rank waits for another.
        links: links between stages.
        copies: links between replicas of a stage.
        replicas: by stage with gradients that its replicas sum, the ranks that hold it.
        group: the processes of the pipeline; by default all of the job.
    """

    def __init__(
        self,
        device: torch.device | None,
        deadline_s: float,
        links: Collection[Link],
        copies: Collection[Link] = (),
        replicas: Mapping[int, Sequence[int]] = MappingProxyType({}),
        group: RankGroup | None = None,
    ) -> None:
        group = group or RankGroup.whole_job(deadline_s)
        self.size, self._rank, shared = group.size, group.rank, group.shared
        self.local_ranks: tuple[int, ...] = (self._rank,)
        store = group.store(f"penstock/{next(_WORLDS)}")
        assignment = group.device(device)
        self._device = torch.device(assignment.device)
        groups: dict[LinkKey, dist.ProcessGroup] = {}
        everyone: dist.ProcessGroup | None = None
        if assignment.transport == "nccl":
            keys = communicator_keys(links, copies)
            groups, everyone = group.communicators(keys, self._device)
        self.receives_on_device = bool(groups)
        self._wire = Wire(
            self._rank, self._device, store, deadline_s, shared, group.ranks, groups, everyone
        )
        self.collectives = None if everyone is None else DeviceCollectives(self._wire)
        self._near = SameHostTransport(self._rank, deadline_s, self._device)
        self._near.connect(store, self.size, willing=not groups)
        self._transport = route(self._near, DistributedTransport(self._wire), self.size - 1)
        self._collectives: dict[int, ReplicaCollectives] = {}
        self.has_replica_collectives = False
        # torch creates process groups in all processes of a job in one order, so that one of
        # several pipelines cannot have groups of its own for its replicas.
        if group.has_whole_job and all_on_host(store, self._rank, self.size, self._device):
            remote_replicas = {
                stage: ranks for stage, ranks in replicas.items() if not self._near.connects(ranks)
            }
            self._collectives = make_replica_collectives(self._wire, remote_replicas)
            self.has_replica_collectives = bool(remote_replicas)
        late = self._late if groups else None
        self._board = StoreBoard(store, self._rank, self.size, self._stop, late)
        self.calls: Calls = ComparedCalls(store, self._board, self._rank, self.size, deadline_s)
        # What the device has waited for longer than the deadline, if anything.
        self._overdue: str | None = None
        # Sends of `tell` that may not have left, with their buffers.
        self._pending_tells: deque[tuple[dist.Work, Tensor]] = deque()
        atexit.register(self.close)
        self._clocks = ClockOffsets(self._rank, group.ranks, shared, self._wait)
        self._clocks.measure()

    def device(self, rank: int) -> torch.device:
        """See `World.device`."""
        del rank
        return self._device

    def _late(self) -> str | None:
        """Return why the run must end, if the device has waited too long for a message."""
        awaited = self._wire.late()
        if awaited is None or self._wire.lost:
            return None
        self._overdue = awaited
        return str(self._deadline_exceeded(awaited))

    def _check_links(self) -> None:
        """Raise if the links were closed: under NCCL, data received since then is garbage.

        Raises:
            RanksDiffer, DeadlineExceeded, PeerFailed: why the links were closed.
        """
        if not self._wire.lost:
            return
        self._board.check_difference()
        self._check_deadline()
        reason = self._board.failure() or "an earlier failure closed its links"
        raise PeerFailed(self._rank, "a new batch", reason)

    def _check_deadline(self) -> None:
        """Raise if this rank has ended the run because its device waited too long.

        Raises:
            DeadlineExceeded: the device waited too long.
        """
        if self._overdue is not None:
            raise self._deadline_exceeded(self._overdue)

    def _deadline_exceeded(self, awaited: str) -> DeadlineExceeded:
        """Return the error for a message that this rank has awaited too long."""
        others = self._board.describe_others()
        return DeadlineExceeded(self._rank, awaited, self._wire.deadline_s, others)

    def _stop(self) -> None:
        self._near.abort()
        self._wire.abort()

    def transport(self, rank: int) -> Transport:
        """See `World.transport`."""
        del rank
        return self._transport

    def open_segment(self, ranks: Sequence[int]) -> Callable[[int, int], Segment] | None:
        """See `World.open_segment`."""
        on_host = self._device.type == "cpu"
        return self._near.open_segment if on_host and self._near.connects(ranks) else None

    def replica_collectives(self, stage: int) -> ReplicaCollectives | None:
        """See `World.replica_collectives`."""
        return self._collectives.get(stage)

    def board(self, rank: int) -> StoreBoard:
        """See `World.board`."""
        del rank
        return self._board

    def buffer_bytes(self, rank: int) -> int:
        """See `World.buffer_bytes`."""
        del rank
        return self._wire.buffers.peak

    def run(self, job: Callable[[int], T]) -> dict[int, T]:
        """See `World.run`."""
        self._check_links()
        try:
            return {self._rank: self._result_of(job)}
        except BaseException as error:
            if isinstance(error, (StageFailed, DeadlineExceeded)):
                # The reason may be that ranks have called different methods or have other batches.
                self._board.compare_calls(_COMPARE_CALLS_S)
            self.abandon(error)
            try:
                self._board.check_difference()
                self._check_deadline()
            except (RanksDiffer, DeadlineExceeded) as reason:
                raise reason from error
            raise

    def _result_of(self, job: Callable[[int], T]) -> T:
        """Call `job` with this rank.

        Raises:
            PeerFailed, RanksDiffer, DeadlineExceeded: the links were closed meanwhile.
        """
        try:
            result = job(self._rank)
        except TransportLost as error:
            reason = self._board.failure(patience_s=2.0) or _UNKNOWN_END
            raise PeerFailed(self._rank, "its message to leave", reason) from error
        # Over NCCL a job that received garbage ends without an error.
        if self.receives_on_device:
            self._check_links()
        return result

    def abandon(self, error: BaseException) -> None:
        """See `World.abandon`."""
        self._board.fail(reason_of(error, self._rank), differs=isinstance(error, RanksDiffer))
        self._stop()

    def broadcast(self, value: Any, source: int, form: TensorForm | None = None) -> Any:
        """See `World.broadcast`. If the form is unknown, it is sent first, as JSON."""

        def job(rank: int) -> Any:
            payload = Payload.of(value) if rank == source else None
            header = (
                Header("", (form,)) if form is not None else self._share_header(payload, source)
            )
            if payload is None:
                tensors = [tensor_form.empty() for tensor_form in header.forms]
            else:
                pairs = zip(header.forms, payload.tensors, strict=True)
                tensors = [
                    tensor_form.packed(_resolved(tensor)).contiguous()
                    for tensor_form, tensor in pairs
                ]
            for tensor in tensors:
                self._share(tensor, source)
            return header.unpacked(tensors).value()

        return self.run(job)[self._rank]

    def _share_header(self, payload: Payload | None, source: int) -> Header:
        """Return the header of the payload of rank `source` on every rank."""
        text = b"" if payload is None else payload.header().encode()
        length = torch.tensor([len(text)])
        self._share(length, source)
        content = (
            torch.frombuffer(bytearray(text), dtype=torch.uint8)
            if text
            else torch.empty(int(length), dtype=torch.uint8)
        )
        self._share(content, source)
        return Header.parse(bytes(content.tolist()).decode())

    def gather(
        self, local: Mapping[int, Sequence[Tensor]], forms: Mapping[int, Sequence[TensorForm]]
    ) -> dict[int, list[Tensor]]:
        """See `World.gather`."""

        def job(rank: int) -> dict[int, list[Tensor]]:
            tensors = [_resolved(tensor).contiguous() for tensor in local.get(rank, [])]
            if rank != 0:
                for tensor in tensors:
                    self._wait(
                        dist.isend(tensor, self._wire.ranks[0], group=self._wire.shared, tag=0),
                        "rank 0",
                    )
                return {}
            # Copies, as of what the other ranks send: this rank goes on and changes its tensors.
            gathered = {0: [tensor.clone() for tensor in tensors]}
            for peer in range(1, self.size):
                # A rank may have no tensors.
                gathered[peer] = [form.empty() for form in forms.get(peer, [])]
                for tensor in gathered[peer]:
                    source = self._wire.ranks[peer]
                    self._wait(
                        dist.irecv(tensor, source, group=self._wire.shared, tag=0), f"rank {peer}"
                    )
            return gathered

        return self.run(job)[self._rank]

    def tell(self, numbers: Tensor) -> None:
        """See `World.tell`."""
        if not numbers.is_cpu or numbers.dtype != torch.float64:
            numbers = numbers.detach().to("cpu", torch.float64)  # gloo reads host memory
        for peer in range(self.size):
            if peer in self._near.reachable:
                self._near.send(peer, _TELL_MESSAGE, Payload("", (numbers,), (False,)), "")
            elif peer != self._rank:
                self._start_send(numbers, peer)
        while len(self._pending_tells) > MAX_IN_FLIGHT * self.size:
            self._wire.wait(self._pending_tells.popleft()[0])

    def _start_send(self, numbers: Tensor, peer: int) -> None:
        """Start to send doubles to another rank over gloo.

        Raises:
            TransportLost: the links are closed.
        """
        try:
            work = dist.isend(
                numbers, self._wire.ranks[peer], group=self._wire.shared, tag=LOSS_TAG
            )
        except RuntimeError as error:
            if not self._wire.lost and not is_lost(error):
                raise
            raise TransportLost(str(error)) from error
        if work is not None:
            self._pending_tells.append((work, numbers))

    def hear(self, source: int, count: int) -> Callable[[], Tensor]:
        """See `World.hear`."""
        if source in self._near.reachable:
            arrival = self._near.post(source, _TELL_MESSAGE, "")
            return lambda: self.run(lambda _: self._wait_for_arrival(arrival, source))[self._rank]
        numbers = torch.empty(count, dtype=torch.float64)
        process = self._wire.ranks[source]
        work = self.run(
            lambda _: dist.irecv(numbers, process, group=self._wire.shared, tag=LOSS_TAG)
        )[self._rank]

        def wait_for_numbers() -> Tensor:
            self.run(lambda _: self._wait(work, f"rank {source}"))
            return numbers

        return wait_for_numbers

    def to_first_clock(self) -> Callable[[float], float]:
        """See `World.to_first_clock`."""
        self.run(lambda _: self._clocks.measure())
        return self._clocks.to_first

    @property
    def deadline_s(self) -> float:
        """Seconds for which a rank waits for another."""
        return self._wire.deadline_s

    def watch_group(self, group: dist.ProcessGroup) -> None:
        """Close a gloo group, too, when the run is stopped."""
        self._wire.replica_groups.append(group)

    def wait_for(self, work: dist.Work | None, waited_for: str) -> None:
        """Wait for an operation of such a group.

        Raises:
            DeadlineExceeded, PeerFailed: see `run`.
        """
        self.run(lambda _: self._wait(work, waited_for))

    def barrier(self) -> None:
        """See `World.barrier`."""
        self.run(
            lambda _: self._wait(
                dist.all_reduce(torch.zeros(1), group=self._wire.shared, async_op=True), "all ranks"
            )
        )

    def close(self) -> None:
        """See `World.close`."""
        atexit.unregister(self.close)
        self.calls.enter(CLOSED)
        self._board.close()
        self._near.close()

    def _share(self, tensor: Tensor, source: int) -> None:
        """Broadcast a tensor from rank `source` in place."""
        process = self._wire.ranks[source]
        self._wait(
            dist.broadcast(tensor, process, group=self._wire.shared, async_op=True),
            f"rank {source}",
        )

    def _wait_for_arrival(self, arrival: Arrival, source: int) -> Tensor:
        tensor: Tensor = self._call_waiting(arrival.wait, f"rank {source}").leaves[0]
        return tensor.cpu()

    def _wait(self, work: dist.Work | None, waited_for: str) -> None:
        if work is not None:
            self._call_waiting(lambda: self._wire.wait(work), waited_for)

    def _call_waiting(self, action: Callable[[], T], waited_for: str) -> T:
        """Call `action`, which waits for others; convert errors of the transport.

        Raises:
            DeadlineExceeded: it waited for longer than the deadline.
            PeerFailed: another rank has failed.
        """
        self._board.doing(f"waits for {waited_for}")
        try:
            return action()
        except TransportTimeout as error:
            raise DeadlineExceeded(
                self._rank, waited_for, self._wire.deadline_s, self._board.describe_others()
            ) from error
        except TransportLost as error:
            reason = self._board.failure(patience_s=2.0) or _UNKNOWN_END
            raise PeerFailed(self._rank, waited_for, reason) from error


def _resolved(tensor: Tensor) -> Tensor:
    """Return a tensor in host memory that has its values there: gloo sends memory as it is, which
    of a lazily conjugated or negated tensor has other values.
    """
    return tensor.detach().cpu().resolve_conj().resolve_neg()
