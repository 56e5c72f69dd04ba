"""Memory that two processes of one host see, and the slots in it that messages lie in.

Memory is of `memfd_create`: it has no name in /dev/shm (which containers keep small), and it is
gone with the last process that holds it, however that ends. It is reserved when it is made, so that
want of memory is an error there and not a signal later.

Rules: a slot is given out by its sender alone, which sets the first word of its head; it is freed
by its receiver alone, which clears that word. So an arena is as large as what was in flight at
once, and nothing is locked.
"""

from __future__ import annotations

import mmap
import os
from collections import deque

import torch
from torch import Tensor

from penstock.errors import RunError

#: Bytes: a line of the cache, the alignment of torch's own tensors, and the size of a head.
LINE = 64

#: Bytes of the smallest message's room, and of the smallest segment.
_SMALLEST_ROOM, _SMALLEST_SEGMENT = 256, 32 * 1024

#: Out of how many slots of a size, at most, one that was freed is looked for at a time.
_LOOKED_AT = 16

#: A file descriptor and an offset in one number: the offset has these bits.
_OFFSET_BITS = 40


class Segment:
    """A piece of shared memory: as bytes of a tensor, and as words of 8 bytes. Its first line is
    its head.

    The first word of the head is set by the other side, once it has opened the segment: until then
    the owner must live.
    """

    __slots__ = ("bytes", "fd", "memory", "words")

    def __init__(self, fd: int, nbytes: int, owned: bool) -> None:
        self.fd = fd if owned else -1
        self.memory = mmap.mmap(fd, nbytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        self.words = memoryview(self.memory).cast("Q")
        with torch.inference_mode(mode=False):  # else nobody could write to it outside
            self.bytes: Tensor = torch.frombuffer(self.memory, dtype=torch.uint8)

    @classmethod
    def make(cls, nbytes: int) -> Segment:
        """New memory, all zero.

        Raises:
            OSError: there is not so much, or the system has no such memory.
        """
        fd = os.memfd_create("penstock", os.MFD_CLOEXEC)
        try:
            os.posix_fallocate(fd, 0, nbytes)
            return cls(fd, nbytes, owned=True)
        except BaseException:
            os.close(fd)
            raise

    @classmethod
    def open(cls, pid: int, fd: int) -> Segment:
        """What process `pid` has made and calls `fd`.

        Raises:
            OSError: the process is gone, or its memory may not be opened.
        """
        opened = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
        try:
            return cls(opened, os.fstat(opened).st_size, owned=False)
        finally:
            os.close(opened)

    @property
    def opened(self) -> bool:
        """Whether the other side has opened it."""
        return self.words[0] != 0

    def close(self) -> None:
        """Let nobody open it any more. The memory goes when nobody refers to it."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class Slot:
    """A head of one line, and room for a message after it; `views` are tensors there, by the number
    of their layout.

    `place` names it to the other side; `pool` is what the sender finds it again in.
    """

    __slots__ = ("place", "pool", "segment", "start", "state", "views", "words")

    def __init__(self, segment: Segment, offset: int, place: int, pool: Pool | None = None) -> None:
        self.segment, self.words = segment, segment.words
        self.state, self.start = offset // 8, offset + LINE
        self.place, self.pool = place, pool
        self.views: dict[int, tuple[Tensor, ...]] = {}

    def free(self) -> None:
        """Give it back: what was in it is not looked at any more."""
        self.words[self.state] = 0


def split_place(place: int) -> tuple[int, int]:
    """The file descriptor and the offset that a place stands for."""
    return place >> _OFFSET_BITS, place & ((1 << _OFFSET_BITS) - 1)


class Pool:
    """The slots of one room in bytes: free ones, of which the last freed is taken first, and those
    that are out.

    A `kept` pool never has slots of another, nor others its slots.
    """

    __slots__ = ("free", "kept", "nbytes", "out")

    def __init__(self, nbytes: int, *, kept: bool = False) -> None:
        self.nbytes, self.kept = nbytes, kept
        self.free: list[Slot] = []
        self.out: deque[Slot] = deque()

    def sweep(self) -> bool:
        """Look for slots that the receiver has freed, at the oldest first. Returns whether there is
        a free one.
        """
        for _ in range(min(len(self.out), _LOOKED_AT)):
            slot = self.out.popleft()
            (self.out if slot.words[slot.state] else self.free).append(slot)
        return bool(self.free)


class Arena:
    """The sender's memory of one link. It grows on demand; slots are found again by size."""

    def __init__(self) -> None:
        self.segments: list[Segment] = []
        self.nbytes = 0
        self._pools: dict[int, Pool] = {}
        self._sizes: list[int] = []
        self._kept: list[Pool] = []
        self._used = 0

    def pool(self, nbytes: int) -> Pool:
        """The slots that are for messages of `nbytes`."""
        size = _rounded(nbytes)
        if size not in self._pools:
            self._pools[size] = Pool(size)
            self._sizes = sorted(self._pools)
        return self._pools[size]

    def kept_pool(self, nbytes: int) -> Pool:
        """Slots of that size of which each is new, or comes back from this pool."""
        self._kept.append(Pool(nbytes, kept=True))
        return self._kept[-1]

    def take(self, pool: Pool) -> Slot:
        """A slot of a pool, or a larger one that is free.

        Raises:
            RunError: there is no memory for one more.
        """
        slot = pool.free.pop() if pool.free or pool.sweep() else self._lent(pool) or self._cut(pool)
        slot.words[slot.state] = 1
        owner = slot.pool
        assert owner is not None
        owner.out.append(slot)
        return slot

    def close(self) -> None:
        """Let nobody open what is here any more, and give it back where nobody has."""
        for segment in self.segments:
            segment.close()
        for pool in [
            *self._pools.values(),
            *self._kept,
        ]:  # slots and pools refer to each other: else memory would wait for the collector
            pool.free.clear()
            pool.out.clear()

    def _lent(self, pool: Pool) -> Slot | None:
        """A free slot of at most four times the size, so that lengths that vary do not each keep
        memory of their own.
        """
        for size in () if pool.kept else self._sizes:
            if pool.nbytes < size <= 4 * pool.nbytes:
                other = self._pools[size]
                if other.free or other.sweep():
                    return other.free.pop()
        return None

    def _cut(self, pool: Pool) -> Slot:
        """A new slot, of a new segment if the last one is full. Segments grow with the arena, by an
        eighth.
        """
        last, whole = self.segments[-1] if self.segments else None, LINE + pool.nbytes
        if last is None or self._used + whole > len(last.memory):
            last = self._grow(max(LINE + whole, self.nbytes // 8, _SMALLEST_SEGMENT))
        slot = Slot(last, self._used, last.fd << _OFFSET_BITS | self._used, pool)
        self._used += whole
        return slot

    def _grow(self, nbytes: int) -> Segment:
        whole = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        try:
            segment = Segment.make(whole)
        except OSError as error:
            raise RunError(
                f"there is no memory for messages to another rank of this host: {whole:,} bytes are wanted beside "
                f"{self.nbytes:,} that are there ({error}): fewer micro-batches in flight, or smaller ones, need "
                "less"
            ) from error
        self.segments.append(segment)
        self.nbytes += whole
        self._used = LINE
        return segment


def _rounded(nbytes: int) -> int:
    """Up to one of four sizes in an octave: less than a quarter is wasted, and nothing of a power
    of two.

    >>> [_rounded(nbytes) for nbytes in (0, 256, 257, 1000, 1025, 2**20)]
    [256, 256, 320, 1024, 1280, 1048576]
    """
    if nbytes <= _SMALLEST_ROOM:
        return _SMALLEST_ROOM
    step = 1 << ((nbytes - 1).bit_length() - 3)
    return -(-nbytes // step) * step
