"""Transport over torch.distributed: gloo for CPU tensors, NCCL for tensors on GPUs of their own.

A payload's header goes through the store, once for every form that messages of a stage have; from then on receives are posted
straight into buffers of the known shapes. Sends never wait: their tensors are held until they have left.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store

from penstock.errors import RunError
from penstock.schedule.lower import Link, Message
from penstock.schedule.op import Kind
from penstock.transport.payload import Header, Payload, TensorForm
from penstock.transport.transport import TransportLost, TransportTimeout

_LEAVES = 32  # tags have room for this many tensors in one message
_NUMBERS = 1 << 13  # and for this many micro-batches
_KINDS = (Kind.F, Kind.B, Kind.E, Kind.L, Kind.U)

#: How many messages that nothing answers are under way at most: of copies of a stage to each other, and of losses.
MOST_UNDER_WAY = 64

#: A tag that no message has.
TOLD_TAG = 7 << 5


@dataclass
class Wire:
    """What all transports of a rank share: process groups, the store, the deadline.

    `groups` holds one process group for each directed link under NCCL, whose transfers match in order per communicator: with
    one for each direction, two ranks that send to each other at once do not wait for one another. Links between copies of a stage
    have one more (True) for what they exchange at a U, whose receives are not posted in one order with the programs' own. Under
    gloo all links share one group, where tags keep messages apart.
    """

    rank: int
    device: torch.device
    store: Store
    deadline_s: float
    shared: dist.ProcessGroup
    groups: Mapping[tuple[Link, bool], dist.ProcessGroup] = field(default_factory=dict)
    lost: bool = False

    def group(self, link: Link, message: Message) -> dist.ProcessGroup:
        """The process group that carries a message over a link."""
        return self.groups.get((link, message.kind is Kind.U), self.shared)

    @property
    def through_host(self) -> bool:
        """Whether tensors of a GPU must pass through host memory (gloo carries CPU tensors)."""
        return self.device.type != "cpu" and not self.groups

    def wait(self, work: dist.Work) -> None:
        """Stand until a transfer is done.

        Raises:
            TransportTimeout, TransportLost: see `Arrival.wait`.
        """
        started = time.perf_counter()
        try:
            work.wait(timedelta(seconds=self.deadline_s))
        except RuntimeError as error:
            self._raise(error, started)

    def fetch(self, name: str) -> str:
        """What the store holds under `name`, waiting until it does. Raises as `wait`."""
        started = time.perf_counter()
        pause_s = 0.0005
        try:
            while not self.store.check([name]):
                # Asked again and again, so that a stopped run is noticed: nothing lets go who waits inside the store.
                if self.lost:
                    raise TransportLost("the run was stopped")
                if time.perf_counter() - started >= self.deadline_s:
                    raise TransportTimeout(f"{name} is not in the store")
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, 0.02)
            return str(self.store.get(name).decode())
        except RuntimeError as error:
            raise TransportLost(str(error)) from error

    def _raise(self, error: Exception, started: float) -> NoReturn:
        out_of_time = time.perf_counter() - started >= self.deadline_s * 0.95
        raise (TransportTimeout if out_of_time and not self.lost else TransportLost)(
            str(error)
        ) from error

    def abort(self) -> None:
        """Close all links, so that everybody who waits on one, here or elsewhere, is let go.

        gloo has no abort of its own here (torch 2.13: `ProcessGroup.abort` leaves pairs open), but a receive that runs out of
        time closes the whole context.
        """
        if self.lost:
            return
        self.lost = True
        if self.groups:  # not yet run on several GPUs
            for group in self.groups.values():
                group.abort()
        others = [other for other in range(dist.get_world_size(self.shared)) if other != self.rank]
        if others:
            try:
                receive = dist.irecv(torch.empty(1), others[0], group=self.shared, tag=2**31 - 1)
                if receive is not None:
                    receive.wait(timedelta(milliseconds=1))
            except RuntimeError:
                return


#: What has one form for good: messages of a kind, a stage and a signature on a link.
_Key = tuple[str, Link, Kind, int]

_Posted = tuple[Header, list[Tensor], list[dist.Work]]


@dataclass
class _Arrival:
    """A posted receive; buffers are there from the start if the shapes are known."""

    transport: DistributedTransport
    peer: int
    message: Message
    signature: str
    posted: _Posted | None

    def of_channel(self, peer: int, message: Message) -> bool:
        """Whether it is received in one order with `message` from `peer`: what copies exchange is in no order with the rest."""
        return self.peer == peer and (self.message.kind is Kind.U) == (message.kind is Kind.U)

    def wait(self) -> Payload:
        header, tensors, works = self.posted or self.transport.catch_up(self)
        wire = self.transport.wire
        for work in works:
            wire.wait(work)
        self.transport.arrived(self.peer, self.message)
        if wire.through_host:
            tensors = [tensor.to(wire.device) for tensor in tensors]
        return header.unpacked(tensors)


@dataclass
class DistributedTransport:
    """One rank's end of all its links."""

    wire: Wire
    shares: bool = False
    _known: dict[_Key, Header] = field(default_factory=dict)
    _told: dict[_Key, tuple[tuple[Any, ...], list[TensorForm]]] = field(default_factory=dict)
    _leaving: dict[tuple[int, Message], list[tuple[dist.Work, Tensor]]] = field(
        default_factory=dict
    )
    _unposted: list[_Arrival] = field(default_factory=list)
    _met: deque[tuple[int, Message]] = field(default_factory=deque)

    def send(self, peer: int, message: Message, payload: Payload, signature: str) -> None:
        """See `Transport.send`.

        Raises:
            RunError: the payload's form differs from that of an earlier batch with the same signature, or it has too many tensors.
            TransportLost: the links are closed.
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
            made = f"{message.stage}{message.kind.value}{message.micro_batch}"
            raise RunError(f"what {made} makes changed its form between batches whose inputs have the same shapes: it was {_words(told)} "
                           f"and is {_words(form)}. Shapes and constants that depend on the data are not supported between "
                           "hosts")  # fmt: skip
        group = self.wire.group(link, message)
        leaving = self._leaving.setdefault((peer, message), [])
        for number, (known, tensor) in enumerate(zip(forms, tensors, strict=True)):
            # What is in memory is what goes.
            ready = known.packed(tensor.detach().resolve_conj().resolve_neg()).contiguous()
            if self.wire.through_host:
                ready = ready.cpu()
            try:
                work = dist.isend(ready, peer, group=group, tag=_tag(message, number))
            except RuntimeError as error:
                raise TransportLost(str(error)) from error
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
        """Post the receives that had to wait for their shapes, up to the awaited one, in the order of the sends."""
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
        """See `Transport.release`. gloo's sends do not know that they are over until somebody waits for them."""
        for peer, message in list(self._leaving):
            if message.micro_batch < before and message.kind is not Kind.U:
                self._let_go(peer, message)

    def _let_go(self, peer: int, message: Message) -> None:
        for work, _ in self._leaving.pop((peer, message), ()):
            self.wire.wait(work)

    def _learn(self, key: _Key) -> Header:
        """The header of a message, from the store."""
        if key not in self._known:
            self._known[key] = Header.parse(self.wire.fetch(_name(key)))
        return self._known[key]

    def _receive(self, peer: int, message: Message, header: Header) -> _Posted:
        """Post receives into fresh buffers."""
        group = self.wire.group(Link(peer, self.wire.rank), message)
        buffers = [
            form.empty() if self.wire.through_host else form.empty().to(self.wire.device)
            for form in header.forms
        ]
        works = []
        for number, buffer in enumerate(buffers):
            try:
                works.append(dist.irecv(buffer, peer, group=group, tag=_tag(message, number)))
            except RuntimeError as error:
                raise TransportLost(str(error)) from error
        return header, buffers, [work for work in works if work is not None]


def _key(signature: str, link: Link, message: Message) -> _Key:
    return signature, link, message.kind, message.stage


def _name(key: _Key) -> str:
    signature, (source, target), kind, stage = key
    return f"penstock/header/{signature}/{source}-{target}/{stage}{kind.value}"


def _tag(message: Message, leaf: int) -> int:
    """A tag of 31 bits: stage 10, micro-batch 13, kind 3, tensor 5. Never are messages under way that are 8,192 apart."""
    kind, stage, micro_batch = message
    return (((stage << 13 | micro_batch % _NUMBERS) << 3) | _KINDS.index(kind)) << 5 | leaf


def _agree(told: tuple[Any, ...], form: tuple[Any, ...], forms: Sequence[TensorForm]) -> bool:
    """Whether two forms differ by strides alone, so that what the first was told of serves for the second: it is no expanded tensor."""
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
        raise RunError(f"stage {message.stage} sends {len(tensors)} tensors for micro-batch {message.micro_batch}: at most "
                       f"{_LEAVES} tensors and 1,024 stages fit a message's tag")  # fmt: skip
    return tensors
