"""The transport interface: how a payload gets from rank to rank. It is small, so that an executor
depends on nothing else of a transport.
"""

from __future__ import annotations

from typing import Protocol

from penstock.schedule.lower import Message
from penstock.transport.payload import Payload


class Arrival(Protocol):
    """A receive that was posted."""

    def wait(self) -> Payload:
        """Wait until the payload has arrived.

        Raises:
            TransportTimeout: it did not arrive within the deadline.
            TransportLost: it never will: the peer is gone, or the run was stopped.
        """
        ...


class Transport(Protocol):
    """One rank's end of all its links."""

    @property
    def shares(self) -> bool:
        """Whether a received tensor is the sender's own tensor and not a copy."""
        ...

    def arrives_at_once(self, peer: int) -> bool:
        """Return whether a message to `peer` is in the receiver's memory when `send` returns."""
        ...

    def send(self, peer: int, message: Message, payload: Payload, signature: str) -> int:
        """Start to send a payload, without waiting. Messages of a kind and stage with the same
        `signature` have the same form.

        Returns:
            The bytes that are sent.

        The gradient of a micro-batch is sent by the rank that has received its activation, as the
        rule table requires: transports may rely on this to release the activation's send buffer
        when the gradient arrives.
        """
        ...

    def post(self, peer: int, message: Message, signature: str) -> Arrival:
        """Announce that a message is expected. Receives on a link are posted in the order of the
        sends.
        """
        ...

    def release(self, before: int) -> None:
        """Wait until all sent messages of micro-batches below `before` have left, and drop them. A
        stream calls this instead of `drain`.

        The receivers of these messages must be able to receive them without any message that this
        rank has yet to send.
        """
        ...

    def drain(self) -> None:
        """Wait until all sent messages have left, and drop what is no longer needed."""
        ...


class TransportTimeout(Exception):
    """A message did not arrive within the deadline."""


class TransportLost(Exception):
    """The peer is gone, or the run was stopped."""
