"""One direction between two processes of a host: a chain of small entries, each of which names a
message and where it lies.

    first ──▶ block of entries ── last entry ──▶ next block ──▶ …        blocks and messages are
                                                                         slots of the sender's arena
                [sequence | name | layout | place]

Rules: the sender alone writes entries and the receiver alone reads them; the sequence number is
written last, and x86 shows stores to others in their order, so an entry that has the expected
number is whole. Numbers never come again, so a block that is used again needs no cleaning; but it
must never have held a message. The chain has no end: sending never waits.
"""

from __future__ import annotations

import struct
from collections import deque

import torch

from penstock.transport.arena import Arena, Segment, Slot, split_place
from penstock.transport.doorbell import Bell, Door
from penstock.transport.layout import Layout, key_of, told
from penstock.transport.payload import Payload

_ENTRY_WORDS, _ENTRIES = 4, 256
_BLOCK_BYTES = 8 * _ENTRY_WORDS * _ENTRIES
_ENTRY = struct.Struct("QQQ")  # after the sequence number: name, layout, place

#: Names below are of messages, see `same_host`; these two are nobody's: a new layout, and where the
#: chain goes on.
_LAYOUT, _NEXT = 14, 15
_KIND_BITS = 15

#: How many layouts are known at a time: when it is full, both sides forget all.
_LAYOUTS = 1024


class Outgoing:
    """The sender's end."""

    def __init__(self, door: Door, own_rank: int) -> None:
        self._door, self._rank = door, own_rank
        self._bell: Bell = door.bell(own_rank)
        self.arena = Arena()
        self._blocks = self.arena.kept_pool(_BLOCK_BYTES)
        self._layouts: dict[tuple[object, ...], Layout] = {}
        self._number = 0
        self._sequence = 0
        self._block: Slot | None = None
        self._at = self._end = 0

    def send(self, name: int, payload: Payload) -> None:
        """Copy the payload's tensors into a slot, and say so.

        Raises:
            RunError: there is no memory for one more message in flight.
        """
        layout = self._layouts.get(key_of(payload))
        if layout is None:
            layout = self._tell(payload)
        assert layout.pool is not None
        slot = self.arena.take(layout.pool)
        try:
            layout.put(slot, payload.leaves if layout.bare else payload.tensors)
            self._enter(name, layout.number, slot.place)
        except BaseException:
            slot.free()
            raise
        self._bell.ring()

    def opened(self) -> bool:
        """Whether the receiver has opened all the memory: until it has, the sender's process must
        live.
        """
        return all(segment.opened for segment in self.arena.segments)

    def _tell(self, payload: Payload) -> Layout:
        """A new layout, told to the receiver."""
        text = told(self._number, payload)
        slot = self.arena.take(self.arena.pool(len(text)))
        try:
            slot.segment.memory[slot.start : slot.start + len(text)] = text
            self._enter(_LAYOUT, len(text), slot.place)
        except BaseException:
            slot.free()
            raise
        if self._number % _LAYOUTS == 0:
            self._layouts.clear()
        self._number += 1
        layout = self._layouts[key_of(payload)] = Layout.parse(text)
        layout.pool = self.arena.pool(layout.nbytes)
        return layout

    def _enter(self, name: int, layout: int, place: int) -> None:
        if self._at == self._end:
            self._lengthen()
        block = self._block
        assert block is not None
        _ENTRY.pack_into(block.segment.memory, self._at + 8, name, layout, place)
        self._sequence += 1
        block.words[self._at >> 3] = self._sequence
        self._at += 8 * _ENTRY_WORDS

    def _lengthen(self) -> None:
        """One more block. The last entry of a block is kept for where the next one is."""
        last, at = self._block, self._at
        self._block = block = self.arena.take(self._blocks)
        self._at, self._end = block.start, block.start + _BLOCK_BYTES - 8 * _ENTRY_WORDS
        if last is None:
            self._door.begin(self._rank, block.place)
            return
        _ENTRY.pack_into(last.segment.memory, at + 8, _NEXT, 0, block.place)
        self._sequence += 1
        last.words[at >> 3] = self._sequence


class Incoming:
    """The receiver's end, which gives tensors out on `device`.

    `came` holds what has come and was not yet asked for, by name, each in the order of sending.
    """

    def __init__(self, door: Door, source: int, pid: int, device: torch.device) -> None:
        self._door, self._source, self._pid = door, source, pid
        self._device = None if device.type == "cpu" else device
        self.bell: Bell = door.bell(source)
        self.came: dict[int, deque[tuple[Layout, Slot]]] = {}
        self._segments: dict[int, Segment] = {}
        self._slots: dict[int, Slot] = {}
        self._layouts: dict[int, Layout] = {}
        self._block: Slot | None = None
        self._at = 0
        self._sequence = 1

    def poll(self) -> bool:
        """Take in all that is there. Returns whether there was something.

        Raises:
            OSError: the sender is gone, and what it has sent with it.
        """
        block = self._block
        if block is None:
            first = self._door.first(self._source)
            if not first:
                return False
            block = self._block = self._slot(first)
            self._at = block.start
        words, found = block.words, False
        while words[self._at >> 3] == self._sequence:
            found = True
            name, layout, place = _ENTRY.unpack_from(block.segment.memory, self._at + 8)
            self._sequence += 1
            self._at += 8 * _ENTRY_WORDS
            if name & _KIND_BITS < _LAYOUT:
                entry = self._layouts[layout], self._slots.get(place) or self._slot(place)
                queue = self.came.get(name)
                if queue is None:
                    self.came[name] = deque((entry,))
                else:
                    queue.append(entry)
            elif name == _LAYOUT:
                self._learn(self._slot(place), layout)
            else:
                block.free()
                block = self._block = self._slot(place)
                words, self._at = block.words, block.start
        return found

    def take(self, name: int) -> Payload:
        """The first message of that name, which has come, copied out."""
        queue = self.came[name]
        layout, slot = queue.popleft()
        if not queue:
            del self.came[name]
        payload = layout.take(slot, self._device)
        slot.free()
        return payload

    def _learn(self, slot: Slot, length: int) -> None:
        layout = Layout.parse(slot.segment.memory[slot.start : slot.start + length])
        slot.free()
        if layout.number % _LAYOUTS == 0:
            self._layouts.clear()
        self._layouts[layout.number] = layout

    def _slot(self, place: int) -> Slot:
        """The slot at a place; its segment is opened when the first is asked for."""
        if place not in self._slots:
            fd, offset = split_place(place)
            segment = self._segments.get(fd)
            if segment is None:
                segment = self._segments[fd] = Segment.open(self._pid, fd)
                segment.words[0] = 1
            self._slots[place] = Slot(segment, offset, place)
        return self._slots[place]
