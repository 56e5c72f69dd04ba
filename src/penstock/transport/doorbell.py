"""Doors and bells: how a rank that stands still is told that something has come for it, without a
system call if it is awake.

A bell is one word in shared memory. Who waits sets it, looks once more whether there is something
after all, and sleeps on the word (Linux's futex). Who has left something looks at the word, and
only if it is set clears it and wakes the sleeper. Each side writes one thing and reads the other's,
so that a full fence between the two is needed: without it both could read the old.
"""

from __future__ import annotations

import ctypes
import os
import threading

from penstock.transport.arena import LINE, Segment

_SYS_FUTEX, _WAIT, _WAKE = (
    202,
    0,
    1,
)  # x86-64, linux/futex.h; not the private ones, since processes share the word

_NONCE, _STOPPED, _LEFT, _WORDS = 1, 3, 4, LINE // 8


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class Bell:
    """One word on which one rank waits for one other."""

    __slots__ = ("_address", "_at", "_call", "_lock", "_words")

    def __init__(self, segment: Segment, word: int) -> None:
        self._words, self._at = segment.words, word
        self._address = segment.bytes.data_ptr() + 8 * word
        self._lock = threading.Lock()
        self._call = ctypes.CDLL(None).syscall
        self._call.argtypes = (
            ctypes.c_long,
            ctypes.c_void_p,
            ctypes.c_int,
            ctypes.c_uint32,
            ctypes.c_void_p,
        )
        self._call.restype = ctypes.c_long

    def ring(self) -> None:
        """Wake who sleeps, if somebody does. What he is woken for must have been written."""
        self._fence()
        if self._words[self._at]:
            self._words[self._at] = 0
            self._call(_SYS_FUTEX, self._address, _WAKE, 1, None)

    def set(self) -> None:
        """Say that one is about to sleep, before one looks for the last time."""
        self._words[self._at] = 1
        self._fence()

    def clear(self) -> None:
        """Say that one is awake."""
        self._words[self._at] = 0

    def sleep(self, seconds: float) -> None:
        """Sleep until it rings; not at all if it has since it was set, and perhaps less than that."""
        whole = int(seconds)
        spec = _Timespec(whole, int((seconds - whole) * 1e9))
        self._call(_SYS_FUTEX, self._address, _WAIT, 1, ctypes.addressof(spec))

    def _fence(self) -> None:
        # A lock that nobody else holds is an exchange in memory, which on x86 orders all that
        # stands before and after it.
        self._lock.acquire()
        self._lock.release()


class Door:
    """One rank's page: a number that nobody can guess, whether the run was stopped, and one line
    for each rank that may send.

    Such a line is its bell, and where the sender's first message lies, once there is one.
    """

    def __init__(self, segment: Segment) -> None:
        self.segment = segment
        self._words = segment.words

    @classmethod
    def make(cls, size: int) -> Door:
        """One's own, for `size` ranks. Raises OSError as `Segment.make`."""
        door = cls(Segment.make(LINE * (size + 1)))
        door._words[_NONCE], door._words[_NONCE + 1] = (
            int.from_bytes(os.urandom(8), "little") for _ in range(2)
        )
        return door

    @classmethod
    def open(cls, pid: int, fd: int) -> Door:
        """Another process's, by the number that its memory has there. Raises OSError as
        `Segment.open`.
        """
        return cls(Segment.open(pid, fd))

    @property
    def nonce(self) -> str:
        """By which its opener knows that it is this one."""
        return f"{self._words[_NONCE]:016x}{self._words[_NONCE + 1]:016x}"

    @property
    def stopped(self) -> bool:
        """Whether the run was stopped."""
        return self._words[_STOPPED] != 0

    def stop(self) -> None:
        """Stop the run for its owner, for good, and wake him."""
        self._words[_STOPPED] = 1
        for source in range(len(self._words) // _WORDS - 1):
            self.bell(source).ring()

    @property
    def left(self) -> bool:
        """Whether its owner takes nothing more."""
        return self._words[_LEFT] != 0

    def leave(self) -> None:
        """Say so."""
        self._words[_LEFT] = 1

    def bell(self, source: int) -> Bell:
        """On which the owner waits for rank `source`."""
        return Bell(self.segment, _WORDS * (source + 1))

    def first(self, source: int) -> int:
        """The place of the first block of what `source` sends, 0 if there is none yet."""
        return self._words[_WORDS * (source + 1) + 1]

    def begin(self, source: int, place: int) -> None:
        """Say where that is."""
        self._words[_WORDS * (source + 1) + 1] = place
