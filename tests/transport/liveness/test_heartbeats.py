"""A rank's view of the heartbeats: no process, thread or clock is real, so that every order and figure
is exact.
"""

from __future__ import annotations

import io
import json
import os
import socket
import sys
import threading
from types import SimpleNamespace

import pytest
from tests.transport.liveness.fake_clock import Clock, store_of

from penstock.errors import RunError
from penstock.transport.liveness import heartbeats
from penstock.transport.liveness.heartbeats import Heartbeats, RankAddress
from penstock.transport.liveness.stopped_processes import LIMIT_S


class Acknowledgement:
    """An event that is set at a second of the clock, or by the caller."""

    def __init__(self, clock, at_s=float("inf")) -> None:
        self.clock, self.at_s, self.waits = clock, at_s, []

    def set(self):
        """As threading.Event.set."""
        self.at_s = self.clock.now_s

    def wait(self, seconds):
        """As threading.Event.wait."""
        self.waits.append(seconds)
        self.clock.sleep(min(seconds, max(0.0, self.at_s - self.clock.now_s)))
        return self.clock.now_s >= self.at_s


class Process:
    """The heartbeat process: what it is told, and what it reports."""

    def __init__(self, *reports) -> None:
        self.stdin, self.told, self.waited, self.at_exit = self, [], [], []
        self.stdout = io.BytesIO(
            b"".join(json.dumps(report).encode() + b"\n" for report in reports)
        )

    def write(self, line):
        """Note a line of standard input."""
        self.told.append(json.loads(line))

    def flush(self):
        """Nothing is held back."""

    def close(self):
        """Note the end of standard input."""
        self.told.append("end")

    def wait(self, seconds):
        """Note the wait for the end."""
        self.waited.append(seconds)


@pytest.fixture
def clock(monkeypatch):
    """The clock of the module."""
    fake = Clock()
    monkeypatch.setattr(heartbeats, "time", fake)
    return fake


@pytest.fixture
def exits(monkeypatch):
    """Statuses with which the process would have ended."""
    statuses = []

    class Exit(BaseException):
        """The end of the process."""

    def end(status):
        statuses.append(status)
        raise Exit

    monkeypatch.setattr(
        heartbeats, "os", SimpleNamespace(_exit=end, environ=os.environ, getpid=os.getpid)
    )
    return SimpleNamespace(statuses=statuses, error=Exit)


def entry(host, port=4000, address="10.0.0.1", pid=7):
    """What a rank writes into the store."""
    return json.dumps([host, address, port, pid])


@pytest.fixture
def start(monkeypatch, clock):
    """Start the heartbeats of a rank beside others that have come already; its thread does not run."""
    monkeypatch.setenv("PENSTOCK_BIND", "127.0.0.1")

    def start(*reports, rank=0, entries=None, port=5000, **limit):
        process = Process({"port": port}, *reports)

        def start_process(*given):
            process.given = given
            return process

        monkeypatch.setattr(heartbeats, "_start_process", start_process)
        store = store_of()
        store.set("heartbeat-secret", "00")
        entries = {1: entry("b")} if entries is None else entries
        for peer, text in entries.items():
            store.set(f"heartbeat/{peer}", text)
        events = threading.Event
        with monkeypatch.context() as patch:
            idle = SimpleNamespace(start=lambda: None)
            threads = SimpleNamespace(Thread=lambda **_: idle, Event=events)
            patch.setattr(heartbeats, "threading", threads)
            patch.setattr(heartbeats.atexit, "register", process.at_exit.append)
            watch = Heartbeats(store, rank, len(entries) + 1, timeout_s=10.0, **limit)
        watch._acknowledged = Acknowledgement(clock)
        return watch, process, store

    return start


