"""Transport between processes of one host: tensors are copied into shared memory by the sender and
out of it by the receiver.

With torch.distributed the same message passes through a socket and two of gloo's threads; here a
small message costs a few microseconds on either side (benchmarks/transport). Where shared memory is
not available (`shared_memory.availability`), no rank is reachable this way: rank 0 logs the reason,
and messages go over the network back end.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import select
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._C._distributed_c10d import Store

from penstock.errors import RunError
from penstock.schedule.lower import Message
from penstock.schedule.op import Kind
from penstock.shared_memory.arena import OutOfSharedMemory
from penstock.shared_memory.availability import unavailable_reason
from penstock.shared_memory.mailbox import Mailbox
from penstock.shared_memory.queue import KIND_BITS, KINDS
from penstock.shared_memory.segment import Segment
from penstock.transport.devices.device_discovery import host_identity
from penstock.transport.message_queue import PayloadReader, PayloadWriter
from penstock.transport.payload import Payload
from penstock.transport.transport import TransportLost, TransportTimeout

#: Seconds for which a receiver polls before it sleeps. 1F1B waits often and briefly: with stages of
#: about 100 µs, a step with 500 µs took 0.95 times as long as with 100 µs, both with a core per rank
#: and with 4 ranks on 2 cores. Between polls the receiver yields its core, so that spinning costs
#: little where there are more ranks than cores.
SPIN_S = 500e-6

#: Seconds between a sleeping receiver's checks that the run goes on and the peer is alive.
_CHECK_EVERY_S = 0.05

#: Seconds that a closing rank waits at most for peers that have not opened what it has sent.
_LINGER_S = 5.0

_LOG = logging.getLogger(__name__)

#: A name holds the kind in its lowest 4 bits, the stage in 20 bits, the micro-batch above.
_KINDS = {kind: number for number, kind in enumerate(Kind)}
_STAGE_SHIFT, _BATCH_SHIFT = KIND_BITS, KIND_BITS + 20
assert len(_KINDS) <= KINDS


def _name(message: Message) -> int:
    """Return the number by which a queue's entries name a message."""
    kind, stage, micro_batch = message
    return micro_batch << _BATCH_SHIFT | stage << _STAGE_SHIFT | _KINDS[kind]


@dataclass(frozen=True, slots=True)
class _Peer:
    """Another rank of this host.

    Attributes:
        mailbox: its mailbox, which this rank has opened.
        pid: its process.
        exit_poll: becomes readable when the process ends.
        pidfd: the process's file descriptor, which `exit_poll` watches.
        outgoing: the queue to it.
        incoming: the queue from it.
    """

    mailbox: Mailbox
    pid: int
    exit_poll: select.poll
    pidfd: int
    outgoing: PayloadWriter
    incoming: PayloadReader


class _Unavailable(Exception):
    """This machine has no shared memory for messages; the text says why."""


class _Arrival:
    """See `Arrival`."""

    __slots__ = ("_message", "_peer", "_transport")

    def __init__(self, transport: SameHostTransport, peer: int, message: Message) -> None:
        self._transport, self._peer, self._message = transport, peer, message

    def wait(self) -> Payload:
        """See `Arrival.wait`."""
        transport, peer = self._transport, self._peer
        if transport._lost:
            raise TransportLost("the run was stopped")
        sender, name = transport._peers[peer], _name(self._message)
        queue = sender.incoming
        try:
            if name not in queue.pending and not (queue.poll() and name in queue.pending):
                transport._wait_for(queue, peer, name)
            return queue.take(name)
        except OSError as error:
            raise TransportLost(
                f"cannot open the memory of rank {peer} (process {sender.pid}), which has ended: "
                f"{error}"
            ) from error


