"""The board of ranks that are processes, in a store of this process and without its thread."""

from __future__ import annotations

import json
import os
from datetime import timedelta
from types import SimpleNamespace

import pytest
from torch.distributed import HashStore

from penstock.errors import PeerFailed, RanksDiffer
from penstock.ranks import store_status_board
from penstock.ranks.store_status_board import StoreBoard


class Clock:
    """Seconds that only waits let pass."""

    def __init__(self) -> None:
        self.now_s = 10.0
        self.looks = []

    def monotonic(self):
        """As time.monotonic."""
        return self.now_s


class Stop:
    """The event that ends the watch; it lets the clock's time pass."""

    def __init__(self, clock) -> None:
        self.clock, self.left, self.was_set = clock, 0, False

    def wait(self, seconds):
        """As threading.Event.wait; of the watch's own looks, as many as `left`."""
        self.clock.now_s += seconds
        self.clock.looks.append(seconds)
        if seconds == store_status_board._PERIOD_S:
            self.left -= 1
            return self.left < 0
        return False

    def set(self):
        """As threading.Event.set."""
        self.was_set = True


class Calls:
    """The calls of a rank."""

    def __init__(self, differs=None, follows=True) -> None:
        self.differs, self.follows, self.seen = differs, follows, []

    def rows(self):
        """The calls."""
        return [["train", 3]]

    def difference(self, others):
        """How they differ."""
        self.seen.append(others)
        return self.differs

    def followed(self, others):
        """Whether the others have published theirs."""
        return self.follows


@pytest.fixture
def make(monkeypatch):
    """Make boards of one store, whose threads do not run."""
    clock, store = Clock(), HashStore()
    store.set_timeout(timedelta(milliseconds=100))
    monkeypatch.setattr(store_status_board, "time", clock)
    idle = SimpleNamespace(start=lambda: None, join=lambda: None)
    threads = SimpleNamespace(Thread=lambda **_: idle, Event=lambda: Stop(clock))
    monkeypatch.setattr(store_status_board, "threading", threads)
    losses = SimpleNamespace(reason=None, patience=[], watch=None)

    def lost(patience_s=0.0):
        losses.patience.append(patience_s)
        return losses.reason

    monkeypatch.setattr(store_status_board, "lost_ranks", lost)
    monkeypatch.setattr(store_status_board, "heartbeats", lambda: losses.watch)

    def make(rank, size=3, late=None):
        failures = []
        board = StoreBoard(store, rank, size, lambda: failures.append(rank), late)
        return board, failures

    return SimpleNamespace(board=make, clock=clock, store=store, losses=losses)


def gone(*_):
    """What a store does whose host has ended."""
    raise RuntimeError("gone")


def break_store(board):
    """Let the store of a board end."""
    methods = ("set", "get", "check", "compare_set", "multi_get")
    board._store = SimpleNamespace(**dict.fromkeys(methods, gone))


def test_what_other_ranks_do_is_described_with_its_age(make):
    """Not what this one does, and nothing of ranks that are not there yet."""
    first, _ = make.board(0)
    second, _ = make.board(2)
    assert second.doing("F of 3\x1b") == 10.0
    make.clock.now_s += 2.26
    second._publish()
    lines = first.describe_others()
    assert len(lines) == 1
    assert "rank 2" in lines[0]
    assert "F of 3\\x1b" in lines[0]
    assert lines[0].endswith("since 2 s")
    assert json.loads(make.store.get("penstock/doing/2"))[1] == 2.3
    assert json.loads(make.store.get("penstock/doing/0")) == ["has not begun", 0.0, []]
    break_store(first)
    assert first.describe_others() == []


def test_the_first_failure_stays_and_every_rank_raises_it(make):
    """Also a rank that has failed itself, later."""
    first, _ = make.board(0)
    second, _ = make.board(1)
    first.check()
    assert first.failure() is None
    second.fail("rank 1: no memory")
    first.fail("rank 0: a consequence")
    assert first.failure() == second.failure() == "rank 1: no memory"
    with pytest.raises(PeerFailed, match="rank 1: no memory"):
        first.check()
    record = json.loads(make.store.get("penstock/failure"))
    assert record == {"rank": 1, "reason": "rank 1: no memory", "differs": False}


def test_a_failure_of_another_rank_does_not_act_on_the_terminal(make):
    """Its text comes from another process, through a store that is open to the ranks."""
    first, _ = make.board(0)
    second, _ = make.board(1)
    second.fail("no memory\x1b[2J\nerror: of rank 0")
    assert first.failure() == "no memory\\x1b[2J\n  error: of rank 0"
    with pytest.raises(PeerFailed, match=r"no memory\\x1b"):
        first.check()


