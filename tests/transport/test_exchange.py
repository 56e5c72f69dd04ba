"""Exchanges of pieces: receives first, one send after the other, and errors where they are awaited.

That real processes get the pieces of each other: tests/stage/gradients/test_replicas_in_processes.py.
"""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from penstock.transport.exchange import Exchange, Exchanger

SOON = timedelta(seconds=60)


class GatedWork:
    """A transfer that ends when its gate opens; notes its name in a log."""

    def __init__(self, name, log, gate=None, error=None):
        self.name, self.log, self.gate, self.error = name, log, gate, error

    def is_completed(self):
        """Return whether the gate is open."""
        return self.gate is None or self.gate.is_set()

    def wait(self, timeout):
        """Wait for the gate; raise the error, if there is one."""
        if self.gate is not None:
            assert self.gate.wait(timeout.total_seconds())
        self.log.append(f"{self.name} ended")
        if self.error is not None:
            raise self.error
        return True


def sends(log, names, gate=None, error=None):
    """What starts sends of these names."""

    def start(name):
        log.append(f"{name} started")
        return GatedWork(name, log, gate, error)

    return [lambda name=name: start(name) for name in names]


def test_a_send_starts_when_the_one_before_it_has_left_and_receives_are_awaited_last():
    """All at once would share the card, and reach one receiver together."""
    log, gate = [], threading.Event()
    exchange = Exchange([GatedWork("r1", log, gate)], sends(log, ["s1", "s2"], gate), None, 60.0)
    assert not exchange.is_completed()
    gate.set()
    assert exchange.wait(SOON)
    assert exchange.is_completed()
    assert log == ["s1 started", "s1 ended", "s2 started", "s2 ended", "r1 ended"]


def test_the_sends_of_an_exchange_follow_those_of_the_previous_one_but_not_its_receives():
    """A peer that is late with its piece keeps nobody else from sending."""
    log, late = [], threading.Event()
    first = Exchange([GatedWork("r1", log, late)], sends(log, ["s1"]), None, 60.0)
    second = Exchange([], sends(log, ["s2"]), first, 60.0)
    assert second.wait(SOON)
    assert not first.is_completed()
    late.set()
    assert first.wait(SOON)
    assert log == ["s1 started", "s1 ended", "s2 started", "s2 ended", "r1 ended"]


def test_an_error_is_raised_by_every_wait_and_lets_the_next_exchange_go_on():
    """The rank that waits reports it; a thread that dies silently would seem to have succeeded."""
    log = []
    failed = Exchange([], sends(log, ["s1"], error=RuntimeError("closed")), None, 60.0)
    after = Exchange([], sends(log, ["s2"]), failed, 60.0)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="closed"):
            failed.wait(SOON)
    assert failed.is_completed()
    assert after.wait(SOON)


def test_a_wait_ends_at_its_limit():
    """The deadline of a rank holds here too."""
    gate = threading.Event()
    exchange = Exchange([GatedWork("r1", [], gate)], [], None, 60.0)
    with pytest.raises(RuntimeError, match=r"an exchange took longer than 0.001 s"):
        exchange.wait(timedelta(seconds=0.001))
    gate.set()
    assert exchange.wait(SOON)


@pytest.mark.parametrize("place", [0, 1, 2])
def test_every_rank_sends_to_the_next_ones_in_turn_and_keeps_its_own_piece(monkeypatch, place):
    """No two ranks send to the same one at a time; tags tell the exchanges of a group apart."""
    log, group = [], object()
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: [4, 6, 8])
    monkeypatch.setattr(dist, "get_rank", lambda group: place)

    def receive(piece, source, its_group, tag):
        assert its_group is group
        log.append(("receive", source, tag))
        piece.fill_(source)
        return GatedWork("r", [])

    def send(piece, target, its_group, tag):
        assert its_group is group
        log.append(("send", target, tag, piece.item()))
        return GatedWork("s", [])

    monkeypatch.setattr(dist, "irecv", receive)
    monkeypatch.setattr(dist, "isend", send)
    exchanger = Exchanger(group, 60.0)
    processes = [4, 6, 8]
    for tag in range(2):
        log.clear()
        received = torch.zeros(3, dtype=torch.uint8)
        sent = torch.tensor([10, 11, 12], dtype=torch.uint8)
        assert exchanger.start(received.chunk(3), sent.chunk(3)).wait(SOON)
        before, after = (place - 1) % 3, (place + 1) % 3
        assert log == [
            ("receive", processes[before], tag),
            ("receive", processes[after], tag),
            ("send", processes[after], tag, 10 + after),
            ("send", processes[before], tag, 10 + before),
        ]
        expected = list(processes)
        expected[place] = 10 + place
        assert received.tolist() == expected