class SameHostTransport:
    """One rank's end of its links to the other ranks of this host. No rank is reachable before
    `connect`.

    Messages are matched by name; several of one name arrive in the order of sending. Payloads may
    have any form at any time. `reachable` are the ranks that this one can exchange messages with,
    in both directions. A message that was sent must be received some time: until then it occupies
    memory.
    """

    def __init__(self, rank: int, deadline_s: float, device: torch.device | None = None) -> None:
        self.rank, self.deadline_s, self.spin_s = rank, deadline_s, SPIN_S
        self.shares = False
        self._device = device or torch.device("cpu")
        self._mailbox: Mailbox | None = None
        self.reachable: frozenset[int] = frozenset()
        self._peers: dict[int, _Peer] = {}
        # By rank, the ranks that have opened its memory, or whose memory it has opened.
        self._opened: list[frozenset[int]] = []
        self._lost = False

    def connect(self, store: Store, size: int, *, willing: bool = True) -> None:
        """Find which of the `size` ranks are processes of this host whose memory can be opened.

        All ranks call it. A rank that is not `willing`, or whose machine does not support it, is
        reachable for no rank. Raises what the store raises.
        """
        self._mailbox = mailbox = None
        address: dict[str, Any] = {}
        if willing:
            try:
                self._mailbox = mailbox = _make_mailbox(size)
                address = _address(mailbox)
            except _Unavailable as error:
                # The others must hear of it: same-host messages need both ends.
                address = {"unavailable": str(error)}
        store.set(f"same-host/address/{self.rank}", json.dumps(address))
        addresses = _gather(store, "same-host/address", size)
        if self.rank == 0:
            _log_unavailable(addresses)
        peers = {} if mailbox is None else self._open_peers(addresses, mailbox)
        # A link is used only if both ends could open each other's memory.
        store.set(f"same-host/opened/{self.rank}", json.dumps(sorted(peers)))
        self._opened = [frozenset(ranks) for ranks in _gather(store, "same-host/opened", size)]
        for rank, ranks_opened in enumerate(self._opened):
            if self.rank not in ranks_opened and rank in peers:
                os.close(peers.pop(rank).pidfd)
        self._peers, self.reachable = peers, frozenset(peers)

    def connects(self, ranks: Sequence[int]) -> bool:
        """Whether each of some ranks can open the memory of all others; the same on every rank."""
        pairs = itertools.permutations(ranks, 2)
        return all(target in self._opened[source] for source, target in pairs)

    def open_segment(self, peer: int, number: int) -> Segment:
        """Open the segment that a reachable rank has made as its file descriptor `number`.

        Raises:
            OSError: the rank has ended, or has closed the file.
        """
        return Segment.open(self._peers[peer].pid, number)

    def arrives_at_once(self, peer: int) -> bool:
        """See `Transport.arrives_at_once`."""
        del peer
        return True

    def send(self, peer: int, message: Message, payload: Payload, signature: str) -> int:
        """See `Transport.send`: the tensors have been copied when it returns.

        Raises:
            RunError: there is no memory for another message in flight.
            TransportLost: the run was stopped.
        """
        del signature
        if self._lost:
            raise TransportLost("the run was stopped")
        try:
            return self._peers[peer].outgoing.send(_name(message), payload)
        except OutOfSharedMemory as error:
            raise RunError(
                f"no shared memory for messages to another rank of this host: {error}. "
                "Use fewer micro-batches in flight, or smaller ones"
            ) from error

    def post(self, peer: int, message: Message, signature: str) -> _Arrival:
        """See `Transport.post`. Nothing needs to be done before the wait."""
        del signature
        return _Arrival(self, peer, message)

    def release(self, before: int) -> None:
        """See `Transport.release`. Nothing to do: messages are copied when sent, and receivers free
        slots.
        """

    def drain(self) -> None:
        """See `Transport.drain`. Nothing to do but in `close`: the sender's process must live until
        the receiver has opened its memory.
        """

    def abort(self) -> None:
        """Stop the run: every wait for this rank, and every wait of this rank, raises
        TransportLost.
        """
        self._lost = True
        mailboxes = [peer.mailbox for peer in self._peers.values()]
        for mailbox in [*mailboxes, self._mailbox]:
            if mailbox is not None:
                mailbox.stop()

    def close(self) -> None:
        """Close this rank's memory to new readers, once its peers have opened their messages.

        Waits at most `_LINGER_S` seconds for them.
        """
        started = time.monotonic()
        if self._mailbox is not None:
            self._mailbox.close()
        for peer in self._peers.values():
            while not self._lost and self._must_linger(peer):
                if time.monotonic() - started >= _LINGER_S:
                    break
                time.sleep(0.001)
            peer.outgoing.arena.close()
            os.close(peer.pidfd)
        self._peers, self.reachable = {}, frozenset()
        if self._mailbox is not None:
            self._mailbox.segment.close()

    def _must_linger(self, peer: _Peer) -> bool:
        """Whether a peer has not yet opened what was sent to it, and still may."""
        # A peer that closes at the same time waits for this rank to open its memory likewise.
        for sender in self._peers.values():
            with contextlib.suppress(OSError):
                sender.incoming.poll()
        assert self._mailbox is not None
        return not (
            peer.outgoing.all_opened()
            or peer.mailbox.closed
            or peer.exit_poll.poll(0)
            or self._mailbox.stopped
        )

    def _open_peers(
        self, addresses: Sequence[Mapping[str, Any]], own_mailbox: Mailbox
    ) -> dict[int, _Peer]:
        """Open the memory of all other ranks of this host for which that is possible, by rank."""
        host = host_identity()
        peers = {}
        for rank, address in enumerate(addresses):
            if rank == self.rank or address.get("host") != host:
                continue
            peer = self._open_peer(rank, address, own_mailbox)
            if peer is not None:
                peers[rank] = peer
        return peers

    def _open_peer(
        self, rank: int, address: Mapping[str, Any], own_mailbox: Mailbox
    ) -> _Peer | None:
        """Open the memory of a rank by its address in the store; None if that fails."""
        pid = int(address["pid"])
        try:
            mailbox = Mailbox.open(pid, int(address["mailbox"]))
            # The pid may denote another process here, if the peer is in another container.
            if mailbox.nonce != address["nonce"]:
                return None
            pidfd = os.pidfd_open(pid)
        except (OSError, ValueError):
            return None
        exit_poll = select.poll()
        exit_poll.register(pidfd, select.POLLIN)
        outgoing = PayloadWriter(mailbox, self.rank)
        incoming = PayloadReader(own_mailbox, rank, pid, self._device)
        return _Peer(mailbox, pid, exit_poll, pidfd, outgoing, incoming)

    def _wait_for(self, queue: PayloadReader, peer: int, name: int) -> None:
        """Spin briefly, then block on the futex until the message arrives."""
        notifier = queue.notifier
        spin_end = time.perf_counter() + self.spin_s
        while time.perf_counter() < spin_end:
            # Several polls per yield: a poll reads memory, and a yield is a system call.
            for _ in range(4):
                if queue.poll() and name in queue.pending:
                    return
            os.sched_yield()
        started = time.monotonic()
        while True:
            # Armed before the poll: a message that the poll does not see then ends the sleep.
            notifier.arm()
            try:
                queue.poll()
                if name in queue.pending:
                    return
                self._check_alive(peer, started)
                remaining_s = started + self.deadline_s - time.monotonic()
                notifier.sleep(max(0.0, min(_CHECK_EVERY_S, remaining_s)))
            finally:
                notifier.disarm()

    def _check_alive(self, rank: int, started: float) -> None:
        """Refuse to wait longer for a peer if the run was stopped, the peer ended, or time is
        up.
        """
        assert self._mailbox is not None
        peer = self._peers[rank]
        if self._lost or self._mailbox.stopped:
            self._lost = True
            raise TransportLost("the run was stopped")
        # Poll once more: what the peer sent before it ended still counts.
        if peer.exit_poll.poll(0) and not peer.incoming.poll():
            raise TransportLost(f"rank {rank} (process {peer.pid}) has ended")
        if time.monotonic() - started >= self.deadline_s:
            raise TransportTimeout(
                f"no message from rank {rank} (process {peer.pid}) for {self.deadline_s:g} s"
            )


