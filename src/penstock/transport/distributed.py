"""Transport over torch.distributed: gloo for CPU tensors, NCCL for tensors on GPUs that no other
rank uses.

A payload's header goes through the store, once for every form that the messages of a stage have;
from then on receives are posted straight into buffers of the known shapes. Sends never wait: their
tensors are referenced until they have left.

Under NCCL a wait makes the device's stream wait and the host goes on: nothing else may block the
host in a step of the steady state. Another thread enforces the deadline, see `Wire.late`.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store

from penstock.errors import RunError
from penstock.schedule.lower import Link, Message
from penstock.schedule.op import Kind
from penstock.transport.buffer_meter import BufferMeter
from penstock.transport.communicators import LinkKey, abort_communicators, as_bytes
from penstock.transport.messages import (
    HeaderKey,
    checked_tensors,
    describe,
    differ_in_strides_only,
    form_text,
    header_key,
    header_name,
    message_tag,
)
from penstock.transport.payload import Header, Payload, TensorForm
from penstock.transport.transport import TransportLost, TransportTimeout

#: Messages without an answer that are in flight at most: of replicas of a stage, and of losses.
MAX_IN_FLIGHT = 64

#: Tag of the losses of a stream: no message has it.
LOSS_TAG = 7 << 5


class DeviceTransfer(NamedTuple):
    """A transfer of NCCL: a kernel on the device, for which streams wait and hosts do not. `text`
    describes it in messages.
    """

    work: dist.Work
    text: str


Work = dist.Work | DeviceTransfer


@dataclass
class Wire:
    """What all transports of a rank share: process groups, the store, and the deadline.

    Attributes:
        rank: this rank.
        device: of its tensors.
        store: of torch.distributed, through which headers go.
        deadline_s: seconds that a wait may take.
        shared: a gloo group of all ranks, where tags keep messages apart. It carries the messages
            for which `groups` has no entry, such as the norms of gradient clipping.
        groups: under NCCL one process group for each directed link. NCCL matches transfers by their
            order per communicator, so with one for each direction two ranks that send to each other
            at once do not wait for one another. Links between replicas of a stage have a second one
            (key True) for what they exchange at an update (U), whose receives are not posted in one
            order with those of the programs.
        everyone: under NCCL a group of all ranks, for losses and norms.
        replica_groups: the groups of `ReplicaCollectives`.
        lost: whether the links were closed.
        buffers: the bytes of messages.
    """

    rank: int
    device: torch.device
    store: Store
    deadline_s: float
    shared: dist.ProcessGroup
    groups: Mapping[LinkKey, dist.ProcessGroup] = field(default_factory=dict)
    everyone: dist.ProcessGroup | None = None
    replica_groups: list[dist.ProcessGroup] = field(default_factory=list)
    lost: bool = False
    buffers: BufferMeter = field(default_factory=BufferMeter)
    _awaited: deque[DeviceTransfer] = field(default_factory=deque)
    _progress_s: float = 0.0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def communicator(self, link: Link, message: Message) -> dist.ProcessGroup | None:
        """Return the NCCL group that carries a message over a link; None if it goes through host
        memory over `shared`.
        """
        return self.groups.get((link, message.kind is Kind.U))

    @property
    def copies_to_host(self) -> bool:
        """Whether messages over `shared` must be copied to host memory first (gloo carries CPU
        tensors).
        """
        return self.device.type != "cpu"

    def wait(self, work: Work) -> None:
        """Wait until a transfer is done. Under NCCL only the device's stream waits, and the host
        goes on.

        Raises:
            TransportTimeout, TransportLost: see `Arrival.wait`.
            RunError: the transfer failed on this rank, for another reason than a lost link.
        """
        started = time.perf_counter()
        try:
            if isinstance(work, DeviceTransfer):
                # With a timeout, torch would block the host and poll until the transfer is over.
                self._watch(work)
                work.work.wait()
            else:
                work.wait(timedelta(seconds=self.deadline_s))
        except RuntimeError as error:
            self._raise(error, started)

    def _watch(self, transfer: DeviceTransfer) -> None:
        """Register a transfer that the device waits for, so that `late` can report it."""
        with self._lock:
            if not self._awaited:
                self._progress_s = time.monotonic()
            self._awaited.append(transfer)
            self._drop_finished()

    def _drop_finished(self) -> None:
        """Drop the transfers that are over, from the oldest on; each restarts the clock of
        `late`.
        """
        while self._awaited and self._awaited[0].work.is_completed():
            self._awaited.popleft()
            self._progress_s = time.monotonic()

    def late(self) -> str | None:
        """Return the description of a transfer that is overdue; None if there is none.

        A transfer is overdue if the device has waited for it longer than the deadline and no other
        transfer has ended meanwhile. The thread that monitors the other ranks polls this, since
        under NCCL the host does not block in a wait.
        """
        with self._lock:
            self._drop_finished()
            if not self._awaited or time.monotonic() - self._progress_s < self.deadline_s:
                return None
            return self._awaited[0].text

    def fetch(self, name: str) -> str:
        """Return what the store holds under `name`, waiting until it does. Raises as `wait`."""
        started = time.perf_counter()
        pause_s = 0.0005
        try:
            while not self.store.check([name]):
                # Polled, so that a stopped run is noticed: a wait inside the store cannot be
                # interrupted.
                if self.lost:
                    raise TransportLost("the run was stopped")
                if time.perf_counter() - started >= self.deadline_s:
                    raise TransportTimeout(f"{name} is not in the store")
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, 0.02)
            return str(self.store.get(name).decode())
        except RuntimeError as error:
            raise TransportLost(str(error)) from error

    def _raise(self, error: RuntimeError, started: float) -> NoReturn:
        """Convert an error of torch.distributed into TransportTimeout, TransportLost, or itself."""
        out_of_time = time.perf_counter() - started >= self.deadline_s * 0.95
        if out_of_time and not self.lost:
            raise TransportTimeout(str(error)) from error
        if not self.lost and not is_lost(error):
            raise error
        raise TransportLost(str(error)) from error

    def abort(self) -> None:
        """Close all links, so that every wait on one of them, on this and other ranks, ends.

        gloo has no abort of its own (torch 2.13: `ProcessGroup.abort` leaves pairs open), but a
        receive that times out closes the whole context.
        """
        if self.lost:
            return
        self.lost = True
        everyone = [] if self.everyone is None else [self.everyone]
        abort_communicators([*self.groups.values(), *everyone])
        for group in (self.shared, *self.replica_groups):
            _close_group(group, self.rank)


def _close_group(group: dist.ProcessGroup, rank: int) -> None:
    """End all waits in a group of gloo, by a receive that times out."""
    others = [other for other in dist.get_process_group_ranks(group) if other != rank]
    if not others:
        return
    try:
        receive = dist.irecv(torch.empty(1), others[0], group=group, tag=2**31 - 1)
        if receive is not None:
            receive.wait(timedelta(milliseconds=1))
    except RuntimeError:
        return


def is_lost(error: RuntimeError) -> bool:
    """Whether an error of torch.distributed means that a link is closed or its other end is gone.

    All other errors, such as a dtype that the backend does not support or an out-of-memory error,
    are this rank's own.
    """
    if isinstance(error, (dist.DistBackendError, dist.DistNetworkError)):
        return True
    text = str(error)
    # gloo has no exception class for it. "Bad address" (EFAULT) means that the tensor was not in
    # host memory, which is this rank's own error.
    # A wait on another thread, whose time limit was over, has closed the pair of ranks.
    words = ("gloo/transport", "onnection", "pair closure")
    return any(word in text for word in words) and "Bad address" not in text


#: Header of a message, its receive buffers, and their transfers.

_Posted = tuple[Header, list[Tensor], list[Work]]


@dataclass
class _Arrival:
    """A receive; `posted` is None until the shapes are known."""

    transport: DistributedTransport
    peer: int
    message: Message
    signature: str
    posted: _Posted | None

    def of_channel(self, peer: int, message: Message) -> bool:
        """Whether it must be received in one order with `message` from `peer`.

        Messages between replicas (kind U) are in no order with the others.
        """
        return self.peer == peer and (self.message.kind is Kind.U) == (message.kind is Kind.U)

    def wait(self) -> Payload:
        """See `Arrival.wait`."""
        header, tensors, works = self.posted or self.transport.catch_up(self)
        wire = self.transport.wire
        for work in works:
            wire.wait(work)
        wire.buffers.give(sum(tensor.nbytes for tensor in tensors))
        self.transport.arrived(self.peer, self.message)
        if wire.copies_to_host:
            tensors = [tensor.to(wire.device) for tensor in tensors]
        return header.unpacked(tensors)


@dataclass
class DistributedTransport:
    """One rank's end of all its links, see `Transport`."""

    wire: Wire
    shares: bool = False
    _headers: dict[HeaderKey, Header] = field(default_factory=dict)  # of received messages
    _announced: dict[HeaderKey, tuple[tuple[Any, ...], list[TensorForm]]] = field(
        default_factory=dict
    )
    _in_flight: dict[tuple[int, Message], list[tuple[Work, Tensor]]] = field(default_factory=dict)
    _unposted: list[_Arrival] = field(default_factory=list)
    _updates: deque[tuple[int, Message]] = field(default_factory=deque)  # sends of kind U

    def arrives_at_once(self, peer: int) -> bool:
        """See `Transport.arrives_at_once`."""
        del peer
        return False

    def send(self, peer: int, message: Message, payload: Payload, signature: str) -> int:
        """See `Transport.send`.

        Raises:
            RunError: the payload's form differs from that of an earlier batch with the same
                signature, or it has too many tensors.
            TransportLost: the links are closed.
        """
        tensors = checked_tensors(payload, message)
        link = Link(self.wire.rank, peer)
        form, key = payload.form(), header_key(signature, link, message)
        announced, forms = self._announced.get(key, (None, []))
        if announced != form:
            forms = self._announce(key, message, payload)
        group = self.wire.communicator(link, message)
        transfers = self._in_flight.setdefault((peer, message), [])
        sent_bytes = 0
        for number, (tensor_form, tensor) in enumerate(zip(forms, tensors, strict=True)):
            # The bytes in memory are sent, so lazy conjugation and negation must be resolved.
            ready = tensor_form.packed(tensor.detach().resolve_conj().resolve_neg()).contiguous()
            if group is None and self.wire.copies_to_host:
                ready = ready.cpu()
            if group is not None and not ready.numel():
                continue  # the receiver knows from the form that there is nothing to receive
            work = self._begin(partial(dist.isend, dst=peer), link, message, number, ready)
            sent_bytes += ready.nbytes
            if work is not None:
                self.wire.buffers.take(ready.nbytes)
                transfers.append((work, ready))
        if message.kind is Kind.U:
            self._updates.append((peer, message))
            # Replicas receive the messages of earlier updates without waiting for later ones, so
            # waiting for an early send cannot deadlock.
            while len(self._updates) > MAX_IN_FLIGHT:
                self._complete_send(*self._updates.popleft())
        return sent_bytes

    def _announce(self, key: HeaderKey, message: Message, payload: Payload) -> list[TensorForm]:
        """Store the header of the first message of its key; check the form of later ones.

        Returns:
            The forms of the tensors that the receiver expects.

        Raises:
            RunError: the form differs from the announced one by more than strides.
        """
        form, forms = payload.form(), payload.forms()
        announced, announced_forms = self._announced.get(key, (None, []))
        if announced is None:
            self._announced[key] = form, forms
            self.wire.store.set(header_name(key), payload.header())
            return forms
        if not differ_in_strides_only(announced, form, announced_forms):
            raise RunError(
                f"the output of {describe(message)} changed its form between batches whose inputs "
                f"have the same shapes: it was {form_text(announced)} and is {form_text(form)}. "
                "Shapes and constants that depend on the data are not supported between hosts"
            )
        return announced_forms  # the receiver restores the strides of the first message

    def post(self, peer: int, message: Message, signature: str) -> _Arrival:
        """See `Transport.post`. The first message of a signature learns its shapes in its wait."""
        header = self._headers.get(header_key(signature, Link(peer, self.wire.rank), message))
        if header is not None and not any(
            arrival.of_channel(peer, message) for arrival in self._unposted
        ):
            return _Arrival(self, peer, message, signature, self._receive(peer, message, header))
        arrival = _Arrival(self, peer, message, signature, None)
        self._unposted.append(arrival)
        return arrival

    def catch_up(self, awaited: _Arrival) -> _Posted:
        """Post the receives whose shapes were unknown, in the order of the sends, up to the awaited
        one.
        """
        while awaited.posted is None:
            arrival = next(
                arrival
                for arrival in self._unposted
                if arrival.of_channel(awaited.peer, awaited.message)
            )
            self._unposted.remove(arrival)
            header = self._fetch_header(
                header_key(arrival.signature, Link(arrival.peer, self.wire.rank), arrival.message)
            )
            arrival.posted = self._receive(arrival.peer, arrival.message, header)
        return awaited.posted

    def drain(self) -> None:
        """See `Transport.drain`."""
        for peer, message in list(self._in_flight):
            self._complete_send(peer, message)

    def arrived(self, peer: int, message: Message) -> None:
        """Release the tensors of the message that an arrived one answers: it must have been
        received.
        """
        if message.kind is Kind.B:
            self._complete_send(peer, Message(Kind.F, message.target, message.micro_batch))
        elif message.kind is Kind.L:
            self._complete_send(peer, Message(Kind.E, message.stage, message.micro_batch))

    def release(self, before: int) -> None:
        """See `Transport.release`. gloo's sends do not complete until they are waited for."""
        for peer, message in list(self._in_flight):
            if message.micro_batch < before and message.kind is not Kind.U:
                self._complete_send(peer, message)

    def _complete_send(self, peer: int, message: Message) -> None:
        """Wait until a message has left (under NCCL only the stream waits), and drop its
        tensors.
        """
        for work, tensor in self._in_flight.pop((peer, message), ()):
            self.wire.wait(work)
            self.wire.buffers.give(tensor.nbytes)

    def _fetch_header(self, key: HeaderKey) -> Header:
        """Return the header of a message, from the store at first use."""
        if key not in self._headers:
            self._headers[key] = Header.parse(self.wire.fetch(header_name(key)))
        return self._headers[key]

    def _receive(self, peer: int, message: Message, header: Header) -> _Posted:
        """Post the receives of a message into fresh buffers."""
        link = Link(peer, self.wire.rank)
        on_device = self.wire.communicator(link, message) is not None
        device = self.wire.device if on_device else torch.device("cpu")
        buffers = [form.empty(device) for form in header.forms]
        self.wire.buffers.take(sum(buffer.nbytes for buffer in buffers))
        begin = partial(dist.irecv, src=peer)
        works = [
            self._begin(begin, link, message, number, buffer)
            for number, buffer in enumerate(buffers)
            if buffer.numel() or not on_device
        ]
        return header, buffers, [work for work in works if work is not None]

    def _begin(
        self,
        transfer: Callable[..., dist.Work | None],
        link: Link,
        message: Message,
        number: int,
        tensor: Tensor,
    ) -> Work | None:
        """Start to send or to receive one tensor of a message.

        Raises:
            TransportLost: the links are closed.
            RunError: torch.distributed refuses the transfer for a reason of its own.
        """
        group = self.wire.communicator(link, message)
        carried = tensor if group is None else as_bytes(tensor)
        try:
            work = transfer(
                carried, group=group or self.wire.shared, tag=message_tag(message, number)
            )
        except RuntimeError as error:
            if self.wire.lost or is_lost(error):
                raise TransportLost(str(error)) from error
            verb = "sent to" if self.wire.rank == link.source else "received from"
            peer = link.target if self.wire.rank == link.source else link.source
            raise RunError(
                f"rank {self.wire.rank}: {describe(message)} could not be {verb} rank {peer}, as "
                f"{tensor.dtype}{list(tensor.shape)} on {tensor.device}: "
                f"{type(error).__name__}: {error}"
            ) from error
        if work is None or group is None:
            return work
        text = f"{describe(message)} from rank {link.source} to rank {link.target}"
        return DeviceTransfer(work, text)