def test_a_rank_writes_where_it_listens_and_tells_its_process_the_peers(start):
    """Host, address, port and process, in this order. At its exit it says farewell."""
    watch, process, store = start(
        rank=1, entries={0: entry("a", 11), 2: entry("c", 13, "10.0.0.3")}
    )
    assert process.given == (1, "00", "127.0.0.1", LIMIT_S)
    assert process.at_exit == [watch._leave]
    assert start(limit_s=7.5)[1].given[-1] == 7.5
    assert json.loads(store.get("heartbeat/1")) == [
        socket.gethostname(),
        "127.0.0.1",
        5000,
        os.getpid(),
    ]
    assert process.told == [{"peers": {"0": ["10.0.0.1", 11]}}, {"peers": {"2": ["10.0.0.3", 13]}}]


def test_a_loopback_address_of_another_host_is_that_of_the_store(start, monkeypatch):
    """Debian's hosts resolve their own names so; on this host the loopback address is right."""
    monkeypatch.setenv("MASTER_ADDR", "10.9.9.9")
    here = socket.gethostname()
    entries = {1: entry("b", 11, "127.0.1.1"), 2: entry(here, 12, "127.0.1.1"), 3: entry("b", 13)}
    _, process, _ = start(entries=entries)
    assert process.told == [
        {"peers": {"1": ["10.9.9.9", 11]}},
        {"peers": {"2": ["127.0.1.1", 12]}},
        {"peers": {"3": ["10.0.0.1", 13]}},
    ]


def lost(rank, state="running", age_s=5.04):
    """A rank as the heartbeat process reports it."""
    return {"rank": rank, "age_s": age_s, "state": state}


@pytest.mark.parametrize(
    ("state", "text"),
    [
        ("running", "is missing; its last heartbeat is 5.0 s old"),
        ("dead", "has ended without a message"),
        ("failed", "could not connect to the other ranks; its own message says why"),
        (
            "stopped",
            "has been stopped by a signal (SIGSTOP); its last heartbeat is 5.0 s old",
        ),
    ],
)
def test_a_loss_is_described_by_rank_host_and_state(start, state, text):
    """All that is needed to look there."""
    watch, _, _ = start()
    assert watch._describe([lost(1, state)]) == f"rank 1 on host b (10.0.0.1, pid 7) {text}"


def test_eight_lost_ranks_are_named_and_others_counted(start):
    """A job has thousands."""
    watch, _, _ = start(entries={rank: entry("b", pid=rank) for rank in range(1, 13)})
    eight = watch._describe([lost(rank, "dead") for rank in range(1, 9)])
    assert eight.count(" has ended") == 8
    assert "more ranks" not in eight
    ten = watch._describe([lost(rank, "dead") for rank in range(2, 12)])
    assert ten.startswith("rank 2 on host b (10.0.0.1, pid 2) has ended")
    assert ten.endswith("pid 9) has ended without a message; 2 more ranks are missing")


def test_this_host_may_have_lost_its_network_if_all_ranks_of_others_are_silent(start):
    """One silent host is lost itself, and a rank that has ended could say so over the network."""
    here = socket.gethostname()
    hint = f"; all other hosts are missing, so {here} may have lost its network"
    watch, _, _ = start(entries={1: entry(here), 2: entry("b"), 3: entry("c")})
    assert watch._describe([lost(2), lost(3)]).endswith(hint)
    for ranks in ([lost(2)], [lost(1), lost(2)], [lost(2), lost(3, "dead")], [lost(1)]):
        assert hint not in watch._describe(ranks)
    watch, _, _ = start(entries={1: entry(here), 2: entry("b")})
    assert hint not in watch._describe([lost(2)])


def test_the_last_checkpoint_is_named_also_if_it_is_of_step_0(start):
    """From there the run can go on."""
    watch, _, _ = start()
    watch.checkpoint_step = 0
    assert watch._describe([lost(1)]).endswith("; the last whole checkpoint is of step 0")


def test_reports_are_read_until_a_rank_is_lost(start, caplog):
    """Silent peers are a warning, with the port that a firewall has to let through."""
    reports = ({"unheard": [2, 1]}, {"lost": [lost(1)]}, {"lost": [lost(2)]})
    watch, _, _ = start(*reports, entries={1: entry("b", 41), 2: entry("c", 42)})
    watch._acknowledged.set()
    with caplog.at_level("WARNING", "penstock"):
        watch._watch()
    assert watch.loss.startswith("rank 1 on host b")
    (message,) = caplog.messages
    assert "from rank 2, 1: " in message
    assert message.endswith("(they are UDP datagrams to port 42)")


