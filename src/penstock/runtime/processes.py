"""One rank per process over torch.distributed: started by torchrun, by `launch`, or by the user's
own init_process_group.
"""

from __future__ import annotations

import atexit
import itertools
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore

from penstock.errors import DeadlineExceeded, PeerFailed, RanksDiffer, StageFailed
from penstock.runtime.board import reason_of
from penstock.runtime.calls import CLOSED, Calls, ComparedCalls
from penstock.runtime.store_board import StoreBoard
from penstock.schedule.lower import Link, Message
from penstock.schedule.op import Kind
from penstock.transport.card_facts import assign_device
from penstock.transport.communicators import LinkKey, communicator_keys, make_communicators
from penstock.transport.distributed import (
    MOST_UNDER_WAY,
    TOLD_TAG,
    DistributedTransport,
    Wire,
    is_lost,
)
from penstock.transport.group import join, started
from penstock.transport.payload import Header, Payload, TensorForm
from penstock.transport.routed import route
from penstock.transport.same_host import SameHostTransport
from penstock.transport.transport import Arrival, Transport, TransportLost, TransportTimeout

__all__ = ["DistributedWorld", "join", "started"]

T = TypeVar("T")

#: What is told outside programs goes by this name.
_TOLD = Message(Kind.U, (1 << 20) - 1, 0)

#: Seconds for which a rank whose stage has failed waits for the others' calls, which boards tell of
#: twice in a second.
_PATIENCE_S = 1.2

# Every world of a process has its own corner of the store; all processes make their worlds in the
# same order.
_WORLDS = itertools.count()


