"""Transport inside one process: by key, within a deadline, and never for ever."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from tests.time_limits import HANG_S

from penstock.schedule.lower import Message
from penstock.schedule.op import Kind
from penstock.transport.in_process import Exchange, MemoryTransport
from penstock.transport.payload import Payload
from penstock.transport.transport import TransportLost, TransportTimeout

FIRST, SECOND, BACK = Message(Kind.F, 0, 0), Message(Kind.F, 0, 1), Message(Kind.B, 1, 0)


def ends(deadline_s=30.0, ranks=2):
    """The ends of all ranks of one exchange."""
    exchange = Exchange()
    return [MemoryTransport(rank, exchange, deadline_s) for rank in range(ranks)]


def payload(number):
    """A payload of one number."""
    return Payload.of(torch.tensor(float(number)))


def test_a_payload_arrives_as_it_was_sent_and_once():
    """Handed over, not copied: inside one process a copy would only cost."""
    sender, receiver = ends(deadline_s=0.0)
    sent = payload(1)
    arrival = receiver.post(0, FIRST, "s")
    sender.send(1, FIRST, sent, "s")
    assert sender.arrives_at_once(1)
    assert arrival.wait() is sent
    assert receiver.shares, "who changes it in place changes the sender's"
    with pytest.raises(TransportTimeout, match=r"^$"):
        receiver.post(0, FIRST, "s").wait()
    sender.drain()


def test_messages_are_told_apart_by_sender_receiver_kind_stage_and_micro_batch():
    """Waits may come in another order than sends, and both directions at once."""
    left, middle, right = ends(ranks=3)
    left.send(1, FIRST, payload(0), "s")
    left.send(1, SECOND, payload(1), "s")
    left.send(2, FIRST, payload(2), "s")
    right.send(1, FIRST, payload(3), "s")
    right.send(1, BACK, payload(4), "s")
    middle.send(0, FIRST, payload(5), "s")
    waits = [
        (middle, 2, BACK, 4),
        (middle, 0, SECOND, 1),
        (left, 1, FIRST, 5),
        (middle, 2, FIRST, 3),
        (right, 0, FIRST, 2),
        (middle, 0, FIRST, 0),
    ]
    for end, peer, message, number in waits:
        assert end.post(peer, message, "s").wait().value().item() == number


def test_who_waits_is_woken_by_the_send():
    """The receiver usually comes first."""
    sender, receiver = ends()
    with ThreadPoolExecutor(1) as pool:
        arrival = pool.submit(receiver.post(0, FIRST, "s").wait)
        sender.send(1, SECOND, payload(8), "s")
        sender.send(1, FIRST, payload(7), "s")
        assert arrival.result().value().item() == 7


def test_each_of_several_waits_is_woken_by_its_own_message():
    """Replicas wait in one exchange: one that is woken for the message of another waits on."""
    sender, receiver = ends(deadline_s=3600.0)
    waiting = receiver.exchange._changed._waiters
    with ThreadPoolExecutor(2) as pool:
        arrivals = {}
        for count, message in enumerate((FIRST, SECOND), 1):
            arrivals[message] = pool.submit(receiver.post(0, message, "s").wait)
            while len(waiting) < count:
                os.sched_yield()
        for number, message in enumerate((SECOND, FIRST)):
            sender.send(1, message, payload(number), "s")
            assert arrivals[message].result(HANG_S).value().item() == number


def test_a_wait_ends_at_the_deadline():
    """A rank that loops for ever must not take the others with it."""
    _, receiver = ends(deadline_s=0.01)
    with pytest.raises(TransportTimeout, match=r"^$"):
        receiver.post(0, FIRST, "s").wait()


def test_closing_lets_all_go_who_wait_or_will_wait_and_says_why():
    """Whatever fails on one rank stops all."""
    sender, receiver = ends()
    barrier = threading.Barrier(3)

    def waits(message):
        barrier.wait()
        receiver.post(0, message, "s").wait()

    with ThreadPoolExecutor(2) as pool:
        futures = [pool.submit(waits, message) for message in (FIRST, SECOND)]
        barrier.wait()
        sender.exchange.close("rank 0 failed")
        for future in futures:
            with pytest.raises(TransportLost, match=r"^rank 0 failed$"):
                future.result()
    with pytest.raises(TransportLost, match=r"^rank 0 failed$"):
        receiver.post(0, BACK, "s").wait()


def test_what_came_before_the_close_can_still_be_taken():
    """A rank that has all it needs finishes its op and fails, if at all, at the next."""
    sender, receiver = ends()
    sender.send(1, FIRST, payload(3), "s")
    sender.exchange.close("rank 0 failed")
    assert receiver.post(0, FIRST, "s").wait().value().item() == 3


def test_reopening_forgets_the_failure_and_what_was_on_its_way():
    """After a failed step another may be tried, and must not receive the failed one's activations."""
    sender, receiver = ends(deadline_s=0.01)
    sender.send(1, FIRST, payload(3), "s")
    sender.exchange.close("rank 0 failed")
    sender.exchange.reopen()
    with pytest.raises(TransportTimeout, match=r"^$"):
        receiver.post(0, FIRST, "s").wait()
    sender.send(1, FIRST, payload(4), "s")
    assert receiver.post(0, FIRST, "s").wait().value().item() == 4


def test_the_same_message_twice_arrives_twice_in_order():
    """One of two copies may be an update ahead: its next gradients must not take the place of those
    that was not taken yet.
    """
    exchange, message = Exchange(), Message(Kind.U, 0, 0)
    for number in (1.0, 2.0):
        exchange.put((0, 1, message), Payload.of([torch.tensor(number)], (False,)))
    assert [exchange.take((0, 1, message), 1.0).tensors[0].item() for _ in range(2)] == [1.0, 2.0]
    with pytest.raises(TransportTimeout):
        exchange.take((0, 1, message), 0.01)