def test_a_heartbeat_process_that_ends_by_itself_is_a_loss_and_after_close_is_none(start):
    """Without it nobody would notice a lost rank."""
    watch, _, _ = start()
    watch._acknowledged.set()
    watch._watch()
    assert watch.loss == "the heartbeat process of this rank has ended"
    watch, _, _ = start()
    watch.close()
    watch._watch()
    assert watch.loss is None


def test_callbacks_end_waits_the_newest_first_and_all_of_them(start):
    """A world marks its links as closed before torch's groups are aborted. Its error stops none."""
    watch, _, _ = start()
    calls = []

    def fail():
        calls.append(("fail", watch.loss))
        raise RuntimeError

    def first():
        calls.append(("first", watch.loss))

    def removed():
        calls.append("removed")

    for callback in (first, removed, fail):
        watch.on_loss(callback)
    watch.remove(removed)
    watch.remove(removed)
    assert calls == []
    watch._acknowledged.set()
    watch._lose("rank 1 is gone")
    assert calls == [("fail", "rank 1 is gone"), ("first", "rank 1 is gone")]
    watch.on_loss(first)
    assert len(calls) == 3


def test_a_reason_that_was_fetched_counts_as_raised(start, clock):
    """Before a loss there is none to fetch."""
    watch, _, _ = start()
    assert watch.reason() is None
    assert not watch._acknowledged.wait(1.0)
    watch.loss = "gone"
    assert watch.reason() == "gone"
    assert watch._acknowledged.wait(0.0)


def exit_second(watch, clock, exits, share, at_s=float("inf")):
    """Return the second after a loss at which the process ends; None if it does not."""
    clock.share, begin_s = share, clock.now_s
    watch._acknowledged = Acknowledgement(clock, begin_s + at_s)
    try:
        watch._lose("rank 1 is gone")
    except exits.error:
        assert exits.statuses.pop() == 1
        return clock.now_s - begin_s
    return None


def test_a_rank_that_waits_in_native_code_is_ended_and_one_that_computes_has_time(
    start, clock, exits, capsys
):
    """1.5 s for the exception; then 1.5 s for one that waits and 20 s for one that computes."""
    watch, _, _ = start()
    assert exit_second(watch, clock, exits, 0.049) == 3.0
    assert capsys.readouterr().err == "error: rank 0: rank 1 is gone\n"
    assert exit_second(watch, clock, exits, 0.051) == 22.5
    assert exit_second(watch, clock, exits, 1.0) == 22.5
    assert capsys.readouterr().err.count("\n") == 2
    assert exit_second(watch, clock, exits, 1.0, at_s=10.0) is None
    assert capsys.readouterr().err.count("\n") == 1
    assert exit_second(watch, clock, exits, 0.0, at_s=1.5) is None
    assert exit_second(watch, clock, exits, 0.0, at_s=2.0) is None
    watch._closed = True
    assert exit_second(watch, clock, exits, 0.0) is None
    assert capsys.readouterr().err == "error: rank 0: rank 1 is gone\n"


def test_a_rank_that_stops_computing_is_ended_at_the_next_look(start, clock, exits):
    """The share is of the last 1.5 s, not of all time since the loss."""
    watch, _, _ = start()

    class Idle(Acknowledgement):
        """An event before which the rank computes for some waits, and then none."""

        def wait(self, seconds):
            """As threading.Event.wait."""
            clock.share = 1.0 if len(self.waits) < 3 else 0.0
            return super().wait(seconds)

    watch._acknowledged = Idle(clock)
    with pytest.raises(exits.error):
        watch._lose("gone")
    assert watch._acknowledged.waits == [1.5, 1.5, 1.5, 1.5]


