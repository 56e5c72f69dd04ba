"""Message queue of one direction between two processes of a host: a linked list of blocks of small
entries, each of which names a message and the slot where its contents are.

    first ──▶ block of entries ── last entry ──▶ next block ──▶ …        blocks and messages are
                                                                         slots of the sender's arena
                [sequence | name | layout | place]

Protocol: only the sender writes entries and only the receiver reads them. The sequence number is
written last, and x86 makes stores visible in program order, so an entry with the expected number is
complete. Sequence numbers never repeat, so a block is reused without clearing; it must not have
held a message in between. The list has no end: sending never waits.

How contents are read is described by a *layout*, which the sender announces once and messages then
refer to by number: layouts are numbered from 0 in the order of their announcement.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from penstock.shared_memory.arena import Arena, Slot, split_place
from penstock.shared_memory.futex import Notifier
from penstock.shared_memory.mailbox import Mailbox
from penstock.shared_memory.segment import Segment

LayoutT = TypeVar("LayoutT")

_ENTRY_WORDS, _ENTRIES = 4, 256
_BLOCK_BYTES = 8 * _ENTRY_WORDS * _ENTRIES
_ENTRY = struct.Struct("QQQ")  # after the sequence number: name, layout, place

#: Names of messages have numbers below this one in their lowest `KIND_BITS`: the others belong to
#: entries of the queue itself, which announce a layout and the next block of the list.
KINDS, KIND_BITS = 14, 4
_LAYOUT, _NEXT = KINDS, KINDS + 1
_KIND_MASK = (1 << KIND_BITS) - 1

#: Layouts remembered at a time: when a layout with a multiple of this number is announced, both
#: sides forget all earlier ones.
MAX_LAYOUTS = 1024


class QueueWriter:
    """The sender's end of a message queue."""

    def __init__(self, mailbox: Mailbox, rank: int) -> None:
        """Prepare to send.

        Args:
            mailbox: the receiver's.
            rank: the sender's.
        """
        self.arena = Arena()
        self.notifier: Notifier = mailbox.notifier(rank)
        self._mailbox, self._rank = mailbox, rank
        self._block_pool = self.arena.exclusive_pool(_BLOCK_BYTES)
        self._layout_count = 0
        self._sequence = 0
        self._block: Slot | None = None
        self._offset = self._end = 0

    def append(self, name: int, layout: int, place: int) -> None:
        """Make a message visible to the receiver. `notifier.notify` wakes a receiver that sleeps.

        Args:
            name: any number with less than `KINDS` in its lowest `KIND_BITS`.
            layout: number of the layout of its contents.
            place: of the slot that holds its contents, which no longer change.

        Raises:
            OutOfSharedMemory: there is no memory for another block.
        """
        if self._offset == self._end:
            self._add_block()
        block = self._block
        assert block is not None
        _ENTRY.pack_into(block.segment.memory, self._offset + 8, name, layout, place)
        self._sequence += 1
        # The sequence number is stored last: it makes the entry visible to the receiver.
        block.words[self._offset >> 3] = self._sequence
        self._offset += 8 * _ENTRY_WORDS

    def announce_layout(self, description: bytes) -> int:
        """Send the description of a new layout to the receiver, and return the layout's number.

        Raises:
            OutOfSharedMemory: there is no memory for the description.
        """
        slot = self.arena.take(self.arena.pool(len(description)))
        try:
            slot.segment.memory[slot.start : slot.start + len(description)] = description
            self.append(_LAYOUT, len(description), slot.place)
        except BaseException:
            slot.free()
            raise
        self._layout_count += 1
        return self._layout_count - 1

    def all_opened(self) -> bool:
        """Whether the receiver has opened all memory segments: until then this process must
        live.
        """
        return all(segment.opened for segment in self.arena.segments)

    def _add_block(self) -> None:
        """Append a block to the list. The last entry of a block is reserved for the link to it."""
        last, last_offset = self._block, self._offset
        self._block = block = self.arena.take(self._block_pool)
        self._offset = block.start
        self._end = block.start + _BLOCK_BYTES - 8 * _ENTRY_WORDS
        if last is None:
            self._mailbox.set_first_block(self._rank, block.place)
            return
        _ENTRY.pack_into(last.segment.memory, last_offset + 8, _NEXT, 0, block.place)
        self._sequence += 1
        last.words[last_offset >> 3] = self._sequence


class QueueReader(Generic[LayoutT]):
    """The receiver's end of a message queue.

    `pending` holds messages that have arrived and were not yet taken, by name, each in the order of
    sending. The caller that takes one frees its slot after reading the contents.
    """

    def __init__(
        self,
        mailbox: Mailbox,
        source: int,
        pid: int,
        parse_layout: Callable[[int, bytes], LayoutT],
    ) -> None:
        """Prepare to receive.

        Args:
            mailbox: the receiver's.
            source: the sender's rank.
            pid: the sender's process.
            parse_layout: makes a layout of its number and its description.
        """
        self.notifier: Notifier = mailbox.notifier(source)
        self.pending: dict[int, deque[tuple[LayoutT, Slot]]] = {}
        self._mailbox, self._source, self._pid = mailbox, source, pid
        self._parse_layout = parse_layout
        self._segments: dict[int, Segment] = {}
        self._slots: dict[int, Slot] = {}
        self._layouts: dict[int, LayoutT] = {}
        self._layout_count = 0
        self._block: Slot | None = None
        self._offset = 0
        self._sequence = 1

    def poll(self) -> bool:
        """Move all entries that have arrived to `pending`. Returns whether there was any entry.

        Raises:
            OSError: the sender is gone, and its memory with it.
        """
        block = self._block
        if block is None:
            first = self._mailbox.first_block(self._source)
            if not first:
                return False
            block = self._block = self._slot(first)
            self._offset = block.start
        words, advanced = block.words, False
        while words[self._offset >> 3] == self._sequence:
            advanced = True
            name, layout, place = _ENTRY.unpack_from(block.segment.memory, self._offset + 8)
            self._sequence += 1
            self._offset += 8 * _ENTRY_WORDS
            if name & _KIND_MASK < KINDS:
                entry = self._layouts[layout], self._slots.get(place) or self._slot(place)
                queue = self.pending.get(name)
                if queue is None:
                    self.pending[name] = deque((entry,))
                else:
                    queue.append(entry)
            elif name == _LAYOUT:
                self._read_layout(self._slot(place), layout)
            else:  # the block is read to its end, and the sequence goes on in the next
                block.free()
                block = self._block = self._slot(place)
                words, self._offset = block.words, block.start
        return advanced

    def _read_layout(self, slot: Slot, length: int) -> None:
        """Register the layout whose description of `length` bytes is in a slot."""
        description = slot.segment.memory[slot.start : slot.start + length]
        slot.free()
        if self._layout_count % MAX_LAYOUTS == 0:
            self._layouts.clear()
        number = self._layout_count
        self._layouts[number] = self._parse_layout(number, description)
        self._layout_count += 1

    def _slot(self, place: int) -> Slot:
        """Return the slot at a place, opening its segment at first use."""
        if place not in self._slots:
            fd, offset = split_place(place)
            segment = self._segments.get(fd)
            if segment is None:
                segment = self._segments[fd] = Segment.open(self._pid, fd)
                segment.words[0] = 1  # tells the sender that the segment outlives it, see `Segment`
            self._slots[place] = Slot(segment, offset, place)
        return self._slots[place]
