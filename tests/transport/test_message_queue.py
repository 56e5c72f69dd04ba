"""The queue of payloads from one process to another, both ends here."""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.shared_memory import queue
from penstock.shared_memory.arena import OutOfSharedMemory
from penstock.shared_memory.mailbox import Mailbox
from penstock.transport import message_queue
from penstock.transport.layout import Layout
from penstock.transport.message_queue import PayloadReader, PayloadWriter
from penstock.transport.payload import Payload


class Ends:
    """The two ends of a queue of payloads from rank 1."""

    def __init__(self) -> None:
        mailbox = Mailbox.make(2)
        self.mailbox, self.writer = (
            mailbox,
            PayloadWriter(Mailbox.open(os.getpid(), mailbox.segment.fd), 1),
        )
        self.reader = PayloadReader(mailbox, 1, os.getpid(), torch.device("cpu"))

    def close(self) -> None:
        """Give all back."""
        self.writer.arena.close()
        self.mailbox.segment.close()


@pytest.fixture
def ends():
    """A queue of payloads; closed when the test is over."""
    both = Ends()
    yield both
    both.close()


def test_nothing_has_come_before_anything_was_sent(ends):
    """Nor does an unused link allocate memory."""
    assert not ends.reader.poll()
    assert ends.writer.arena.nbytes == 0
    assert ends.writer.all_opened()


def test_looking_tells_whether_something_new_has_come(ends):
    """What has come waits under its name."""
    ends.writer.send(16, Payload.of(torch.ones(1)))
    assert not ends.writer.all_opened()
    assert ends.reader.poll()
    assert ends.writer.all_opened()
    assert not ends.reader.poll()
    assert list(ends.reader.pending) == [16]
    assert ends.reader.take(16).value().item() == 1
    assert ends.reader.pending == {}


def test_blocks_of_entries_are_used_again(ends):
    """A stream goes on for days."""
    payload = Payload.of(torch.ones(1))
    for number in range(5000):
        ends.writer.send(16 * number, payload)
        assert ends.reader.poll()
        ends.reader.take(16 * number)
    assert len(ends.writer.arena.segments) == 1
    assert len(ends.reader._slots) < 10


@settings(deadline=None, max_examples=30)
@given(st.lists(st.integers(1, 400), min_size=1, max_size=8))
def test_entries_come_in_order_whatever_lies_between_two_looks(bursts):
    """Ends of blocks fall anywhere reader a burst."""
    ends, number = Ends(), 0
    for burst in bursts:
        for sent in range(number, number + burst):
            ends.writer.send(16, Payload.of(torch.tensor(sent)))
        ends.reader.poll()
        assert [ends.reader.take(16).value().item() for _ in range(burst)] == list(
            range(number, number + burst)
        )
        number += burst
    ends.close()


def test_a_slot_is_freed_after_its_tensors_were_copied_out(ends, monkeypatch):
    """The sender may write the next message into a freed slot at once."""
    real, states = Layout.take, []

    def take(layout, slot, device):
        states.append(slot.words[slot.state])
        return real(layout, slot, device)

    monkeypatch.setattr(Layout, "take", take)
    ends.writer.send(16, Payload.of(torch.ones(1)))
    ends.reader.poll()
    _, slot = ends.reader.pending[16][0]
    assert ends.reader.take(16).value().item() == 1
    assert states == [1]
    assert slot.words[slot.state] == 0


def test_only_an_armed_notifier_makes_a_system_call(ends):
    """A system call for each message would cost as much as the message."""
    calls = []
    ends.writer.notifier._syscall = lambda *words: calls.append(words)
    ends.writer.send(16, Payload.of(torch.ones(1)))
    assert calls == []
    ends.reader.notifier.arm()
    ends.writer.send(16, Payload.of(torch.ones(1)))
    assert len(calls) == 1
    ends.writer.send(16, Payload.of(torch.ones(1)))
    assert len(calls) == 1


def test_a_message_that_cannot_be_entered_gives_its_slot_back(ends, monkeypatch):
    """The receiver never hears of it, so that it would never free it; the error is the sender's."""
    ends.writer.send(16, Payload.of(torch.ones(1)))
    ends.reader.poll()
    ends.reader.take(16)
    places = []

    def fail(name, layout, place):
        places.append(place)
        raise OutOfSharedMemory(1, 2, OSError("none"))

    monkeypatch.setattr(ends.writer, "append", fail)
    for _ in range(8):
        with pytest.raises(OutOfSharedMemory):
            ends.writer.send(16, Payload.of(torch.ones(1)))
    assert len(set(places)) <= 2


def test_both_ends_forget_layouts_at_the_same_one(ends, monkeypatch):
    """A message must not name a layout that the receiver has forgotten, nor should each be
    announced again.
    """
    monkeypatch.setattr(message_queue, "MAX_LAYOUTS", 4)
    monkeypatch.setattr(queue, "MAX_LAYOUTS", 4)
    for number in range(11):
        ends.writer.send(16, Payload.of(torch.ones(number + 1)))
        assert ends.reader.poll()
        assert ends.reader.take(16).tensors[0].numel() == number + 1
        assert len(ends.writer._layouts) == len(ends.reader._layouts) == number % 4 + 1
    count = ends.writer._layout_count
    ends.writer.send(16, Payload.of(torch.ones(11)))
    assert ends.writer._layout_count == count, "a layout that is known is announced again"


def test_a_send_returns_the_bytes_that_the_message_takes(ends):
    """Whole cache lines for each tensor."""
    assert ends.writer.send(16, Payload.of(torch.ones(1))) == 64
    assert ends.writer.send(16, Payload.of([torch.ones(17), torch.ones(1)])) == 192


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_received_tensors_are_on_the_device_of_the_rank(device):
    """And never views of the slot, which the sender writes again."""
    ends = Ends()
    ends.reader = PayloadReader(ends.mailbox, 1, os.getpid(), torch.device(device))
    ends.writer.send(16, Payload.of([torch.ones(3), "constant", torch.ones(2, 2).t()]))
    ends.reader.poll()
    _, slot = ends.reader.pending[16][0]
    first, text, second = ends.reader.take(16).value()
    assert text == "constant"
    assert {first.device.type, second.device.type} == {device}
    if device == "cpu":
        memory = slot.segment.bytes.untyped_storage().data_ptr()
        assert first.untyped_storage().data_ptr() != memory
        assert second.untyped_storage().data_ptr() != memory
    ends.close()
