"""Records when a rank waited for messages and sent them, for its timeline.

A record costs one reading of the clock per message: the start of a send is the end of its op, and
the end of a wait is the start of its op, which are measured anyway.
"""

from __future__ import annotations

from itertools import islice
from typing import NamedTuple

from penstock.ranks.clock import Clock, HostClock
from penstock.schedule.lower import Message


class Sent(NamedTuple):
    """A message that a rank has sent.

    Attributes:
        peer: the receiving rank.
        bytes: its size.
        arrived_s: when it was in the receiver's memory, on the sender's clock in seconds; None if
            the sender does not know it.
    """

    peer: int
    bytes: int
    arrived_s: float | None


class TransferRecord:
    """The waits and sends of the last batches of a rank.

    Args:
        clock: of the rank's ops. Where a device computes while the host runs ahead, the host's
            waits say nothing about the device, and are not recorded.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock if isinstance(clock, HostClock) else None
        self._wait_start: dict[Message, float] = {}
        self._sent: dict[Message, Sent] = {}

    def clear(self) -> None:
        """Drop all records."""
        self._wait_start.clear()
        self._sent.clear()

    def keep(self, count: int) -> None:
        """Drop all but the last `count` records."""
        for record in (self._wait_start, self._sent):
            for message in list(islice(record, max(0, len(record) - count))):
                del record[message]

    def begin_wait(self, message: Message) -> None:
        """Record that the rank begins to wait for a message."""
        if self._clock is not None:
            self._wait_start[message] = self._clock.mark()

    def end_send(self, message: Message, peer: int, size: int, *, arrived: bool) -> None:
        """Record a message that has been handed over to the transport.

        Args:
            message: the message.
            peer: the receiving rank.
            size: bytes that were sent.
            arrived: whether it is in the receiver's memory now.
        """
        arrived_s = self._clock.mark() if arrived and self._clock is not None else None
        self._sent[message] = Sent(peer, size, arrived_s)

    def wait_start(self, message: Message | None) -> float | None:
        """Return when the rank began to wait for a message, on its clock; None if unknown."""
        return None if message is None else self._wait_start.get(message)

    def sent(self, message: Message | None) -> Sent | None:
        """Return how a message was sent; None if this rank has not sent it to another one."""
        return None if message is None else self._sent.get(message)
