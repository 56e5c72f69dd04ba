"""Transport between processes of one host: tensors are copied into shared memory and out of it, and
nothing else happens to them.

On torch.distributed the same message passes through a socket and two threads of gloo's; here a
small one costs a few microseconds on either side (benchmarks/transport). Only on Linux on x86-64,
whose stores are seen in their order; elsewhere nobody is reachable this way.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import select
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch._C._distributed_c10d import Store

from penstock.schedule.lower import Message
from penstock.schedule.op import Kind
from penstock.transport.card_facts import host_identity
from penstock.transport.doorbell import Door
from penstock.transport.lane import Incoming, Outgoing
from penstock.transport.payload import Payload
from penstock.transport.transport import TransportLost, TransportTimeout

#: Seconds for which a rank looks again and again before it sleeps: some times what it takes to be
#: woken, 25 µs. In between it
#: lets others have its core, so that this costs nothing where ranks are more than cores
#: (benchmarks/transport).
SPIN_S = 100e-6

#: Seconds after which a sleeper looks whether the run was stopped, or the other process has ended.
_SLICE_S = 0.05

#: Seconds for which a rank that closes waits at most for peers that have not yet opened what it has
#: sent.
_LINGER_S = 5.0

_KINDS = {kind: number for number, kind in enumerate(Kind)}
_STAGE_BITS, _BATCH_BITS = 4, 24  # kind in the lowest 4, stage in 20, and the micro-batch above


def _name(message: Message) -> int:
    kind, stage, micro_batch = message
    return micro_batch << _BATCH_BITS | stage << _STAGE_BITS | _KINDS[kind]


@dataclass(frozen=True, slots=True)
class _Peer:
    """Another rank of this host."""

    door: Door
    pid: int
    ended: select.poll
    pidfd: int
    outgoing: Outgoing
    incoming: Incoming


class _Arrival:
    __slots__ = ("_message", "_peer", "_transport")

    def __init__(self, transport: SameHostTransport, peer: int, message: Message) -> None:
        self._transport, self._peer, self._message = transport, peer, message

    def wait(self) -> Payload:
        return self._transport.take(self._peer, self._message)


class SameHostTransport:
    """One rank's end of its links to the other ranks of this host. Nobody is reachable before
    `connect`.

    Messages are found by their names; several of one name come in the order of sending. Payloads
    may have any form at any time. `reachable` are the ranks that this one reaches; they reach this
    one too. What is sent must be taken some time: it is kept.
    """

    def __init__(self, rank: int, deadline_s: float, device: torch.device | None = None) -> None:
        self.rank, self.deadline_s, self.spin_s = rank, deadline_s, SPIN_S
        self.shares = False
        self._device = device or torch.device("cpu")
        self._door: Door | None = None
        self.reachable: frozenset[int] = frozenset()
        self._peers: dict[int, _Peer] = {}
        self._lost = False

    def connect(self, store: Store, size: int, *, willing: bool = True) -> None:
        """Find out which of the `size` ranks are processes of this host whose memory can be opened.
        All ranks call it.

        Who is not `willing`, or whose machine cannot, is reachable for nobody. Raises what the
        store raises.
        """
        self._door = door = _made_door(size) if willing else None
        here = (
            {
                "host": host_identity(),
                "pid": os.getpid(),
                "door": door.segment.fd,
                "nonce": door.nonce,
            }
            if door is not None
            else {}
        )
        store.set(f"same-host/here/{self.rank}", json.dumps(here))
        entries = _told(store, "same-host/here", size)
        opened: dict[int, _Peer] = {}
        if door is not None:
            for rank, entry in enumerate(entries):
                if rank == self.rank or entry.get("host") != here["host"]:
                    continue
                peer = self._opened(rank, entry, door)
                if peer is not None:
                    opened[rank] = peer
        store.set(f"same-host/opened/{self.rank}", json.dumps(sorted(opened)))
        for rank, theirs in enumerate(_told(store, "same-host/opened", size)):
            if self.rank not in theirs and rank in opened:
                os.close(opened.pop(rank).pidfd)
        self._peers, self.reachable = opened, frozenset(opened)

    def send(self, peer: int, message: Message, payload: Payload, signature: str) -> None:
        """See `Transport.send`: the tensors are copied before it returns.

        Raises:
            RunError: there is no memory for one more message in flight.
            TransportLost: the run was stopped.
        """
        del signature
        if self._lost:
            raise TransportLost("the run was stopped")
        self._peers[peer].outgoing.send(_name(message), payload)

    def post(self, peer: int, message: Message, signature: str) -> _Arrival:
        """See `Transport.post`. There is nothing to be done ahead."""
        del signature
        return _Arrival(self, peer, message)

    def take(self, peer: int, message: Message) -> Payload:
        """Stand until a message is here. Raises as `Arrival.wait`."""
        if self._lost:
            raise TransportLost("the run was stopped")
        other, name = self._peers[peer], _name(message)
        lane = other.incoming
        try:
            if name not in lane.came and not (lane.poll() and name in lane.came):
                self._stand(lane, peer, name)
            return lane.take(name)
        except OSError as error:
            raise TransportLost(
                f"what rank {peer} (process {other.pid}) has sent cannot be opened any more: {error}"
            ) from error

    def release(self, before: int) -> None:
        """See `Transport.release`: what was sent has left, and its memory is found again by itself."""

    def drain(self) -> None:
        """See `Transport.drain`: what was sent has left. Only its sender's process must live until
        it is opened, see `close`.
        """

    def abort(self) -> None:
        """Stop the run: everybody who waits for this rank, and whoever waits here, is let go with
        TransportLost.
        """
        self._lost = True
        doors = [peer.door for peer in self._peers.values()]
        for door in [*doors, self._door]:
            if door is not None:
                door.stop()

    def close(self) -> None:
        """Let nobody begin to read from this rank any more, when all have who should; at most
        seconds later.
        """
        since = time.monotonic()
        if self._door is not None:
            self._door.leave()
        for peer in self._peers.values():
            while not self._lost and self._awaits(peer) and time.monotonic() - since < _LINGER_S:
                time.sleep(0.001)
            peer.outgoing.arena.close()
            os.close(peer.pidfd)
        self._peers, self.reachable = {}, frozenset()
        if self._door is not None:
            self._door.segment.close()

    def _awaits(self, peer: _Peer) -> bool:
        """Whether a peer has yet to open what was sent to it, and still may."""
        for (
            other
        ) in self._peers.values():  # who closes at the same time waits for this one likewise
            with contextlib.suppress(OSError):
                other.incoming.poll()
        assert self._door is not None
        return not (
            peer.outgoing.opened() or peer.door.left or peer.ended.poll(0) or self._door.stopped
        )

    def _opened(self, rank: int, entry: Mapping[str, Any], door: Door) -> _Peer | None:
        """The peer whose entry in the store this is, if its memory can be opened and is really its
        own.
        """
        pid = int(entry["pid"])
        try:
            theirs = Door.open(pid, int(entry["door"]))
            if (
                theirs.nonce != entry["nonce"]
            ):  # the number means another process here: that one is in another container
                return None
            pidfd = os.pidfd_open(pid)
        except (OSError, ValueError):
            return None
        ended = select.poll()
        ended.register(pidfd, select.POLLIN)
        outgoing, incoming = Outgoing(theirs, self.rank), Incoming(door, rank, pid, self._device)
        return _Peer(theirs, pid, ended, pidfd, outgoing, incoming)

    def _stand(self, lane: Incoming, peer: int, name: int) -> None:
        """Look for a message for a while, then sleep until it is there."""
        bell = lane.bell
        until = time.perf_counter() + self.spin_s
        while time.perf_counter() < until:
            for _ in range(4):
                if lane.poll() and name in lane.came:
                    return
            os.sched_yield()
        since = time.monotonic()
        while True:
            bell.set()
            try:
                lane.poll()
                if name in lane.came:
                    return
                self._check(peer, since)
                bell.sleep(max(0.0, min(_SLICE_S, since + self.deadline_s - time.monotonic())))
            finally:
                bell.clear()

    def _check(self, rank: int, since: float) -> None:
        """Whether there is any use in waiting longer for a peer."""
        assert self._door is not None
        peer = self._peers[rank]
        if self._lost or self._door.stopped:
            self._lost = True
            raise TransportLost("the run was stopped")
        if peer.ended.poll(0) and not peer.incoming.poll():  # what it had sent before counts
            raise TransportLost(f"rank {rank} (process {peer.pid}) is gone")
        if time.monotonic() - since >= self.deadline_s:
            raise TransportTimeout(
                f"nothing came from rank {rank} (process {peer.pid}) for {self.deadline_s:g} s"
            )


def _made_door(size: int) -> Door | None:
    """A door, where the machine has what it takes."""
    fit = sys.platform == "linux" and platform.machine() == "x86_64" and hasattr(os, "memfd_create")
    if not fit or not hasattr(os, "pidfd_open") or not host_identity():
        return None
    try:
        return Door.make(size)
    except OSError:
        return None


def _told(store: Store, name: str, size: int) -> list[Any]:
    """What all ranks have put under a name, waiting until they have."""
    keys = [f"{name}/{rank}" for rank in range(size)]
    return [json.loads(value) for value in store.multi_get(keys)]