def _make_mailbox(size: int) -> Mailbox:
    """Create this rank's mailbox.

    Raises:
        _Unavailable: this machine has no shared memory for messages.
    """
    reason = unavailable_reason()
    if reason is not None:
        raise _Unavailable(reason)
    if not host_identity():
        raise _Unavailable("/proc/sys/kernel/random/boot_id, which identifies a host, is missing")
    try:
        return Mailbox.make(size)
    except OSError as error:
        raise _Unavailable(str(error)) from error


def _address(mailbox: Mailbox) -> dict[str, Any]:
    """Return what other ranks need to open this rank's mailbox."""
    return {
        "host": host_identity(),
        "pid": os.getpid(),
        "mailbox": mailbox.segment.fd,
        "nonce": mailbox.nonce,
    }


def _log_unavailable(addresses: Sequence[Mapping[str, Any]]) -> None:
    """Log in one line which ranks cannot use shared memory, and the reason of the first."""
    reasons = {
        rank: address["unavailable"]
        for rank, address in enumerate(addresses)
        if "unavailable" in address
    }
    if reasons:
        _LOG.info(
            "messages of rank %s go over the network back end, not through shared memory: %s",
            ", ".join(map(str, reasons)),
            next(iter(reasons.values())),
        )


def _gather(store: Store, name: str, size: int) -> list[Any]:
    """Return what every rank has stored under a name, by rank, waiting until all have."""
    keys = [f"{name}/{rank}" for rank in range(size)]
    return [json.loads(value) for value in store.multi_get(keys)]
