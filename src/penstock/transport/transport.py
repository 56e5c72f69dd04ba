"""Transport: how a payload gets from rank to rank. Small, so that executors can be told apart by it
alone.
"""

from __future__ import annotations

from typing import Protocol

from penstock.schedule.lower import Message
from penstock.transport.payload import Payload


class Arrival(Protocol):
    """A receive that was posted."""

    def wait(self) -> Payload:
        """Stand until the payload is here.

        Raises:
            TransportTimeout: it did not come within the deadline.
            TransportLost: it never will: the peer is gone, or the run was stopped.
        """
        ...


class Transport(Protocol):
    """One rank's end of all its links."""

    @property
    def shares(self) -> bool:
        """Whether what arrives is the sender's own tensor, not a copy."""
        ...

    def send(self, peer: int, message: Message, payload: Payload, signature: str) -> None:
        """Hand the payload over and go on at once. Messages of a kind and stage with the same
        `signature` have the same form.

        The gradient of a micro-batch is sent by who has taken its activation, as the rule table has
        it: transports may count on that to let go of what has left.
        """
        ...

    def post(self, peer: int, message: Message, signature: str) -> Arrival:
        """Say that the message is expected. Posts on a link are made in the order of the sends."""
        ...

    def release(self, before: int) -> None:
        """Stand until what was sent of micro-batches below `before` has left, and forget it: in a
        stream nobody drains.

        Whoever takes these messages must be able to come to them without anything that is yet to be
        sent from here.
        """
        ...

    def drain(self) -> None:
        """Stand until all that was sent has left, and forget what is no longer needed."""
        ...


class TransportTimeout(Exception):
    """The deadline passed."""


class TransportLost(Exception):
    """The other end is gone."""
