"""Transport over torch.distributed: gloo for CPU tensors, NCCL for tensors on GPUs of their own.

A payload's header goes through the store, once for every form that messages of a stage have; from
then on receives are posted straight into buffers of the known shapes. Sends never wait: their
tensors are held until they have left.

Under NCCL a wait lets the device's stream wait and the host goes on: nothing else may stop the host
in a steady step. The deadline is kept from outside, see `Wire.late`.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
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
from penstock.transport.communicators import LinkKey, abort_communicators, as_bytes
from penstock.transport.payload import Header, Payload, TensorForm
from penstock.transport.transport import TransportLost, TransportTimeout

_LEAVES = 32  # tags have room for this many tensors in one message
_NUMBERS = 1 << 13  # and for this many micro-batches
_KINDS = (Kind.F, Kind.B, Kind.E, Kind.L, Kind.U)

#: How many messages that nothing answers are under way at most: of copies of a stage to each other,
#: and of losses.
MOST_UNDER_WAY = 64

#: A tag that no message has.
TOLD_TAG = 7 << 5


class DeviceTransfer(NamedTuple):
    """A transfer of NCCL: a kernel on the device, for which streams wait and hosts do not."""

    work: dist.Work
    text: str


Work = dist.Work | DeviceTransfer


@dataclass
class Wire:
    """What all transports of a rank share: process groups, the store, the deadline.

    `groups` holds one process group for each directed link under NCCL, whose transfers match in
    order per communicator: with one for each direction, two ranks that send to each other at once
    do not wait for one another. Links between copies of a stage have one more (True) for what they
    exchange at a U, whose receives are not posted in one order with the programs' own. Messages for
    which there is none, such as the norms of clipping, go over `shared`, a gloo group where tags
    keep messages apart.
    """

    rank: int
    device: torch.device
    store: Store
    deadline_s: float
    shared: dist.ProcessGroup
    groups: Mapping[LinkKey, dist.ProcessGroup] = field(default_factory=dict)
    lost: bool = False
    _awaited: deque[DeviceTransfer] = field(default_factory=deque)
    _progress_s: float = 0.0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def communicator(self, link: Link, message: Message) -> dist.ProcessGroup | None:
        """The NCCL group that carries a message over a link; None if it goes through host memory
        over `shared`.
        """
        return self.groups.get((link, message.kind is Kind.U))

    @property
    def copies_to_host(self) -> bool:
        """Whether what goes over `shared` must be copied to host memory first (gloo carries CPU
        tensors).
        """
        return self.device.type != "cpu"

    def wait(self, work: Work) -> None:
        """Stand until a transfer is done; if a communicator carries it, let the device's stream
        wait for it and go on.

        Raises:
            TransportTimeout, TransportLost: see `Arrival.wait`.
            RunError: the transfer failed here for a reason of its own.
        """
        started = time.perf_counter()
        try:
            if isinstance(work, DeviceTransfer):
                # Given a timeout, torch stops the host and polls until the transfer is over.
                self._watch(work)
                work.work.wait()
            else:
                work.wait(timedelta(seconds=self.deadline_s))
        except RuntimeError as error:
            self._raise(error, started)

    def _watch(self, transfer: DeviceTransfer) -> None:
        """Let `late` look after a transfer that the device waits for."""
        with self._lock:
            if not self._awaited:
                self._progress_s = time.monotonic()
            self._awaited.append(transfer)
            self._drop_finished()

    def _drop_finished(self) -> None:
        """Forget the transfers that are over, from the oldest on; the clock of `late` starts anew
        with each.
        """
        while self._awaited and self._awaited[0].work.is_completed():
            self._awaited.popleft()
            self._progress_s = time.monotonic()

    def late(self) -> str | None:
        """What the device has waited for longer than the deadline, with no other transfer ending
        meanwhile.

        Called again and again by the thread that watches the other ranks, since the host does not
        stand at a wait under NCCL.
        """
        with self._lock:
            self._drop_finished()
            if not self._awaited or time.monotonic() - self._progress_s < self.deadline_s:
                return None
            return self._awaited[0].text

    def fetch(self, name: str) -> str:
        """What the store holds under `name`, waiting until it does. Raises as `wait`."""
        started = time.perf_counter()
        pause_s = 0.0005
        try:
            while not self.store.check([name]):
                # Asked again and again, so that a stopped run is noticed: nothing lets go who waits
                # inside the store.
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
        """Raise what an error of torch.distributed means."""
        out_of_time = time.perf_counter() - started >= self.deadline_s * 0.95
        if out_of_time and not self.lost:
            raise TransportTimeout(str(error)) from error
        if not self.lost and not is_lost(error):
            raise error
        raise TransportLost(str(error)) from error

    def abort(self) -> None:
        """Close all links, so that everybody who waits on one, here or elsewhere, is let go.

        gloo has no abort of its own here (torch 2.13: `ProcessGroup.abort` leaves pairs open), but
        a receive that runs out of time closes the whole context.
        """
        if self.lost:
            return
        self.lost = True
        abort_communicators(self.groups)
        others = [other for other in range(dist.get_world_size(self.shared)) if other != self.rank]
        if others:
            try:
                receive = dist.irecv(torch.empty(1), others[0], group=self.shared, tag=2**31 - 1)
                if receive is not None:
                    receive.wait(timedelta(milliseconds=1))
            except RuntimeError:
                return


def is_lost(error: RuntimeError) -> bool:
    """Whether an error of torch.distributed means that a link is closed or its other end is gone.

    All others, such as a dtype that the backend lacks or memory that has run out, are this rank's
    own.
    """
    if isinstance(error, (dist.DistBackendError, dist.DistNetworkError)):
        return True
    text = str(error)
    # gloo has no class of its own for it. EFAULT: the tensor was not in host memory.
    return ("gloo/transport" in text or "onnection" in text) and "Bad address" not in text


#: What has one form for good: messages of a kind, a stage and a signature on a link.
_Key = tuple[str, Link, Kind, int]

_Posted = tuple[Header, list[Tensor], list[Work]]


@dataclass
class _Arrival:
    """A posted receive; buffers are there from the start if the shapes are known."""

    transport: DistributedTransport
    peer: int
    message: Message
    signature: str
    posted: _Posted | None

    def of_channel(self, peer: int, message: Message) -> bool:
        """Whether it is received in one order with `message` from `peer`: what copies exchange is
        in no order with the rest.
        """
        return self.peer == peer and (self.message.kind is Kind.U) == (message.kind is Kind.U)

    def wait(self) -> Payload:
        header, tensors, works = self.posted or self.transport.catch_up(self)
        wire = self.transport.wire
        for work in works:
            wire.wait(work)
        self.transport.arrived(self.peer, self.message)
        if wire.copies_to_host:
            tensors = [tensor.to(wire.device) for tensor in tensors]
        return header.unpacked(tensors)


@dataclass
class DistributedTransport:
    """One rank's end of all its links."""

    wire: Wire
    shares: bool = False
    _known: dict[_Key, Header] = field(default_factory=dict)
    _told: dict[_Key, tuple[tuple[Any, ...], list[TensorForm]]] = field(default_factory=dict)
    _leaving: dict[tuple[int, Message], list[tuple[Work, Tensor]]] = field(default_factory=dict)
    _unposted: list[_Arrival] = field(default_factory=list)
    _met: deque[tuple[int, Message]] = field(default_factory=deque)

    def send(self, peer: int, message: Message, payload: Payload, signature: str) -> None:
        """See `Transport.send`.

        Raises:
            RunError: the payload's form differs from that of an earlier batch with the same
            signature, or it has too many tensors. TransportLost: the links are closed.
        """
        tensors = _checked(payload, message)
        forms = payload.forms()
        link = Link(self.wire.rank, peer)
        form, key = payload.form(), _key(signature, link, message)
        told, told_forms = self._told.get(key, (None, []))
        if told is None:
            self._told[key] = form, forms
            self.wire.store.set(_name(key), payload.header())
        elif told != form and _agree(told, form, told_forms):
            forms = told_forms  # the receiver gives it the strides that it has had before
        elif told != form:
            raise RunError(
                f"what {describe(message)} makes changed its form between batches whose inputs have the same shapes: it was {_words(told)} "
                f"and is {_words(form)}. Shapes and constants that depend on the data are not supported between "
                "hosts"
            )
        group = self.wire.communicator(link, message)
        leaving = self._leaving.setdefault((peer, message), [])
        for number, (known, tensor) in enumerate(zip(forms, tensors, strict=True)):
            # What is in memory is what goes.
            ready = known.packed(tensor.detach().resolve_conj().resolve_neg()).contiguous()
            if group is None and self.wire.copies_to_host:
                ready = ready.cpu()
            if group is not None and not ready.numel():
                continue  # the receiver knows from the form that nothing comes
            work = self._begin(partial(dist.isend, dst=peer), link, message, number, ready)
            if work is not None:
                leaving.append((work, ready))
        if message.kind is Kind.U:
            self._met.append((peer, message))
            # Copies of a stage come to each other's messages of old updates without the new ones.
            while len(self._met) > MOST_UNDER_WAY:
                self._let_go(*self._met.popleft())

    def post(self, peer: int, message: Message, signature: str) -> _Arrival:
        """See `Transport.post`. The first batch of a signature learns its shapes when it waits."""
        header = self._known.get(_key(signature, Link(peer, self.wire.rank), message))
        if header is not None and not any(
            arrival.of_channel(peer, message) for arrival in self._unposted
        ):
            return _Arrival(self, peer, message, signature, self._receive(peer, message, header))
        arrival = _Arrival(self, peer, message, signature, None)
        self._unposted.append(arrival)
        return arrival

    def catch_up(self, awaited: _Arrival) -> _Posted:
        """Post the receives that had to wait for their shapes, up to the awaited one, in the order
        of the sends.
        """
        while awaited.posted is None:
            arrival = next(
                arrival
                for arrival in self._unposted
                if arrival.of_channel(awaited.peer, awaited.message)
            )
            self._unposted.remove(arrival)
            header = self._learn(
                _key(arrival.signature, Link(arrival.peer, self.wire.rank), arrival.message)
            )
            arrival.posted = self._receive(arrival.peer, arrival.message, header)
        return awaited.posted

    def drain(self) -> None:
        """See `Transport.drain`."""
        for peer, message in list(self._leaving):
            self._let_go(peer, message)

    def arrived(self, peer: int, message: Message) -> None:
        """An answer has come: so what it answers has left, and its copy here is needed no more."""
        if message.kind is Kind.B:
            self._let_go(peer, Message(Kind.F, message.target, message.micro_batch))
        elif message.kind is Kind.L:
            self._let_go(peer, Message(Kind.E, message.stage, message.micro_batch))

    def release(self, before: int) -> None:
        """See `Transport.release`. gloo's sends do not know that they are over until somebody waits
        for them.
        """
        for peer, message in list(self._leaving):
            if message.micro_batch < before and message.kind is not Kind.U:
                self._let_go(peer, message)

    def _let_go(self, peer: int, message: Message) -> None:
        """Stand until a message has left, under NCCL the stream alone, and drop its tensors."""
        for work, _ in self._leaving.pop((peer, message), ()):
            self.wire.wait(work)

    def _learn(self, key: _Key) -> Header:
        """The header of a message, from the store."""
        if key not in self._known:
            self._known[key] = Header.parse(self.wire.fetch(_name(key)))
        return self._known[key]

    def _receive(self, peer: int, message: Message, header: Header) -> _Posted:
        """Post receives into fresh buffers."""
        link = Link(peer, self.wire.rank)
        on_device = self.wire.communicator(link, message) is not None
        device = self.wire.device if on_device else torch.device("cpu")
        buffers = [form.empty(device) for form in header.forms]
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
        """Begin to send or to receive one tensor of a message.

        Raises:
            TransportLost: the links are closed.
            RunError: torch.distributed refuses it for a reason of its own.
        """
        group = self.wire.communicator(link, message)
        carried = tensor if group is None else as_bytes(tensor)
        try:
            work = transfer(carried, group=group or self.wire.shared, tag=_tag(message, number))
        except RuntimeError as error:
            if self.wire.lost or is_lost(error):
                raise TransportLost(str(error)) from error
            verb = "sent to" if self.wire.rank == link.source else "received from"
            peer = link.target if self.wire.rank == link.source else link.source
            raise RunError(
                f"rank {self.wire.rank}: {describe(message)} could not be {verb} rank {peer}, as {tensor.dtype}"
                f"{list(tensor.shape)} on {tensor.device}: {type(error).__name__}: {error}"
            ) from error
        if work is None or group is None:
            return work
        text = f"{describe(message)} from rank {link.source} to rank {link.target}"
        return DeviceTransfer(work, text)