def test_only_a_store_that_does_not_answer_is_disconnected(start, monkeypatch):
    """A wait for it would be endless; an error is an answer."""
    watch, _, _ = start()
    closed, asked = [], []
    monkeypatch.setenv("MASTER_PORT", "6123")
    monkeypatch.setattr(heartbeats, "close_connections", closed.append)
    monkeypatch.setattr(heartbeats, "_STORE_S", 0.0)

    def run_at_once(*, target, **_):
        return SimpleNamespace(start=target)

    def refuse(keys):
        asked.append(keys)
        raise RuntimeError

    def forget(**_):
        return SimpleNamespace(start=lambda: None)

    threads = SimpleNamespace(Thread=run_at_once, Event=threading.Event)
    monkeypatch.setattr(heartbeats, "threading", threads)
    watch._release_store()
    watch._store = SimpleNamespace(check=refuse)
    watch._release_store()
    assert (closed, asked) == ([], [["heartbeat/0"]])
    threads.Thread = forget
    watch._release_store()
    assert closed == [6123]
    monkeypatch.delenv("MASTER_PORT")  # no connection is to port 0
    watch._release_store()
    assert closed == [6123, 0]


@pytest.mark.parametrize(("failed", "word"), [(False, "closed"), (True, "failed")])
def test_close_says_farewell_once_and_waits_for_the_process(start, failed, word):
    """Also if the process has ended already."""
    watch, process, _ = start()
    del process.told[:]
    watch.close(failed=failed)
    watch.close(failed=not failed)
    assert process.told == [word, "end"]
    assert process.waited == [1.0]
    watch, process, _ = start()
    process.write = lambda _: (_ for _ in ()).throw(BrokenPipeError)
    watch.close()
    assert process.waited == [1.0]


def test_after_a_loss_the_exit_takes_at_most_three_seconds(start, monkeypatch):
    """Libraries wait for the lost rank in farewells of their own. Without a loss they have time."""
    timers = []

    class Timer:
        """As threading.Timer."""

        daemon = False

        def __init__(self, *arguments) -> None:
            self.arguments = arguments

        def start(self):
            """Note the start."""
            timers.append((self.daemon, self.arguments))

    monkeypatch.setattr(heartbeats, "threading", SimpleNamespace(Timer=Timer))
    watch, process, _ = start()
    watch._leave()
    assert timers == []
    assert process.told[-1] == "end"
    watch, process, _ = start()
    watch.loss = "gone"
    watch._leave()
    assert timers == [(True, (3.0, os._exit, (1,)))]
    assert process.told[-1] == "end"


def test_an_address_on_which_the_process_cannot_listen_is_an_error(start, monkeypatch):
    """With its reason, or that it has ended."""
    watch, _, _ = start({"error": "No such device"})
    with pytest.raises(
        RunError,
        match=r"rank 0 cannot send heartbeats from 10\.0\.0\.8: No such device\. PENSTOCK_BIND",
    ):
        watch._read_port("10.0.0.8")
    with pytest.raises(RunError, match="from ::1: its process has ended"):
        watch._read_port("::1")


def test_the_heartbeat_process_gets_its_settings_in_one_line(monkeypatch):
    """It is isolated from the modules and variables of the user."""
    process, started = Process(), []
    monkeypatch.setattr(
        heartbeats.subprocess, "Popen", lambda command, **_: started.append(command) or process
    )
    assert heartbeats._start_process(3, "abcd", "10.0.0.8", 4.5) is process
    assert process.told == [
        {"rank": 3, "pid": os.getpid(), "secret": "abcd", "bind": "10.0.0.8", "limit_s": 4.5}
    ]
    ((python, *options, program),) = started
    assert (python, options) == (sys.executable, ["-I", "-S"])
    assert program.endswith("heartbeat_process.py")


def test_a_rank_is_named_with_host_address_and_process():
    """In this order."""
    text = RankAddress("a", "10.0.0.1", 4000, 77).describe(5)
    assert text == "rank 5 on host a (10.0.0.1, pid 77)"


def test_heartbeats_that_were_closed_have_nothing_to_do_at_exit(start, monkeypatch):
    """Their process has ended."""
    removed = []
    monkeypatch.setattr(heartbeats.atexit, "unregister", removed.append)
    watch, _, _ = start()
    watch.close()
    assert removed == [watch._leave]
