"""Mailboxes and notifiers: how a blocked rank is woken when a message arrives, without a system
call for a receiver that is awake.

A notifier is one word in shared memory. The receiver arms it (sets the word to 1), checks its queue
once more, and sleeps on the word with Linux's futex. The sender writes its message, then reads the
word; only if it is set does it clear the word and wake the receiver. Each side writes one location
and then reads the other's, so a full memory fence is needed between the two accesses: without it
both sides could read the old value, and the receiver would sleep although a message is there.
"""

from __future__ import annotations

import ctypes
import os
import threading

from penstock.shared_memory.arena import LINE, Segment

# Numbers of x86-64 from linux/futex.h. Not the private variants: the word is shared by processes.
_SYS_FUTEX = 202
_FUTEX_WAIT = 0
_FUTEX_WAKE = 1

#: Layout of a mailbox, as indices of 8-byte words. Line 0 holds these; one line per sender follows.
_NONCE = 1
_STOPPED = 3
_CLOSED = 4
_WORDS_PER_LINE = LINE // 8


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class Notifier:
    """One futex word on which one receiver waits for one sender."""

    __slots__ = ("_address", "_index", "_lock", "_syscall", "_words")

    def __init__(self, segment: Segment, index: int) -> None:
        self._words = segment.words
        self._index = index
        self._address = segment.bytes.data_ptr() + 8 * index
        self._lock = threading.Lock()
        self._syscall = ctypes.CDLL(None).syscall
        self._syscall.argtypes = (
            ctypes.c_long,
            ctypes.c_void_p,
            ctypes.c_int,
            ctypes.c_uint32,
            ctypes.c_void_p,
        )
        self._syscall.restype = ctypes.c_long

    def notify(self) -> None:
        """Wake the receiver if the notifier is armed. The message must have been written before."""
        self._fence()
        if self._words[self._index]:
            self._words[self._index] = 0
            self._syscall(_SYS_FUTEX, self._address, _FUTEX_WAKE, 1, None)

    def arm(self) -> None:
        """Ask to be woken. The receiver calls this before its last look at the queue."""
        self._words[self._index] = 1
        self._fence()

    def disarm(self) -> None:
        """Withdraw the request to be woken."""
        self._words[self._index] = 0

    def sleep(self, seconds: float) -> None:
        """Sleep until notified, for at most `seconds`; spurious wake-ups are possible.

        Returns at once if the sender has notified since the notifier was armed.
        """
        whole_seconds = int(seconds)
        timeout = _Timespec(whole_seconds, int((seconds - whole_seconds) * 1e9))
        self._syscall(_SYS_FUTEX, self._address, _FUTEX_WAIT, 1, ctypes.addressof(timeout))

    def _fence(self) -> None:
        # Acquiring an uncontended lock is an atomic exchange in memory, which on x86 orders all
        # accesses before and after it. Python has no fence of its own.
        self._lock.acquire()
        self._lock.release()


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
