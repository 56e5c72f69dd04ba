"""Message queue of one direction between two processes of a host: a linked list of blocks of small
entries, each of which names a message and the slot where its tensors are.

    first ──▶ block of entries ── last entry ──▶ next block ──▶ …        blocks and messages are
                                                                         slots of the sender's arena
                [sequence | name | layout | place]

Protocol: only the sender writes entries and only the receiver reads them. The sequence number is
written last, and x86 makes stores visible in program order, so an entry with the expected number is
complete. Sequence numbers never repeat, so a block is reused without clearing; it must not have
held a message in between. The list has no end: sending never waits.
"""

from __future__ import annotations

import struct
from collections import deque

import torch

from penstock.shared_memory.arena import Arena, Segment, Slot, split_place
from penstock.shared_memory.mailbox import Mailbox, Notifier
from penstock.transport.layout import Layout, encode_layout, key_of
from penstock.transport.payload import Payload

_ENTRY_WORDS, _ENTRIES = 4, 256
_BLOCK_BYTES = 8 * _ENTRY_WORDS * _ENTRIES
_ENTRY = struct.Struct("QQQ")  # after the sequence number: name, layout, place

#: Names that announce a new layout, and the next block of the list. The lowest bits of a name are
#: the message's kind (see `same_host`), and no kind has these two numbers.
_LAYOUT, _NEXT = 14, 15
_KIND_BITS = 15

#: Layouts remembered at a time: when this number is reached, both sides forget all of them.
_LAYOUTS = 1024


class QueueWriter:
    """The sender's end of a message queue."""

    def __init__(self, mailbox: Mailbox, rank: int) -> None:
        """Prepare to send.

        Args:
            mailbox: the receiver's.
            rank: the sender's.
        """
        self._mailbox = mailbox
        self._rank = rank
        self._notifier: Notifier = mailbox.notifier(rank)
        self.arena = Arena()
        self._block_pool = self.arena.exclusive_pool(_BLOCK_BYTES)
        self._layouts: dict[tuple[object, ...], Layout] = {}
        self._layout_count = 0
        self._sequence = 0
        self._block: Slot | None = None
        self._offset = self._end = 0

    def send(self, name: int, payload: Payload) -> None:
        """Copy the payload's tensors into a slot, enter it into the queue, and wake the receiver.

        Raises:
            RunError: there is no memory for another message in flight.
        """
        layout = self._layouts.get(key_of(payload))
        if layout is None:
            layout = self._announce_layout(payload)
        assert layout.pool is not None
        slot = self.arena.take(layout.pool)
        try:
            layout.put(slot, payload.leaves if layout.bare else payload.tensors)
            self._append(name, layout.number, slot.place)
        except BaseException:
            slot.free()
            raise
        self._notifier.notify()

    def all_opened(self) -> bool:
        """Whether the receiver has opened all memory segments: until then this process must
        live.
        """
        return all(segment.opened for segment in self.arena.segments)

    def _announce_layout(self, payload: Payload) -> Layout:
        """Number the payload's layout and send its description to the receiver."""
        description = encode_layout(self._layout_count, payload)
        slot = self.arena.take(self.arena.pool(len(description)))
        try:
            slot.segment.memory[slot.start : slot.start + len(description)] = description
            self._append(_LAYOUT, len(description), slot.place)
        except BaseException:
            slot.free()
            raise
        if self._layout_count % _LAYOUTS == 0:
            self._layouts.clear()
        self._layout_count += 1
        layout = self._layouts[key_of(payload)] = Layout.parse(description)
        layout.pool = self.arena.pool(layout.nbytes)
        return layout

    def _append(self, name: int, layout: int, place: int) -> None:
        """Write one entry."""
        if self._offset == self._end:
            self._add_block()
        block = self._block
        assert block is not None
        _ENTRY.pack_into(block.segment.memory, self._offset + 8, name, layout, place)
        self._sequence += 1
        # The sequence number is stored last: it makes the entry visible to the receiver.
        block.words[self._offset >> 3] = self._sequence
        self._offset += 8 * _ENTRY_WORDS

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


class QueueReader:
    """The receiver's end of a message queue, which returns tensors on `device`.

    `pending` holds messages that have arrived and were not yet taken, by name, each in the order of
    sending.
    """

    def __init__(self, mailbox: Mailbox, source: int, pid: int, device: torch.device) -> None:
        """Prepare to receive.

        Args:
            mailbox: the receiver's.
            source: the sender's rank.
            pid: the sender's process.
            device: where received tensors are put.
        """
        self._mailbox, self._source, self._pid = mailbox, source, pid
        self._device = None if device.type == "cpu" else device
        self.notifier: Notifier = mailbox.notifier(source)
        self.pending: dict[int, deque[tuple[Layout, Slot]]] = {}
        self._segments: dict[int, Segment] = {}
        self._slots: dict[int, Slot] = {}
        self._layouts: dict[int, Layout] = {}
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
            if name & _KIND_BITS < _LAYOUT:
                entry = self._layouts[layout], self._slots.get(place) or self._slot(place)
                queue = self.pending.get(name)
                if queue is None:
                    self.pending[name] = deque((entry,))
                else:
                    queue.append(entry)
            elif name == _LAYOUT:
                self._read_layout(self._slot(place), layout)
            else:
                block.free()
                block = self._block = self._slot(place)
                words, self._offset = block.words, block.start
        return advanced

    def take(self, name: int) -> Payload:
        """Copy out the oldest pending message of a name."""
        queue = self.pending[name]
        layout, slot = queue.popleft()
        if not queue:
            del self.pending[name]
        payload = layout.take(slot, self._device)
        slot.free()
        return payload

    def _read_layout(self, slot: Slot, length: int) -> None:
        """Register the layout whose description of `length` bytes is in a slot."""
        layout = Layout.parse(slot.segment.memory[slot.start : slot.start + length])
        slot.free()
        if layout.number % _LAYOUTS == 0:
            self._layouts.clear()
        self._layouts[layout.number] = layout

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