class DistributedWorld:
    """See `World`.

    Where every rank has a GPU of its own, messages between stages and between copies go over NCCL,
    one communicator for each direction of a link, which the constructor makes. Everything else,
    such as losses, norms and checkpoints, goes over gloo. Under NCCL a failure may leave weights
    that were updated with garbage: the batch raises, and training goes on from a checkpoint.
    """

    def __init__(
        self,
        device: torch.device | None,
        deadline_s: float,
        links: Collection[Link],
        copies: Collection[Link] = (),
    ) -> None:
        self.size = join()
        self._rank = dist.get_rank()
        self.local_ranks: tuple[int, ...] = (self._rank,)
        store = PrefixStore(f"penstock/{next(_WORLDS)}", dist.distributed_c10d._get_default_store())
        shared = dist.new_group(backend="gloo", timeout=timedelta(seconds=deadline_s))
        assert shared is not None
        assignment = assign_device(device, shared)
        self._device = torch.device(assignment.device)
        groups: dict[LinkKey, dist.ProcessGroup] = {}
        if assignment.transport == "nccl":
            keys = communicator_keys(links, copies)
            groups = make_communicators(keys, self._rank, self._device, shared)
        self.receives_on_device = bool(groups)
        self._wire = Wire(self._rank, self._device, store, deadline_s, shared, groups)
        self._near = SameHostTransport(self._rank, deadline_s, self._device)
        self._near.connect(store, self.size, willing=not groups)
        self._transport = route(self._near, DistributedTransport(self._wire), self.size - 1)
        late = self._late if groups else None
        self._board = StoreBoard(store, self._rank, self.size, self._stop, late)
        self.calls: Calls = ComparedCalls(store, self._board, self._rank, self.size, deadline_s)
        self._overdue: str | None = None
        self._told: deque[tuple[dist.Work, Tensor]] = deque()
        atexit.register(self.close)

    def device(self, rank: int) -> torch.device:
        """See `World.device`."""
        del rank
        return self._device

    def _late(self) -> str | None:
        """Why the run has to end: the device has waited for a message for longer than the deadline."""
        awaited = self._wire.late()
        if awaited is None or self._wire.lost:
            return None
        self._overdue = awaited
        return str(
            DeadlineExceeded(self._rank, awaited, self._wire.deadline_s, self._board.elsewhere())
        )

    def _check_links(self) -> None:
        """Refuse to go on after the links were closed: under NCCL what has been received since then
        is garbage.

        Raises:
            RanksDiffer, DeadlineExceeded, PeerFailed: why they were.
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
            DeadlineExceeded: it has.
        """
        if self._overdue is not None:
            raise DeadlineExceeded(
                self._rank, self._overdue, self._wire.deadline_s, self._board.elsewhere()
            )

    def _stop(self) -> None:
        self._near.abort()
        self._wire.abort()

    def transport(self, rank: int) -> Transport:
        """See `World.transport`."""
        del rank
        return self._transport

    def board(self, rank: int) -> StoreBoard:
        """See `World.board`."""
        del rank
        return self._board

    def run(self, job: Callable[[int], T]) -> dict[int, T]:
        """See `World.run`."""
        self._check_links()
        try:
            try:
                results = {self._rank: job(self._rank)}
            except TransportLost as error:
                reason = self._board.failure(patience_s=2.0) or "a rank is gone without a word"
                raise PeerFailed(self._rank, "its message to leave", reason) from error
            if self.receives_on_device:
                self._check_links()
        except BaseException as error:
            if isinstance(error, (StageFailed, DeadlineExceeded)):
                self._board.compare_calls(_PATIENCE_S)  # other batches may be the reason
            self.abandon(error)
            try:
                self._board.check_difference()
                self._check_deadline()
            except (RanksDiffer, DeadlineExceeded) as reason:
                raise reason from error
            raise
        return results

    def abandon(self, error: BaseException) -> None:
        """See `World.abandon`."""
        self._board.fail(reason_of(error, self._rank), differs=isinstance(error, RanksDiffer))
        self._stop()

    def broadcast(self, value: Any, source: int, form: TensorForm | None = None) -> Any:
        """See `World.broadcast`: an unknown form goes first, as JSON, then the tensors."""

        def job(rank: int) -> Any:
            payload = Payload.of(value) if rank == source else None
            header = (
                Header("", (form,)) if form is not None else self._share_header(payload, source)
            )
            if payload is None:
                tensors = [known.empty() for known in header.forms]
            else:
                packed = zip(header.forms, payload.tensors, strict=True)
                tensors = [
                    known.packed(tensor.detach().cpu()).contiguous() for known, tensor in packed
                ]
            for tensor in tensors:
                self._share(tensor, source)
            return header.unpacked(tensors).value()

        return self.run(job)[self._rank]

    def _share_header(self, payload: Payload | None, source: int) -> Header:
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
            own = [tensor.detach().cpu().contiguous() for tensor in local.get(rank, [])]
            if rank != 0:
                for tensor in own:
                    self._wait(dist.isend(tensor, 0, group=self._wire.shared, tag=0), "rank 0")
                return {}
            gathered = {0: [tensor.clone() for tensor in own]}
            for other in range(1, self.size):
                gathered[other] = [
                    form.empty() for form in forms.get(other, [])
                ]  # a rank may hold nothing
                for tensor in gathered[other]:
                    self._wait(
                        dist.irecv(tensor, other, group=self._wire.shared, tag=0), f"rank {other}"
                    )
            return gathered

        return self.run(job)[self._rank]

    def tell(self, numbers: Tensor) -> None:
        """See `World.tell`."""
        if not numbers.is_cpu or numbers.dtype != torch.float64:
            numbers = numbers.detach().to("cpu", torch.float64)  # gloo reads host memory
        for other in range(self.size):
            if other in self._near.reachable:
                self._near.send(other, _TOLD, Payload("", (numbers,), (False,)), "")
            elif other != self._rank:
                try:
                    work = dist.isend(numbers, other, group=self._wire.shared, tag=TOLD_TAG)
                except RuntimeError as error:
                    if not self._wire.lost and not is_lost(error):
                        raise
                    raise TransportLost(str(error)) from error
                if work is not None:
                    self._told.append((work, numbers))
        while len(self._told) > MOST_UNDER_WAY * self.size:
            self._wire.wait(self._told.popleft()[0])

    def hear(self, source: int, count: int) -> Callable[[], Tensor]:
        """See `World.hear`."""
        if source in self._near.reachable:
            arrival = self._near.post(source, _TOLD, "")
            return lambda: self.run(lambda _: self._taken(arrival, source))[self._rank]
        numbers = torch.empty(count, dtype=torch.float64)
        work = self.run(
            lambda _: dist.irecv(numbers, source, group=self._wire.shared, tag=TOLD_TAG)
        )[self._rank]

        def heard() -> Tensor:
            self.run(lambda _: self._wait(work, f"rank {source}"))
            return numbers

        return heard

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
        self._wait(
            dist.broadcast(tensor, source, group=self._wire.shared, async_op=True), f"rank {source}"
        )

    def _taken(self, arrival: Arrival, source: int) -> Tensor:
        tensor: Tensor = self._waited(arrival.wait, f"rank {source}").leaves[0]
        return tensor.cpu()

    def _wait(self, work: dist.Work | None, waited_for: str) -> None:
        if work is not None:
            self._waited(lambda: self._wire.wait(work), waited_for)

    def _waited(self, action: Callable[[], T], waited_for: str) -> T:
        self._board.doing(f"waits for {waited_for}")
        try:
            return action()
        except TransportTimeout as error:
            raise DeadlineExceeded(
                self._rank, waited_for, self._wire.deadline_s, self._board.elsewhere()
            ) from error
        except TransportLost as error:
            reason = self._board.failure(patience_s=2.0) or "a rank is gone without a word"
            raise PeerFailed(self._rank, waited_for, reason) from error
