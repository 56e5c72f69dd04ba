"""The list of entries from one process to another: both ends here, contents are bytes."""

from __future__ import annotations

import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.shared_memory.arena import OutOfSharedMemory
from penstock.shared_memory.mailbox import Mailbox
from penstock.shared_memory.queue import KIND_BITS, MAX_LAYOUTS, QueueReader, QueueWriter
from penstock.shared_memory.segment import Segment


class Ends:
    """The two ends of a queue from rank 1, with layouts that are (number, description)."""

    def __init__(self) -> None:
        self.mailbox = Mailbox.make(2)
        self.writer = QueueWriter(Mailbox.open(os.getpid(), self.mailbox.segment.fd), 1)
        self.reader: QueueReader[tuple[int, bytes]] = QueueReader(
            self.mailbox, 1, os.getpid(), lambda number, text: (number, text)
        )

    def send(self, name: int, content: bytes, layout: int = 0) -> None:
        """Send a message of these bytes."""
        slot = self.writer.arena.take(self.writer.arena.pool(len(content)))
        slot.segment.memory[slot.start : slot.start + len(content)] = content
        self.writer.append(name, layout, slot.place)

    def take(self, name: int, length: int) -> tuple[tuple[int, bytes], bytes]:
        """Layout and contents of the oldest message of a name."""
        layout, slot = self.reader.pending[name].popleft()
        content = slot.segment.memory[slot.start : slot.start + length]
        slot.free()
        return layout, content

    def close(self) -> None:
        """Free the memory."""
        self.writer.arena.close()
        self.mailbox.segment.close()


@pytest.fixture
def ends():
    """A queue; closed when the test is over."""
    both = Ends()
    yield both
    both.close()


def test_an_unused_queue_holds_nothing_and_takes_no_memory(ends):
    """Every pair of ranks has two queues, and most pairs never exchange a message."""
    assert not ends.reader.poll()
    assert ends.writer.arena.nbytes == 0
    assert ends.writer.all_opened()


def test_a_message_arrives_with_the_layout_that_was_announced(ends):
    """Layouts are numbered in the order of their announcement, on both sides alike."""
    assert [ends.writer.announce_layout(text) for text in (b"first", b"second")] == [0, 1]
    ends.send(16, b"content", layout=1)
    assert not ends.writer.all_opened()
    assert ends.reader.poll()
    assert ends.writer.all_opened()
    assert not ends.reader.poll()
    assert ends.take(16, 7) == ((1, b"second"), b"content")


def test_an_entry_without_its_sequence_number_is_not_read(ends):
    """The number is stored last: until then the rest of the entry may be incomplete."""
    ends.writer.announce_layout(b"")
    ends.send(16, b"a")
    block, offset = ends.writer._block, ends.writer._offset - 32
    sequence = block.words[offset >> 3]
    block.words[offset >> 3] = 0
    ends.reader.poll()
    assert ends.reader.pending == {}
    block.words[offset >> 3] = sequence
    assert ends.reader.poll()
    assert list(ends.reader.pending) == [16]


class WatchedWords:
    """Words of a segment that remember what an entry held when its sequence number was stored."""

    def __init__(self, words) -> None:
        self.words = words
        self.entries = []

    def __getitem__(self, index):
        """Read a word."""
        return self.words[index]

    def __setitem__(self, index, value):
        """Store a word; it is the sequence number of the entry whose other words follow it."""
        self.entries.append(tuple(self.words[index + 1 : index + 4]))
        self.words[index] = value


def test_the_sequence_number_is_stored_after_the_rest_of_its_entry(ends):
    """The receiver takes the rest for complete as soon as it sees the number."""
    ends.writer.announce_layout(b"")
    block = ends.writer._block
    block.words = WatchedWords(block.words)
    slot = ends.writer.arena.take(ends.writer.arena.pool(8))
    for number in range(300):  # the last entry of a block links to the next one
        ends.writer.append(number << KIND_BITS, 0, slot.place)
    entries = block.words.entries
    assert entries[:3] == [(number << KIND_BITS, 0, slot.place) for number in range(3)]
    assert entries[-1][2] == ends.writer._block.place != block.place


def test_a_sleeping_receiver_is_woken_by_notify_and_not_by_append(ends):
    """Whoever sends several messages wakes the receiver once."""
    calls = []
    ends.writer.notifier._syscall = lambda *words: calls.append(words)
    ends.reader.notifier.arm()
    ends.writer.announce_layout(b"")
    ends.send(16, b"a")
    assert calls == []
    ends.writer.notifier.notify()
    assert len(calls) == 1


def test_both_sides_forget_layouts_at_the_same_announcement(ends):
    """Otherwise a program whose shapes differ in every step would fill the memory."""
    for number in range(MAX_LAYOUTS):
        ends.writer.announce_layout(str(number).encode())
    ends.reader.poll()
    assert len(ends.reader._layouts) == MAX_LAYOUTS
    ends.writer.announce_layout(b"new")
    ends.reader.poll()
    assert ends.reader._layouts == {MAX_LAYOUTS: (MAX_LAYOUTS, b"new")}


def test_blocks_of_entries_are_reused(ends):
    """A stream goes on for days."""
    ends.writer.announce_layout(b"")
    for number in range(5000):
        ends.send(number << KIND_BITS, b"a")
        assert ends.reader.poll()
        ends.take(number << KIND_BITS, 1)
    assert len(ends.writer.arena.segments) == 1
    assert len(ends.reader._slots) < 10