def test_other_calls_raise_an_error_of_their_own(make):
    """Before the failure is looked at."""
    first, _ = make.board(0)
    first.check_difference()
    first.fail("other\x07 calls", differs=True)
    with pytest.raises(RanksDiffer, match=r"^other\\x07 calls$"):
        first.check()
    break_store(first)
    first.check_difference()
    first.fail("too late")


def test_a_failure_is_waited_for_with_patience(make):
    """Every 50 ms, and not longer; a loss ends the wait."""
    board, _ = make.board(0)
    assert board.failure(0.5) is None
    assert make.clock.now_s == pytest.approx(10.5)
    assert set(make.clock.looks) == {0.05}
    make.losses.reason = "rank 2 on host b is missing"
    assert board.failure(9.0) == "rank 2 on host b is missing"
    assert make.clock.now_s == pytest.approx(10.5)


def test_a_store_that_has_ended_is_a_failure_for_which_heartbeats_may_have_the_reason(make):
    """They have 2 s for it."""
    board, _ = make.board(0)
    break_store(board)
    assert board.failure(9.0) == "the rank that hosts the store is gone"
    make.losses.reason = "rank 0 on host a is missing"
    assert board.failure() == "rank 0 on host a is missing"
    assert make.losses.patience == [2.0, 2.0]
    assert make.clock.now_s == 10.0


def test_calls_are_those_that_all_others_have_published(make):
    """By rank, without this one; none before all are there, for which nothing waits."""
    boards = [make.board(rank)[0] for rank in (0, 1)]
    assert boards[0].other_calls() == {}
    with pytest.MonkeyPatch.context() as patch:
        waits = SimpleNamespace(check=lambda _: False, multi_get=lambda _: pytest.fail("waits"))
        patch.setattr(boards[0], "_store", waits)
        assert boards[0].other_calls() == {}
    boards.append(make.board(2)[0])
    boards[2].calls = Calls()
    boards[2]._publish()
    assert boards[0].other_calls() == {1: [], 2: [["train", 3]]}
    assert boards[2].other_calls() == {0: [], 1: []}
    alone, _ = make.board(0, size=1)
    assert alone.other_calls() == {}
    break_store(boards[0])
    assert boards[0].other_calls() == {}


def test_calls_are_compared_until_the_others_have_followed(make):
    """A difference ends the run for all ranks."""
    board, _ = make.board(0, size=1)
    board.compare_calls(9.0)
    board.calls = Calls()
    board.compare_calls(9.0)
    assert make.clock.now_s == 10.0
    board.calls = Calls(follows=False)
    board.compare_calls()
    assert len(board.calls.seen) == 1
    board.compare_calls(0.2)
    assert make.clock.now_s == pytest.approx(10.2)
    assert board.failure() is None
    board.calls = Calls("rank 1 calls eval", follows=False)
    board.compare_calls(9.0)
    assert make.clock.now_s == pytest.approx(10.2)
    with pytest.raises(RanksDiffer, match="rank 1 calls eval"):
        board.check()


def test_ranks_are_named_with_their_process(make):
    """Without it if they have not written it, or the store is gone."""
    board, _ = make.board(1)
    assert board.name(1) == f"rank 1 (pid {os.getpid()})"
    break_store(board)
    assert board.name(1) == "rank 1"


def test_the_watch_publishes_and_compares_the_calls_of_a_rank_that_stays_in_one(make):
    """Calls are compared from more than 1 s on."""
    board, failures = make.board(0, late=lambda: None)
    board.calls = Calls()
    board.doing("waits")
    board._stop.left = 2
    board._watch()
    assert board.calls.seen == []
    board._stop.left = 1
    board._watch()
    assert len(board.calls.seen) == 1
    assert json.loads(make.store.get("penstock/doing/0")) == ["waits", 2.0, [["train", 3]]]
    assert failures == []


def test_the_watch_ends_the_run_once_when_any_rank_has_failed(make):
    """Another one, this one by its own deadline, or the store."""
    for name in ("other", "late", "store"):
        make.store.delete_key("penstock/failure")
        board, failures = make.board(2, late=lambda name=name: "late" if name == "late" else None)
        board._stop.left = 5
        if name == "other":
            make.board(1)[0].fail("no memory")
        if name == "store":
            break_store(board)
        board._watch()
        assert failures == [2]
        assert board._stop.left == 4
        if name == "late":
            assert board.failure() == "late"


def test_heartbeats_end_the_run_as_well_until_the_board_is_closed(make):
    """The last call is published, for which others may wait."""
    events = []
    make.losses.watch = SimpleNamespace(
        on_loss=lambda call: events.append(("add", call)),
        remove=lambda call: events.append(("remove", call)),
    )
    board, _ = make.board(0)
    board.calls = Calls()
    board.close()
    assert [event for event, _ in events] == ["add", "remove"]
    assert events[0][1] is events[1][1]
    assert board._stop.was_set
    assert json.loads(make.store.get("penstock/doing/0"))[2] == [["train", 3]]
    break_store(board)
    board.close()
