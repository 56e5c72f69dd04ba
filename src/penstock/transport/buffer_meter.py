"""Measurement of the memory of messages."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class BufferMeter:
    """Counts the bytes of messages that are in memory: receives that were posted and not yet taken,
    and sends that have not been seen to leave.

    Messages in shared memory are not counted: they are in a segment of fixed size.
    """

    now: int = 0
    peak: int = 0

    def take(self, size: int) -> None:
        """Add `size` bytes."""
        self.now += size
        self.peak = max(self.peak, self.now)

    def give(self, size: int) -> None:
        """Subtract `size` bytes."""
        self.now -= size