@settings(deadline=None, max_examples=30)
@given(st.lists(st.integers(1, 400), min_size=1, max_size=8))
def test_messages_arrive_in_order_for_any_number_between_two_polls(bursts):
    """The end of a block falls anywhere in a burst."""
    ends, number = Ends(), 0
    ends.writer.announce_layout(b"")
    for burst in bursts:
        contents = [count.to_bytes(8, "little") for count in range(number, number + burst)]
        for content in contents:
            ends.send(16, content)
        ends.reader.poll()
        assert [ends.take(16, 8)[1] for _ in range(burst)] == contents
        number += burst
    ends.close()


def test_descriptions_of_layouts_free_their_slots(ends):
    """A program whose shapes differ in every step announces layouts for ever."""
    for number in range(300):
        ends.writer.announce_layout(b"x" * (number % 5))
        ends.reader.poll()
    assert len(ends.writer.arena.segments) == 1
    assert len(ends.writer.arena.pool(4).in_use) + len(ends.writer.arena.pool(4).free) <= 2


@pytest.mark.parametrize("description", [b"", b"one", bytes(range(256)), b"long" * 1000])
def test_a_description_arrives_with_exactly_its_bytes(ends, description):
    """It is JSON, which a byte more or less would spoil."""
    ends.writer.announce_layout(description)
    ends.send(16, b"a")
    ends.reader.poll()
    assert ends.take(16, 1) == ((0, description), b"a")


def test_messages_of_several_names_wait_separately_each_in_order(ends):
    """A name is any number; only its lowest bits are limited."""
    ends.writer.announce_layout(b"")
    names = [0, 1, 13, 16, 29, 2**40 << 4 | 13]
    for turn in range(3):
        for name in names:
            ends.send(name, bytes([turn, name % 251]))
    ends.reader.poll()
    assert list(ends.reader.pending) == names
    for name in reversed(names):
        contents = [ends.take(name, 2)[1] for _ in range(3)]
        assert contents == [bytes([turn, name % 251]) for turn in range(3)]


def test_a_message_that_was_read_late_keeps_the_layout_that_it_was_sent_with(ends):
    """Both sides may have forgotten that layout since."""
    ends.writer.announce_layout(b"old")
    ends.send(16, b"a", layout=0)
    ends.reader.poll()
    for number in range(MAX_LAYOUTS):
        assert ends.writer.announce_layout(b"new") == number + 1
    ends.reader.poll()
    assert ends.take(16, 1) == ((0, b"old"), b"a")


def test_a_description_without_memory_takes_no_number(ends, monkeypatch):
    """The receiver counts the announcements that arrive; the next one has the number."""

    def fail(*_):
        raise OutOfSharedMemory(1, 2, OSError("none"))

    with monkeypatch.context() as patch:
        patch.setattr(ends.writer, "append", fail)
        for _ in range(200):
            with pytest.raises(OutOfSharedMemory):
                ends.writer.announce_layout(b"lost")
    assert ends.writer.announce_layout(b"first") == 0
    assert len(ends.writer.arena.segments) <= 2
    ends.send(16, b"a")
    ends.reader.poll()
    assert ends.take(16, 1)[0] == (0, b"first")


@pytest.mark.parametrize("length", [8192, 4096])
def test_blocks_and_messages_never_lie_in_the_same_memory(ends, length):
    """The numbers of a message could be those of an entry that the receiver waits for."""
    blocks, messages = set(), set()
    ends.writer.announce_layout(b"")
    for number in range(600):
        ends.send(number << KIND_BITS, bytes(length))
        ends.reader.poll()
        messages.add(ends.reader.pending[number << KIND_BITS][0][1].place)
        blocks.add(ends.writer._block.place)
        ends.take(number << KIND_BITS, 0)
    assert len(blocks) > 1
    assert not blocks & messages


def test_the_reader_opens_each_segment_once(ends, monkeypatch):
    """To map memory again for every slot would take as long as a message."""
    opened, open_segment = [], Segment.open

    def open_and_note(pid, fd):
        opened.append(fd)
        return open_segment(pid, fd)

    monkeypatch.setattr(Segment, "open", open_and_note)
    ends.writer.announce_layout(b"")
    for number in range(200):
        ends.send(number << KIND_BITS, bytes(1000))
        ends.reader.poll()
    assert sorted(opened) == sorted(segment.fd for segment in ends.writer.arena.segments)
    assert len(opened) > 1


def test_queues_to_one_mailbox_do_not_mix(ends):
    """Each sender has a line and memory of its own."""
    mailbox = Mailbox.open(os.getpid(), ends.mailbox.segment.fd)
    other = QueueWriter(mailbox, 0)
    other_reader = QueueReader(ends.mailbox, 0, os.getpid(), lambda number, text: text)
    ends.writer.announce_layout(b"one")
    assert not other_reader.poll()
    other.announce_layout(b"two")
    slot = other.arena.take(other.arena.pool(1))
    other.append(16, 0, slot.place)
    assert other_reader.poll()
    ends.reader.poll()
    assert ends.reader.pending == {}
    assert other_reader.pending[16][0][0] == b"two"
    other.arena.close()