def test_transfers_may_take_twice_as_long_as_a_rank_waits():
    """The rank reports a timeout first; its error says who is late."""
    limits = []

    class Limited(GatedWork):
        """A transfer that notes its limit."""

        def wait(self, timeout):
            """Note the limit."""
            limits.append(timeout)
            return True

    receive, send = Limited("r", []), Limited("s", [])
    assert Exchange([receive], [lambda: send], None, 7.5).wait(SOON)
    assert limits == [timedelta(seconds=15)] * 2


def test_an_error_of_a_receive_is_raised_as_well():
    """All pieces must have arrived."""
    log = []
    failed = Exchange([GatedWork("r1", log, error=RuntimeError("lost"))], [], None, 60.0)
    with pytest.raises(RuntimeError, match="lost"):
        failed.wait(SOON)


def test_no_send_starts_before_those_of_the_previous_exchange_have_left():
    """Two exchanges at once would share the card; they come in one order on all ranks."""
    log, gate = [], threading.Event()
    first = Exchange([], sends(log, ["s1"], gate), None, 60.0)
    second = Exchange([], sends(log, ["s2"]), first, 60.0)
    third = Exchange([], sends(log, ["s3"]), second, 60.0)
    with pytest.raises(RuntimeError, match="longer"):
        third.wait(timedelta(milliseconds=20))
    assert log == ["s1 started"]
    gate.set()
    assert third.wait(SOON)
    assert log == [f"s{number} {end}" for number in (1, 2, 3) for end in ("started", "ended")]


def test_the_exchanges_of_a_group_send_one_after_the_other(monkeypatch):
    """The second must not begin to send while the first still does."""
    log, begun, gate = [], threading.Event(), threading.Event()
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: [0, 1])
    monkeypatch.setattr(dist, "get_rank", lambda group: 0)
    monkeypatch.setattr(dist, "irecv", lambda *_: GatedWork("r", []))

    def send(piece, target, group, tag):
        log.append(f"send {tag} started")
        begun.set()
        return GatedWork(f"send {tag}", log, gate)

    monkeypatch.setattr(dist, "isend", send)
    exchanger = Exchanger(object(), 60.0)
    pieces = torch.zeros(2).chunk(2)
    first, second = (exchanger.start(pieces, pieces) for _ in range(2))
    assert begun.wait(SOON.total_seconds())
    with pytest.raises(RuntimeError, match="longer"):
        second.wait(timedelta(milliseconds=20))
    assert log == ["send 0 started"]
    gate.set()
    assert first.wait(SOON)
    assert second.wait(SOON)
    assert log == [f"send {tag} {end}" for tag in (0, 1) for end in ("started", "ended")]


@pytest.mark.parametrize("fails", ["send", "receive"])
def test_a_thread_that_fails_in_any_way_has_not_exchanged_anything(monkeypatch, fails):
    """Its pieces would be taken for those of the others. The next exchange goes on."""
    monkeypatch.setattr(threading, "excepthook", lambda details: None)
    log, error = [], ZeroDivisionError("a defect")
    receives = [GatedWork("r1", log, error=error)] if fails == "receive" else []
    failing_sends = sends(log, ["s1"], error=error) if fails == "send" else []
    failed = Exchange(receives, failing_sends, None, 60.0)
    after = Exchange([], sends(log, ["s2"]), failed, 60.0)
    with pytest.raises(RuntimeError, match="the thread of an exchange has failed"):
        failed.wait(SOON)
    assert failed.is_completed()
    assert after.wait(SOON)
