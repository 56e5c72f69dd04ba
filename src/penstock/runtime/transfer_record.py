"""Records when a rank waited for messages and sent them, for its timeline.

A record costs one reading of the clock per message that is sent: the start of a send is the end of
its op, and the end of a wait is the start of its op, which are measured anyway.
"""

from __future__ import annotations

import time
from collections.abc import Callable
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
        arrives_at_once: of the transport.
    """

    def __init__(self, clock: Clock, arrives_at_once: Callable[[int], bool]) -> None:
        self._on_host = isinstance(clock, HostClock)
        self._arrives_at_once = arrives_at_once
        self._wait_start: dict[Message, float] = {}
        # By message, the receiver, the bytes, and when the message had been handed over.
        self._sent: dict[Message, tuple[int, int, float]] = {}

    def clear(self) -> None:
        """Drop all records."""
        self._wait_start.clear()
        self._sent.clear()

    def keep(self, count: int) -> None:
        """Drop all but the last `count` records."""
        for record in (self._wait_start, self._sent):
            # The oldest, since dictionaries are in the order of insertion.
            for message in list(islice(record, max(0, len(record) - count))):
                del record[message]

    def begin_wait(self, message: Message, start_s: float) -> None:
        """Record that the rank begins to wait for a message.

        Args:
            message: the message.
            start_s: the time, of `time.monotonic`, which is that of `HostClock`.
        """
        if self._on_host:
            self._wait_start[message] = start_s

    def end_send(self, message: Message, peer: int, size: int) -> None:
        """Record a message that has now been handed over to the transport.

        Args:
            message: the message.
            peer: the receiving rank.
            size: bytes that were sent.
        """
        self._sent[message] = peer, size, time.monotonic()

    def wait_start(self, message: Message | None) -> float | None:
        """Return when the rank began to wait for a message, on its clock; None if unknown."""
        return None if message is None else self._wait_start.get(message)

    def sent(self, message: Message | None) -> Sent | None:
        """Return how a message was sent; None if this rank has not sent it to another one."""
        row = None if message is None else self._sent.get(message)
        if row is None:
            return None
        peer, size, sent_s = row
        is_there = self._on_host and self._arrives_at_once(peer)
        return Sent(peer, size, sent_s if is_there else None)
