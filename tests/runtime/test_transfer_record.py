"""When a rank waited for messages and sent them."""

from __future__ import annotations

import time

import pytest

from penstock.ranks.clock import EventClock, HostClock
from penstock.runtime.transfer_record import Sent, TransferRecord
from penstock.schedule.lower import Message
from penstock.schedule.op import Kind

MESSAGES = [Message(Kind.F, 0, number) for number in range(5)]


def test_a_send_has_its_receiver_size_and_time_of_arrival():
    """The time only if the message is in the receiver's memory when it has been handed over."""
    record = TransferRecord(HostClock(), lambda peer: peer == 1)
    before = time.monotonic()
    record.end_send(MESSAGES[0], 1, 80)
    record.end_send(MESSAGES[1], 2, 90)
    peer, size, arrived_s = record.sent(MESSAGES[0])
    assert (peer, size) == (1, 80)
    assert before <= arrived_s <= time.monotonic()
    assert record.sent(MESSAGES[1]) == Sent(2, 90, None)
    assert record.sent(MESSAGES[2]) is None
    assert record.sent(None) is None


def test_a_wait_has_its_start():
    """A message that was not waited for has none."""
    record = TransferRecord(HostClock(), bool)
    record.begin_wait(MESSAGES[0], 12.5)
    assert record.wait_start(MESSAGES[0]) == 12.5
    assert record.wait_start(MESSAGES[1]) is None
    assert record.wait_start(None) is None


def test_where_a_device_runs_behind_the_host_its_waits_say_nothing():
    """Nor when a message has arrived; sizes are known all the same."""
    record = TransferRecord(EventClock(object), lambda peer: True)
    record.begin_wait(MESSAGES[0], 12.5)
    record.end_send(MESSAGES[1], 1, 80)
    assert record.wait_start(MESSAGES[0]) is None
    assert record.sent(MESSAGES[1]) == Sent(1, 80, None)


@pytest.mark.parametrize("count", [0, 2, 5, 9])
def test_the_last_records_of_a_stream_stay(count):
    """Of waits and of sends, as many as asked for."""
    record = TransferRecord(HostClock(), bool)
    for message in MESSAGES:
        record.begin_wait(message, 1.0)
        record.end_send(message, 1, 8)
    record.keep(count)
    remaining = MESSAGES[max(0, 5 - count) :]
    assert [message for message in MESSAGES if record.wait_start(message) is not None] == remaining
    assert [message for message in MESSAGES if record.sent(message) is not None] == remaining
    record.clear()
    assert record.wait_start(MESSAGES[-1]) is None
    assert record.sent(MESSAGES[-1]) is None
