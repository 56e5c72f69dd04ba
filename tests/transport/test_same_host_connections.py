"""How ends of the same-host transport connect, wait, stop and close; most of it in one process."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import json
import logging
import os
import signal
import threading
from types import SimpleNamespace

import pytest
import torch
from tests.transport.same_host_pair import backward, echo, forward, joined, passed
from torch.distributed import HashStore

from penstock.shared_memory.segment import Segment
from penstock.transport import same_host
from penstock.transport.payload import Payload
from penstock.transport.same_host import SameHostTransport
from penstock.transport.transport import TransportLost, TransportTimeout


@pytest.mark.parametrize("stopped", [0, 1, 2])
def test_a_wait_ends_when_any_rank_stops_the_run(monkeypatch, stopped):
    """The receiver, from another thread; the sender; or a third rank that the sender waits for."""
    monkeypatch.setattr(same_host, "_CHECK_EVERY_S", 3600.0)
    ends = joined(3)
    errors = []

    def wait():
        try:
            ends[0].post(1, forward(0), "").wait()
        except TransportLost as error:
            errors.append(str(error))

    thread = threading.Thread(target=wait)
    thread.start()
    while not ends[0]._mailbox._words[16]:  # its notifier for rank 1
        os.sched_yield()
    ends[stopped].abort()
    thread.join()
    assert errors == ["the run was stopped"]


def test_a_run_that_was_stopped_stays_so(ends):
    """Its programs have been left in the middle: nothing that is under way can be told from what
    would come.
    """
    ends[0].send(1, forward(0), Payload.of(torch.ones(1)), "")
    ends[0].abort()
    for _ in range(2):
        with pytest.raises(TransportLost, match="the run was stopped"):
            ends[0].send(1, forward(1), Payload.of(torch.ones(1)), "")
        with pytest.raises(TransportLost, match="the run was stopped"):
            ends[1].post(0, forward(1), "").wait()
    with pytest.raises(TransportLost, match="the run was stopped"):
        ends[1].post(0, forward(0), "").wait()
    with pytest.raises(TransportLost, match="the run was stopped"):
        ends[1].send(0, backward(0), Payload.of(torch.ones(1)), "")


@pytest.mark.parametrize("deadline_s", [0.0, 0.001, 0.12])
def test_what_does_not_come_in_time_is_said(deadline_s):
    """The message says who was waited for and for how long; another message that came meanwhile is
    kept.
    """
    ends = joined(deadline_s=deadline_s)
    ends[0].send(1, forward(1), Payload.of(torch.ones(1)), "")
    with pytest.raises(
        TransportTimeout, match=rf"rank 0 \(process {os.getpid()}\) for {deadline_s:g} s"
    ):
        ends[1].post(0, forward(0), "").wait()
    assert ends[1].post(0, forward(1), "").wait().value().item() == 1


def test_a_wait_is_over_exactly_at_the_deadline(ends, monkeypatch):
    """The user has set how long a rank waits for another."""
    clock = SimpleNamespace(now_s=159.9)
    clock.monotonic = lambda: clock.now_s
    monkeypatch.setattr(same_host, "time", clock)
    ends[1]._check_alive(0, 100.0)
    clock.now_s = 160.0
    with pytest.raises(TransportTimeout, match="for 60 s"):
        ends[1]._check_alive(0, 100.0)
    monkeypatch.undo()


def test_who_closes_waits_until_what_he_has_sent_can_outlive_him(ends, monkeypatch):
    """A rank may end right after its last message, which lies in memory that its receiver has not
    opened yet.
    """
    monkeypatch.setattr(same_host, "_LINGER_S", 3600.0)
    ends[0].send(1, forward(0), Payload.of(torch.full((2,), 5.0)), "")
    thread = threading.Thread(target=ends[0].close)
    thread.start()
    assert ends[1].post(0, forward(0), "").wait().value().tolist() == [5.0, 5.0]
    thread.join()


def test_what_was_opened_outlives_its_sender(ends):
    """Then `close` does not wait."""
    passed(ends, torch.ones(2))
    ends[0].send(1, forward(0), Payload.of(torch.full((2,), 5.0)), "")
    ends[0].drain()
    ends[0].close()
    assert ends[1].post(0, forward(0), "").wait().value().tolist() == [5.0, 5.0]


@pytest.mark.parametrize(
    "why", ["it has left", "it closes too", "the run was stopped", "it was stopped there"]
)
def test_who_closes_does_not_wait_for_a_peer_that_will_never_look(ends, monkeypatch, why):
    """It would be for an hour."""
    monkeypatch.setattr(same_host, "_LINGER_S", 3600.0)
    ends[0].send(1, forward(0), Payload.of(torch.ones(2)), "")
    thread = threading.Thread(target=ends[1].close)
    if why == "it has left":
        ends[1].close()
    elif why == "it closes too":
        ends[1].send(0, backward(0), Payload.of(torch.ones(2)), "")
        thread.start()
    else:
        ends[0 if why == "the run was stopped" else 1].abort()
    ends[0].close()
    if why == "it closes too":
        thread.join()


def test_what_was_not_opened_in_time_is_lost_with_its_sender(ends, monkeypatch):
    """Said as such, and not as an error of the file system."""
    monkeypatch.setattr(same_host, "_LINGER_S", 0.01)
    ends[0].send(1, forward(0), Payload.of(torch.ones(2)), "")
    ends[0].close()
    with pytest.raises(TransportLost, match=r"cannot open the memory of rank 0"):
        ends[1].post(0, forward(0), "").wait()


def test_an_unwilling_rank_is_not_reachable():
    """Both sides must come to the same answer, or one would send where the other does not look."""
    ends = joined(3, unwilling=(1,))
    assert [end.reachable for end in ends] == [{2}, set(), {0}]


def test_a_rank_whose_memory_cannot_be_opened_is_not_reachable(monkeypatch):
    """As between two users, or where /proc is not there. Here rank 1 can open no other's memory,
    while the others can open its own.
    """
    real = SameHostTransport._open_peer
    monkeypatch.setattr(
        SameHostTransport,
        "_open_peer",
        lambda end, *entry: None if end.rank == 1 else real(end, *entry),
    )
    assert [end.reachable for end in joined(3)] == [{2}, set(), {0}]


@pytest.mark.parametrize("differs", ["host", "nonce", "pid", "mailbox"])
def test_a_process_that_only_looks_like_a_peer_is_not_taken_for_it(monkeypatch, differs):
    """Numbers of processes mean something else in another container, and another machine has its
    own.
    """
    real = same_host._gather
    wrong = {"host": "another", "nonce": "0" * 32, "pid": 2**22 + 1, "mailbox": 0}

    def gather(store, name, size):
        entries = real(store, name, size)
        if not name.endswith("address"):
            return entries
        return [{**entry, differs: wrong[differs]} for entry in entries]

    monkeypatch.setattr(same_host, "_gather", gather)
    assert [end.reachable for end in joined()] == [set(), set()]


@pytest.mark.parametrize("lack", ["platform", "boot id", "memory"])
def test_a_rank_without_shared_memory_is_not_reachable_and_one_line_says_why(
    monkeypatch, caplog, lack
):
    """The network back end is slower: a user who wonders finds the reason in the log, once."""

    def refused(*_):
        raise OSError(1, "Operation not permitted")

    if lack == "platform":
        monkeypatch.setattr(same_host, "unavailable_reason", lambda: "the reason")
    elif lack == "boot id":
        monkeypatch.setattr(same_host, "host_identity", str)
    else:
        monkeypatch.setattr(Segment, "make", refused)
    reason = {"platform": "the reason", "boot id": "boot_id", "memory": "not permitted"}[lack]
    with caplog.at_level(logging.INFO, "penstock"):
        assert [end.reachable for end in joined(3)] == [set()] * 3
    (line,) = caplog.messages
    assert line.startswith("messages of rank 0, 1, 2 go over the network back end")
    assert reason in line


def test_of_several_reasons_that_of_the_first_rank_is_logged(caplog):
    """With all ranks that have one."""
    with caplog.at_level(logging.INFO, "penstock"):
        same_host._log_unavailable([{}, {"unavailable": "one"}, {"pid": 5}, {"unavailable": "two"}])
    (line,) = caplog.messages
    assert line.startswith("messages of rank 1, 3 go over")
    assert line.endswith(": one")


def test_ranks_that_use_shared_memory_log_nothing_about_it(caplog):
    """Nor does a rank that chose another transport itself."""
    with caplog.at_level(logging.INFO, "penstock"):
        joined(3, unwilling=(1,))
    assert caplog.messages == []


def test_a_closed_end_leaves_no_file_open():
    """Worlds are made and closed in one process, test after test."""
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    for _ in range(3):
        ends = joined()
        passed(ends, torch.ones(2**16))
        for end in ends:
            end.close()
            assert end.reachable == set()
        del ends, end
    assert len(os.listdir("/proc/self/fd")) <= before  # noqa: PTH208


def test_a_process_that_is_killed_is_missed_before_the_deadline(tmp_path, monkeypatch):
    """What it had sent before still arrives; a further wait fails with its name."""
    with echo(tmp_path) as (end, process):
        for number in range(3):
            end.send(1, forward(number), Payload.of(torch.tensor(number)), "")
        assert end.post(1, backward(2), "").wait().value() == 2
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert [end.post(1, backward(number), "").wait().value().item() for number in (1, 0)] == [
            1,
            0,
        ]
        with pytest.raises(TransportLost, match=rf"rank 1 \(process {process.pid}\) has ended"):
            end.post(1, backward(3), "").wait()
        monkeypatch.setattr(same_host, "_LINGER_S", 3600.0)
        end.send(1, forward(3), Payload.of(torch.ones(2**20)), "")
        end.close()  # which does not wait for it either


def test_what_a_peer_has_sent_just_before_its_end_counts(ends):
    """It may come between the last look for it and the look at whether its sender still lives."""
    sent = []

    class Ended:
        @staticmethod
        def poll(_):
            if not sent:
                sent.append(1)
                ends[0].send(1, forward(0), Payload.of(torch.ones(1)), "")
            return [(0, 1)]

    ends[1]._peers[0] = dataclasses.replace(ends[1]._peers[0], exit_poll=Ended())
    assert ends[1].post(0, forward(0), "").wait().value().item() == 1
    with pytest.raises(TransportLost, match=r"rank 0 .* has ended"):
        ends[1].post(0, forward(1), "").wait()


@pytest.mark.parametrize(
    ("opened", "connected"),
    [
        ([{1, 2}, {0, 2}, {0, 1}], True),
        ([{1, 2}, {0, 2}, {0}], False),
        ([{1, 2}, {2}, {0, 1}], False),
        ([{2}, {0, 2}, {0, 1}], False),
        ([{1, 2}, {0, 2}, set()], False),
    ],
)
def test_ranks_are_connected_if_each_can_open_the_memory_of_all_others(opened, connected):
    """A sum in shared memory is read in both directions; ranks that take no part do not count."""
    transport = SameHostTransport(0, 1.0)
    transport._opened = [frozenset(ranks) for ranks in opened]
    assert transport.connects([0, 1, 2]) is connected
    assert transport.connects([0])
    assert transport.connects([0, 1]) is (1 in opened[0] and 0 in opened[1])


def test_a_peer_is_waited_for_only_while_it_may_still_open_what_was_sent():
    """One reason against it is enough; what peers have sent is opened meanwhile, also of ended ones."""
    for opened, closed, ended, stopped in itertools.product([False, True], repeat=4):
        polls = []

        def poll(polls=polls):
            polls.append(1)
            raise OSError

        end = SameHostTransport(0, 60.0)
        end._mailbox = SimpleNamespace(stopped=stopped)
        peer = SimpleNamespace(
            incoming=SimpleNamespace(poll=poll),
            outgoing=SimpleNamespace(all_opened=lambda opened=opened: opened),
            mailbox=SimpleNamespace(closed=closed),
            exit_poll=SimpleNamespace(poll=lambda _, ended=ended: ["end"] * ended),
        )
        end._peers = {1: peer, 2: peer}
        assert end._must_linger(peer) is not (opened or closed or ended or stopped)
        assert len(polls) == 2


@pytest.mark.parametrize("arrives_at", [None, 0, 1, 3])
def test_a_sleep_is_armed_before_the_last_look_and_disarmed_after_it(monkeypatch, arrives_at):
    """However the wait ends; no sleep is longer than the rest of the deadline."""
    now_s, log = [100.0], []
    monkeypatch.setattr(
        same_host,
        "time",
        SimpleNamespace(monotonic=lambda: now_s[0], perf_counter=lambda: now_s[0]),
    )

    def sleep(seconds):
        log.append(round(seconds, 6))
        now_s[0] += seconds

    queue = SimpleNamespace(pending={}, polls=0)
    queue.notifier = SimpleNamespace(
        arm=lambda: log.append("arm"), disarm=lambda: log.append("disarm"), sleep=sleep
    )

    def poll():
        log.append("poll")
        if queue.polls == arrives_at:
            queue.pending[7] = "message"
        queue.polls += 1
        return True

    queue.poll = poll
    end = SameHostTransport(0, 0.12)
    end.spin_s = 0.0
    end._mailbox = SimpleNamespace(stopped=False)
    end._peers = {1: SimpleNamespace(exit_poll=SimpleNamespace(poll=lambda _: []), pid=9)}
    sleeps = [0.05, 0.05, 0.02]
    if arrives_at is None:
        with pytest.raises(
            TransportTimeout, match=r"no message from rank 1 \(process 9\) for 0.12"
        ):
            end._wait_for(queue, 1, 7)
        expected = [["arm", "poll", seconds, "disarm"] for seconds in sleeps]
        assert log == [*itertools.chain(*expected), "arm", "poll", "disarm"]
    else:
        end._wait_for(queue, 1, 7)
        expected = [["arm", "poll", seconds, "disarm"] for seconds in sleeps[:arrives_at]]
        assert log == [*itertools.chain(*expected), "arm", "poll", "disarm"]


def test_a_peer_that_could_not_open_this_rank_is_given_up_with_its_descriptor(monkeypatch):
    """A link needs both ends. By rank it is known who has opened whom."""
    store, closed = HashStore(), []
    end = SameHostTransport(1, 60.0)
    mailbox = SimpleNamespace(segment=SimpleNamespace(fd=3), nonce="n")
    monkeypatch.setattr(same_host, "_make_mailbox", lambda size: mailbox)
    monkeypatch.setattr(same_host.os, "close", closed.append)
    peers = {rank: SimpleNamespace(pidfd=50 + rank) for rank in (0, 2, 3)}
    monkeypatch.setattr(end, "_open_peers", lambda addresses, own: dict(peers))
    opened = {0: [1, 2], 2: [0], 3: [1]}
    for rank, ranks in opened.items():
        store.set(f"same-host/address/{rank}", json.dumps({}))
        store.set(f"same-host/opened/{rank}", json.dumps(ranks))
    end.connect(store, 4)
    assert end.reachable == {0, 3}
    assert closed == [52]
    assert json.loads(store.get("same-host/opened/1")) == [0, 2, 3]
    assert end._opened == [{1, 2}, {0, 2, 3}, {0}, {1}]


def test_a_rank_that_closes_waits_five_seconds_for_all_peers_together(monkeypatch):
    """Not for each of them; then their memory and descriptors are closed all the same."""
    clock, closed = SimpleNamespace(now_s=100.0, monotonic=lambda: clock.now_s), []
    clock.sleep = lambda seconds: setattr(clock, "now_s", clock.now_s + seconds)
    monkeypatch.setattr(same_host, "time", clock)
    monkeypatch.setattr(same_host.os, "close", closed.append)
    end = SameHostTransport(0, 60.0)
    end._mailbox = SimpleNamespace(
        close=lambda: closed.append("mailbox"),
        segment=SimpleNamespace(close=lambda: closed.append("its segment")),
    )
    arenas = [
        SimpleNamespace(close=lambda rank=rank: closed.append(f"arena {rank}")) for rank in (1, 2)
    ]
    end._peers = {
        rank: SimpleNamespace(outgoing=SimpleNamespace(arena=arena), pidfd=50 + rank)
        for rank, arena in enumerate(arenas, 1)
    }
    monkeypatch.setattr(end, "_must_linger", lambda peer: True)
    end.close()
    assert 105.0 <= clock.now_s < 105.01
    assert closed == ["mailbox", "arena 1", 51, "arena 2", 52, "its segment"]
    assert end.reachable == frozenset()
