"""Transport over torch.distributed: gloo for CPU tensors, NCCL for tensors on GPUs that no other
rank uses.

A payload's header goes through the store, once for every form that the messages of a stage have;
from then on receives are posted straight into buffers of the known shapes. Sends never wait: their
tensors are referenced until they have left.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.errors import RunError
from penstock.schedule.lower import Link, Message
from penstock.schedule.op import Kind
from penstock.transport.communicators import as_bytes
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
from penstock.transport.transport import TransportLost
from penstock.transport.wire import DeviceTransfer, Wire, Work, is_lost

#: Messages without an answer that are in flight at most: of replicas of a stage, and of losses.
MAX_IN_FLIGHT = 64

#: Tag of the losses of a stream: that of a kind number that no message has, see `message_tag`.
LOSS_TAG = 7 << 5


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
            work = self._begin(
                partial(dist.isend, dst=self.wire.ranks[peer]), link, message, number, ready
            )
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
        begin = partial(dist.irecv, src=self.wire.ranks[peer])
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
