"""A mailbox: the page of shared memory by which other processes reach one process.

Line 0 identifies the mailbox and holds its flags. One line per sender follows, with the notifier on
which the owner waits for that sender, and the place of the first block of the sender's queue.
"""

from __future__ import annotations

import os

from penstock.shared_memory.futex import Notifier
from penstock.shared_memory.segment import LINE, Segment

# Indices of the 8-byte words of line 0.
_NONCE = 1
_STOPPED = 3
_CLOSED = 4

_WORDS_PER_LINE = LINE // 8


class Mailbox:
    """One rank's page of shared memory: a random identifier, two flags, and a line per sender.

    A sender's line holds its notifier and the place of the first block of its message queue, once
    there is one.
    """

    def __init__(self, segment: Segment) -> None:
        self.segment = segment
        self._words = segment.words

    @classmethod
    def make(cls, size: int) -> Mailbox:
        """Create the mailbox of this rank in a run of `size` ranks. Raises OSError as
        `Segment.make`.
        """
        mailbox = cls(Segment.make(LINE * (size + 1)))
        mailbox._words[_NONCE] = int.from_bytes(os.urandom(8), "little")
        mailbox._words[_NONCE + 1] = int.from_bytes(os.urandom(8), "little")
        return mailbox

    @classmethod
    def open(cls, pid: int, fd: int) -> Mailbox:
        """Open the mailbox that process `pid` has as its file descriptor `fd`. Raises OSError as
        `Segment.open`.
        """
        return cls(Segment.open(pid, fd))

    @property
    def nonce(self) -> str:
        """128 random bits in hexadecimal, by which a process that opens it can identify it."""
        return f"{self._words[_NONCE]:016x}{self._words[_NONCE + 1]:016x}"

    @property
    def stopped(self) -> bool:
        """Whether the run was stopped."""
        return self._words[_STOPPED] != 0

    def stop(self) -> None:
        """Stop the run for the owner, permanently, and wake it."""
        self._words[_STOPPED] = 1
        senders = len(self._words) // _WORDS_PER_LINE - 1
        for source in range(senders):
            self.notifier(source).notify()

    @property
    def closed(self) -> bool:
        """Whether the owner has closed its mailbox and reads no further messages."""
        return self._words[_CLOSED] != 0

    def close(self) -> None:
        """Announce that the owner reads no further messages."""
        self._words[_CLOSED] = 1

    def notifier(self, source: int) -> Notifier:
        """Return the notifier on which the owner waits for rank `source`."""
        return Notifier(self.segment, _WORDS_PER_LINE * (source + 1))

    def first_block(self, source: int) -> int:
        """Return the place of the first block of rank `source`'s queue; 0 if there is none yet."""
        return self._words[_WORDS_PER_LINE * (source + 1) + 1]

    def set_first_block(self, source: int, place: int) -> None:
        """Publish the place of the first block of rank `source`'s queue."""
        self._words[_WORDS_PER_LINE * (source + 1) + 1] = place
