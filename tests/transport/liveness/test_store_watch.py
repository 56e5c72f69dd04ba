"""A store that does not answer, before there are heartbeats."""

from __future__ import annotations

import errno
import os
import socket
from datetime import timedelta
from types import SimpleNamespace

import pytest
from tests.time_limits import HANG_S

from penstock.errors import RunError
from penstock.transport.liveness import store_watch
from penstock.transport.liveness.store_watch import StoreWatch, wait_for_store


@pytest.fixture
def listener():
    """A port whose connections nobody answers, as that of a process that was stopped."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


def test_a_wait_for_a_store_that_does_not_answer_ends_with_its_address(listener, monkeypatch):
    """torch would wait until its time limit. The watch closes the connection, which ends the wait."""
    monkeypatch.setattr(store_watch, "LOOK_S", 0.02)
    monkeypatch.setattr(store_watch, "_EXCEPTION_S", HANG_S)
    monkeypatch.setattr(os, "getppid", os.getpid)
    address, port = listener.getsockname()
    watch = StoreWatch(1, address, port, "rank 0", limit_s=0.1)
    with pytest.raises(RunError, match=rf"rank 0 on host 127\.0\.0\.1 is missing: .* port {port}"):
        wait_watched(watch, (address, port))


def wait_watched(watch: StoreWatch, address: tuple[str, int]) -> None:
    """Wait for an answer of a store, as torch does."""
    with watch, socket.create_connection(address, HANG_S) as connection:
        while connection.recv(1):
            pass
        raise ConnectionError("the store is gone")


def test_a_store_that_listens_is_not_waited_for(listener):
    """Whatever becomes of it then is for the watch."""
    wait_for_store(*listener.getsockname(), timeout_s=HANG_S)


def test_a_host_without_a_store_is_named_at_the_time_limit(listener):
    """It answers, so that rank 0 may only be late."""
    address, port = listener.getsockname()
    listener.close()
    with pytest.raises(RunError, match=f"port {port}, and the host does not listen there"):
        wait_for_store(address, port, timeout_s=0.0)


def test_a_host_that_no_longer_answers_is_lost(monkeypatch):
    """It answered before it had a store, and then lost its power or its cable."""
    outcomes = iter([ConnectionRefusedError()])

    def connect(address: object, limit_s: float) -> None:
        """Refuse the first connection; the others get no answer."""
        raise next(outcomes, TimeoutError())

    monkeypatch.setattr(store_watch.socket, "create_connection", connect)
    with pytest.raises(RunError, match=r"rank 0 on host 10\.0\.0\.9 is missing: the host has not"):
        wait_for_store("10.0.0.9", 29500, timeout_s=HANG_S, limit_s=0.2)


@pytest.fixture
def clock(monkeypatch):
    """A clock that sleeps and connections move; and no rank of this host is looked at."""
    fake = SimpleNamespace(now_s=100.0, looks=[])
    fake.monotonic = lambda: fake.now_s
    fake.sleep = lambda seconds: setattr(fake, "now_s", fake.now_s + seconds)
    monkeypatch.setattr(store_watch, "time", fake)
    siblings = SimpleNamespace(check=lambda ranks: fake.looks.append(list(ranks)))
    monkeypatch.setattr(store_watch, "LostSiblings", lambda: siblings)
    return fake


@pytest.mark.parametrize("local_rank", ["0", "1", None])
def test_silence_counts_from_the_last_answer_of_the_host(monkeypatch, clock, local_rank):
    """Refusals are answers. One rank of a host says for whom it waits."""
    reports = []
    progress = SimpleNamespace(look=lambda ranks: reports.append(list(ranks)))
    monkeypatch.setattr(store_watch, "JoinProgress", lambda limit_s: progress)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    if local_rank is not None:
        monkeypatch.setenv("LOCAL_RANK", local_rank)

    def connect(address, limit_s):
        clock.now_s += 0.4
        raise ConnectionRefusedError if clock.now_s < 110 else TimeoutError

    monkeypatch.setattr(store_watch.socket, "create_connection", connect)
    with pytest.raises(RunError, match=r"has not answered for 5\.0 s, and the store"):
        wait_for_store("10.0.0.9", 29500, timeout_s=300.0)
    assert clock.now_s == pytest.approx(114.9)
    assert clock.looks == [[0]] * 30
    assert reports == ([] if local_rank == "1" else [[0]] * 30)


def test_a_host_on_which_no_store_appears_is_named_after_the_time_limit(monkeypatch, clock):
    """Its answers, which are refusals, do not prolong the wait."""

    def connect(address, limit_s):
        assert clock.now_s < 200.0, "the wait has no end"
        raise ConnectionRefusedError

    monkeypatch.setattr(store_watch.socket, "create_connection", connect)
    with pytest.raises(RunError, match=r"within 20 s: .* and the host does not listen there\."):
        wait_for_store("10.0.0.9", 29500, timeout_s=20.0)
    assert 120.0 < clock.now_s <= 120.2


@pytest.mark.parametrize(
    "error", [TimeoutError(), socket.gaierror(), OSError(errno.EHOSTUNREACH, "No route to host")]
)
def test_a_host_that_never_answers_is_named_after_the_time_limit(monkeypatch, clock, error):
    """It is not lost before: it may still start, or its name may not be known yet."""

    def connect(address, limit_s):
        clock.now_s += 0.9
        raise error

    monkeypatch.setattr(store_watch.socket, "create_connection", connect)
    with pytest.raises(RunError) as raised:
        wait_for_store("10.0.0.9", 29500, timeout_s=20.0)
    assert str(raised.value).startswith(
        "rank 0 on host 10.0.0.9 did not join the run within 20 s: its store is to be at port 29500, "
        "and the host has never answered."
    )
    assert 120.0 < clock.now_s <= 121.0


class Done:
    """The end of a watched block, after a number of looks; answers arrive in some of them."""

    def __init__(self, watch, answered, exception_in_time) -> None:
        self.watch, self.answered, self.exception_in_time = watch, list(answered), exception_in_time
        self.waits = []

    def set(self):
        """The block has ended."""

    def wait(self, seconds):
        """Let a look pass."""
        self.waits.append(seconds)
        if seconds != store_watch.LOOK_S:
            return self.exception_in_time
        if not self.answered:
            return True
        self.watch._answers += self.answered.pop(0)
        return False


@pytest.fixture
def watched(monkeypatch, clock):
    """Let a watch look at answers, and return its reason, and what it closes and ends."""

    def watched(answered, exception_in_time=True):
        events = []
        watch = StoreWatch(3, "h", 4242, "torchrun", limit_s=1.5)
        watch._done = Done(watch, answered, exception_in_time)
        monkeypatch.setattr(store_watch, "close_connections", events.append)
        monkeypatch.setattr(store_watch, "write_line", events.append)
        monkeypatch.setattr(store_watch.os, "_exit", events.append)
        watch._watch()
        return watch, events

    return watched


def test_a_store_is_lost_after_looks_in_a_row_without_an_answer(watched, clock):
    """Three of half a second; one answer in between begins anew. The block may end before."""
    watch, events = watched([1, 0, 0, 1, 0, 0, 2, 0, 0])
    assert (watch._reason, events) == (None, [])
    watch, events = watched([0, 0, 1, 0, 0, 0, 5, 5])
    assert watch._reason == (
        "torchrun on host h is missing: the store of the run, which it hosts at port 4242, has not "
        "answered for 1.5 s (its host is lost, or it has been stopped by a signal)"
    )
    assert events == [4242]
    assert len(watch._done.answered) == 2
    _, events = watched([0, 0, 0], exception_in_time=False)
    assert events == [4242, f"error: rank 3: {watch._reason}", 1]


def test_a_lost_process_of_this_host_is_named_at_once(watched, clock, monkeypatch):
    """Its own reason is better than that of the store."""

    def lose(ranks):
        raise RunError("rank 0 on host h (pid 7) has ended")

    monkeypatch.setattr(store_watch, "LostSiblings", lambda: SimpleNamespace(check=lose))
    watch, events = watched([1, 1])
    assert watch._reason == "rank 0 on host h (pid 7) has ended"
    assert events == [4242]


def test_answers_are_counted_and_a_store_that_breaks_off_is_connected_again(monkeypatch):
    """Over connections of the watch alone, which wait no longer than its limit."""
    watch, connections = StoreWatch(3, "h", 4242, "torchrun", limit_s=1.5), []
    rounds = [True, True, RuntimeError("closed"), True]

    class Client:
        """A store that answers, breaks off, and answers again."""

        def __init__(self, *given, **more) -> None:
            connections.append((given, more))

        def check(self, keys):
            """Return an answer."""
            outcome = rounds.pop(0)
            if isinstance(outcome, Exception):
                raise outcome
            return outcome

    waits = []

    def wait(seconds):
        waits.append(seconds)
        return not rounds

    monkeypatch.setattr(store_watch, "TCPStore", Client)
    watch._done = SimpleNamespace(wait=wait, is_set=lambda: not rounds)
    watch._ask()
    assert watch._answers == 3
    more = {"is_master": False, "timeout": timedelta(seconds=1.5)}
    assert connections == [(("h", 4242), more)] * 2
    # Before each of four questions, at the end, and after each of two connections.
    assert waits == [store_watch.LOOK_S] * 7


@pytest.mark.parametrize("reason", [None, "lost"])
@pytest.mark.parametrize("error", [None, ConnectionError("x"), KeyboardInterrupt()])
def test_only_an_error_of_the_block_is_replaced_by_the_reason(reason, error):
    """A block that has succeeded was not harmed, and Ctrl-C is the user's."""
    watch = StoreWatch(3, "h", 4242, "rank 0")
    watch._reason = reason
    if reason is not None and isinstance(error, Exception):
        with pytest.raises(RunError, match=r"^lost$") as raised:
            watch.__exit__(type(error), error, None)
        assert raised.value.__cause__ is error
    else:
        assert not watch.__exit__(type(error), error, None)
    assert watch._done.is_set()


def test_a_watch_asks_and_looks_as_long_as_its_block(monkeypatch):
    """Without questions every store would be lost, and without looks none."""
    watch, started = StoreWatch(3, "h", 4242, "rank 0"), []

    def thread(*, target, daemon, **_):
        assert daemon, "a store that does not answer must not keep the process from its end"
        return SimpleNamespace(start=lambda: started.append(target))

    threads = SimpleNamespace(Thread=thread)
    monkeypatch.setattr(store_watch, "threading", threads)
    with watch as entered:
        assert entered is watch
        assert started == [watch._ask, watch._watch]
        assert not watch._done.is_set()
    assert watch._done.is_set()
