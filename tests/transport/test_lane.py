"""The chain of entries from one process to another, both ends here."""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.transport.doorbell import Door
from penstock.transport.lane import Incoming, Outgoing
from penstock.transport.payload import Payload


class Ends:
    """The two ends of a lane from rank 1."""

    def __init__(self) -> None:
        door = Door.make(2)
        self.door, self.out = door, Outgoing(Door.open(os.getpid(), door.segment.fd), 1)
        self.into = Incoming(door, 1, os.getpid(), torch.device("cpu"))

    def close(self) -> None:
        """Give all back."""
        self.out.arena.close()
        self.door.segment.close()


@pytest.fixture
def ends():
    """A lane; closed when the test is over."""
    both = Ends()
    yield both
    both.close()


def test_nothing_has_come_before_anything_was_sent(ends):
    """Nor is any memory taken for a link that nobody uses."""
    assert not ends.into.poll()
    assert ends.out.arena.nbytes == 0
    assert ends.out.opened()


def test_looking_tells_whether_something_new_has_come(ends):
    """What has come waits under its name."""
    ends.out.send(16, Payload.of(torch.ones(1)))
    assert not ends.out.opened()
    assert ends.into.poll()
    assert ends.out.opened()
    assert not ends.into.poll()
    assert list(ends.into.came) == [16]
    assert ends.into.take(16).value().item() == 1
    assert ends.into.came == {}


def test_blocks_of_entries_are_used_again(ends):
    """A stream goes on for days."""
    payload = Payload.of(torch.ones(1))
    for number in range(5000):
        ends.out.send(16 * number, payload)
        assert ends.into.poll()
        ends.into.take(16 * number)
    assert len(ends.out.arena.segments) == 1
    assert len(ends.into._slots) < 10


@settings(deadline=None, max_examples=30)
@given(st.lists(st.integers(1, 400), min_size=1, max_size=8))
def test_entries_come_in_order_whatever_lies_between_two_looks(bursts):
    """Ends of blocks fall anywhere into a burst."""
    ends, number = Ends(), 0
    for burst in bursts:
        for sent in range(number, number + burst):
            ends.out.send(16, Payload.of(torch.tensor(sent)))
        ends.into.poll()
        assert [ends.into.take(16).value().item() for _ in range(burst)] == list(
            range(number, number + burst)
        )
        number += burst
    ends.close()


def test_the_bell_rings_only_for_who_is_about_to_sleep(ends):
    """A system call for each message would cost as much as the message."""
    calls = []
    ends.out._bell._call = lambda *words: calls.append(words)
    ends.out.send(16, Payload.of(torch.ones(1)))
    assert calls == []
    ends.into.bell.set()
    ends.out.send(16, Payload.of(torch.ones(1)))
    assert len(calls) == 1
    ends.out.send(16, Payload.of(torch.ones(1)))
    assert len(calls) == 1
