"""Slots for messages in segments of shared memory.

Protocol: only the sender allocates a slot, by setting the first word of its head; only the receiver
frees it, by clearing that word. So an arena grows to the most that was in flight at once, and no
lock is needed.
"""

from __future__ import annotations

import mmap
from collections import deque

from torch import Tensor

from penstock.shared_memory.segment import LINE, Segment

#: Bytes of the smallest slot (without its head), and of the smallest segment.
_MIN_SLOT_BYTES = 256
_MIN_SEGMENT_BYTES = 32 * 1024

#: Slots in use that one sweep examines at most, so that allocation takes bounded time.
_MAX_SWEEP = 16

#: A place encodes a file descriptor and an offset in one number: the offset has these bits.
_OFFSET_BITS = 40


class OutOfSharedMemory(Exception):
    """There is no memory for another segment.

    Attributes:
        nbytes: bytes that could not be allocated.
        in_use: bytes of the arena's segments.
    """

    def __init__(self, nbytes: int, in_use: int, reason: OSError) -> None:
        self.nbytes, self.in_use = nbytes, in_use
        super().__init__(
            f"cannot allocate {nbytes:,} bytes in addition to the {in_use:,} in use ({reason})"
        )


class Slot:
    """A head of one cache line, and space for a message after it.

    Attributes:
        segment, words: the segment that it is in, and that segment's 8-byte words.
        state: index of the word in its head that is not 0 while the slot is in use.
        start: offset in bytes of the space for a message.
        place: the slot's name in messages between the two processes, see `split_place`.
        pool: the sender's pool that it returns to.
        views: tensors over this memory, by the number of their layout.
    """

    __slots__ = ("place", "pool", "segment", "start", "state", "views", "words")

    def __init__(self, segment: Segment, offset: int, place: int, pool: Pool | None = None) -> None:
        self.segment, self.words = segment, segment.words
        self.state, self.start = offset // 8, offset + LINE
        self.place, self.pool = place, pool
        self.views: dict[int, tuple[Tensor, ...]] = {}

    def free(self) -> None:
        """Return the slot to its sender: its contents are not read again."""
        self.words[self.state] = 0


def split_place(place: int) -> tuple[int, int]:
    """Split a place into file descriptor and offset in bytes."""
    return place >> _OFFSET_BITS, place & ((1 << _OFFSET_BITS) - 1)


class Pool:
    """The slots of one size: free ones, of which the last freed is taken first, and those in use.

    An `exclusive` pool neither lends its slots to other pools nor borrows theirs.
    """

    __slots__ = ("exclusive", "free", "in_use", "nbytes")

    def __init__(self, nbytes: int, *, exclusive: bool = False) -> None:
        self.nbytes, self.exclusive = nbytes, exclusive
        self.free: list[Slot] = []
        self.in_use: deque[Slot] = deque()

    def take_free(self) -> Slot | None:
        """Return a slot that is not in use; None if there is none."""
        if self.free:
            return self.free.pop()
        in_use = self.in_use
        # Messages are read in order as a rule, so that the oldest slot is the first to be free. To
        # look at one more takes as long as all else here: the receiver's core has just written it.
        if in_use and not in_use[0].words[in_use[0].state]:
            return in_use.popleft()
        self._sweep()
        return self.free.pop() if self.free else None

    def _sweep(self) -> None:
        """Collect slots that the receiver has freed, oldest first."""
        for _ in range(min(len(self.in_use), _MAX_SWEEP)):
            slot = self.in_use.popleft()
            if slot.words[slot.state]:
                self.in_use.append(slot)
            else:
                self.free.append(slot)


class Arena:
    """The sender's memory for one link. It grows on demand, and slots are reused by size."""

    def __init__(self) -> None:
        self.segments: list[Segment] = []
        self.nbytes = 0
        self._pools: dict[int, Pool] = {}
        self._sizes: list[int] = []
        self._exclusive: list[Pool] = []
        self._used = 0  # bytes of the last segment

    def pool(self, nbytes: int) -> Pool:
        """Return the pool of slots for messages of `nbytes`."""
        size = _size_class(nbytes)
        if size not in self._pools:
            self._pools[size] = Pool(size)
            self._sizes = sorted(self._pools)
        return self._pools[size]

    def exclusive_pool(self, nbytes: int) -> Pool:
        """Make a pool whose slots of `nbytes` never hold anything but what is taken from it."""
        self._exclusive.append(Pool(nbytes, exclusive=True))
        return self._exclusive[-1]

    def take(self, pool: Pool) -> Slot:
        """Allocate a slot of a pool, or a larger one that is free.

        Raises:
            OutOfSharedMemory: there is no memory for another slot.
        """
        slot = pool.take_free() or self._borrow(pool) or self._add_slot(pool)
        slot.words[slot.state] = 1
        owner = slot.pool
        assert owner is not None
        owner.in_use.append(slot)
        return slot

    def close(self) -> None:
        """Close all segments to new readers; free those that were never opened."""
        for segment in self.segments:
            segment.close()
        # Slots and pools refer to each other: without this their memory would stay until Python's
        # garbage collector runs.
        for pool in [*self._pools.values(), *self._exclusive]:
            pool.free.clear()
            pool.in_use.clear()

    def _borrow(self, pool: Pool) -> Slot | None:
        """Take a free slot of another pool, of at most four times the size.

        So messages of varying lengths share memory.
        """
        if pool.exclusive:
            return None
        for size in self._sizes:
            if not pool.nbytes < size <= 4 * pool.nbytes:
                continue
            slot = self._pools[size].take_free()
            if slot is not None:
                return slot
        return None

    def _add_slot(self, pool: Pool) -> Slot:
        """Make a new slot, in a new segment if the last one is full."""
        last = self.segments[-1] if self.segments else None
        slot_bytes = LINE + pool.nbytes
        if last is None or self._used + slot_bytes > len(last.memory):
            # An eighth of what there is, so that the number of segments, each with a file
            # descriptor, grows with the logarithm of the memory.
            last = self._grow(max(LINE + slot_bytes, self.nbytes // 8, _MIN_SEGMENT_BYTES))
        slot = Slot(last, self._used, last.fd << _OFFSET_BITS | self._used, pool)
        self._used += slot_bytes
        return slot

    def _grow(self, nbytes: int) -> Segment:
        """Add a segment of `nbytes`, rounded up to whole pages."""
        segment_bytes = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        try:
            segment = Segment.make(segment_bytes)
        except OSError as error:
            raise OutOfSharedMemory(segment_bytes, self.nbytes, error) from error
        self.segments.append(segment)
        self.nbytes += segment_bytes
        self._used = LINE
        return segment


def _size_class(nbytes: int) -> int:
    """Round a size up to one of four classes per power of two.

    Less than a quarter of a slot is wasted, and nothing if the size is a power of two.

    >>> [_size_class(nbytes) for nbytes in (0, 256, 257, 1000, 1025, 2**20)]
    [256, 256, 320, 1024, 1280, 1048576]
    """
    if nbytes <= _MIN_SLOT_BYTES:
        return _MIN_SLOT_BYTES
    step = 1 << ((nbytes - 1).bit_length() - 3)
    return -(-nbytes // step) * step
