"""Hybrid transport: ranks of the same host are reached through shared memory, all others through
the network.
"""

from __future__ import annotations

from penstock.schedule.lower import Message
from penstock.transport.distributed import DistributedTransport
from penstock.transport.payload import Payload
from penstock.transport.same_host import SameHostTransport
from penstock.transport.transport import Arrival, Transport


class HybridTransport:
    """A transport that chooses one of two by the peer. See `Transport`."""

    shares = False

    def __init__(self, near: SameHostTransport, far: DistributedTransport) -> None:
        self._near, self._far = near, far

    def _to(self, peer: int) -> Transport:
        """Return the transport that reaches a peer."""
        return self._near if peer in self._near.reachable else self._far

    def arrives_at_once(self, peer: int) -> bool:
        """See `Transport.arrives_at_once`."""
        return self._to(peer).arrives_at_once(peer)

    def send(self, peer: int, message: Message, payload: Payload, signature: str) -> int:
        """See `Transport.send`."""
        return self._to(peer).send(peer, message, payload, signature)

    def post(self, peer: int, message: Message, signature: str) -> Arrival:
        """See `Transport.post`."""
        return self._to(peer).post(peer, message, signature)

    def release(self, before: int) -> None:
        """See `Transport.release`."""
        self._far.release(before)

    def drain(self) -> None:
        """See `Transport.drain`."""
        self._far.drain()
        self._near.drain()


def route(near: SameHostTransport, far: DistributedTransport, others: int) -> Transport:
    """Return a transport to the `others` other ranks: one of the two alone if it reaches all of
    them.
    """
    if len(near.reachable) == others:
        return near
    return HybridTransport(near, far) if near.reachable else far
