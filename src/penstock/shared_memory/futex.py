"""A notifier: how a process that sleeps is woken when a message arrives, without a system call for
a receiver that is awake.

A notifier is one word in shared memory. The receiver arms it (sets the word to 1), checks its queue
once more, and sleeps on the word with Linux's futex. The sender writes its message, then reads the
word; only if it is set does it clear the word and wake the receiver. Each side writes one location
and then reads the other's, so a full memory fence is needed between the two accesses: without it
both sides could read the old value, and the receiver would sleep although a message is there.
"""

from __future__ import annotations

import ctypes
import threading

from penstock.shared_memory.segment import Segment

# Numbers of x86-64 from linux/futex.h. Not the private variants: the word is shared by processes.
_SYS_FUTEX = 202
_FUTEX_WAIT = 0
_FUTEX_WAKE = 1


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
        # As `_fence`; without another call, since this runs for every message.
        self._lock.acquire()
        self._lock.release()
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
        # The kernel returns at once if the word is not 1 any more: a message between `arm` and this
        # call is not missed.
        self._syscall(_SYS_FUTEX, self._address, _FUTEX_WAIT, 1, ctypes.addressof(timeout))

    def _fence(self) -> None:
        """Order all accesses to memory before and after this call."""
        # Acquiring an uncontended lock is an atomic exchange in memory, which on x86 orders all
        # accesses before and after it. Python has no fence of its own.
        self._lock.acquire()
        self._lock.release()