def describe(message: Message) -> str:
    """The op that makes a message, `0F3`."""
    return f"{message.stage}{message.kind.value}{message.micro_batch}"


def _key(signature: str, link: Link, message: Message) -> _Key:
    return signature, link, message.kind, message.stage


def _name(key: _Key) -> str:
    signature, (source, target), kind, stage = key
    return f"penstock/header/{signature}/{source}-{target}/{stage}{kind.value}"


def _tag(message: Message, leaf: int) -> int:
    """A tag of 31 bits: stage 10, micro-batch 13, kind 3, tensor 5. Never are messages under way
    that are 8,192 apart.
    """
    kind, stage, micro_batch = message
    return (((stage << 13 | micro_batch % _NUMBERS) << 3) | _KINDS.index(kind)) << 5 | leaf


def _agree(told: tuple[Any, ...], form: tuple[Any, ...], forms: Sequence[TensorForm]) -> bool:
    """Whether two forms differ by strides alone, so that what the first was told of serves for the
    second: it is no expanded tensor.
    """
    plain = [
        (structure, [leaf[:2] for leaf in leaves], wants)
        for structure, leaves, wants, _ in (told, form)
    ]
    whole = all(each.stride is None or 0 not in each.stride for each in forms)
    return whole and plain[0] == plain[1]


def _words(form: tuple[Any, ...]) -> str:
    """A form for messages."""
    structure, leaves, wants, _ = form
    nesting = structure if isinstance(structure, str) else structure.describe()
    flags = iter(wants)
    shown = [
        f"{str(leaf[1]).removeprefix('torch.')}{list(leaf[0])}{' with a gradient' if next(flags) else ''}"
        if isinstance(leaf[0], torch.Size)
        else str(leaf[1])
        for leaf in leaves
    ]
    return f"{nesting or 'a tensor'} of {', '.join(shown) or 'nothing'}"


def _checked(payload: Payload, message: Message) -> list[Tensor]:
    tensors = payload.tensors
    if len(tensors) > _LEAVES or message.stage >= 1 << 10:
        raise RunError(
            f"stage {message.stage} sends {len(tensors)} tensors for micro-batch {message.micro_batch}: at most "
            f"{_LEAVES} tensors and 1,024 stages fit a message's tag"
        )
    return tensors
