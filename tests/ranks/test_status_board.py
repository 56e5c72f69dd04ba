"""The status board of threads, and that of processes in a store: statuses and the first failure."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
from tests.time_limits import HANG_S
from torch.distributed import HashStore

from penstock.errors import RunError, StageFailed
from penstock.ranks import status_board
from penstock.ranks.status_board import SharedBoard, describe, reason_of
from penstock.ranks.store_status_board import StoreBoard


@pytest.fixture
def boards():
    """Yield two ranks' views of one board in a store, and an event for each that a failure sets."""
    store = HashStore()
    heard = [threading.Event(), threading.Event()]
    created = [StoreBoard(store, rank, 2, heard[rank].set) for rank in range(2)]
    yield created, heard
    for board in created:
        board.close()


def test_the_first_reason_stays(boards):
    """Later failures are mostly consequences of the first."""
    shared = SharedBoard(2)
    shared.for_rank(0).fail("the first")
    shared.for_rank(1).fail("the second")
    assert shared.for_rank(1).failure() == "the first"
    (one, other), _ = boards
    assert one.failure() is None
    other.fail("the first")
    one.fail("the second")
    assert one.failure(HANG_S) == other.failure() == "the first"


def test_a_failure_is_reported_to_all_ranks_without_polling(boards):
    """A rank that computes, or waits inside a library, cannot poll."""
    (one, _), heard = boards
    one.fail("a reason")
    assert all(event.wait(HANG_S) for event in heard)


def test_statuses_of_other_ranks_have_their_age(boards):
    """One line for each other rank."""
    shared = SharedBoard(3)
    shared.for_rank(2).doing("is at 2B7")
    assert shared.for_rank(1).describe_others() == [
        "rank 0 has not begun since 0 s",
        "rank 2 is at 2B7 since 0 s",
    ]
    assert shared.latest()[:2] == (2, "is at 2B7")
    (one, other), _ = boards
    other.doing("waits for 0F3")
    published = threading.Event()
    for _ in range(600):  # the watcher writes it down twice a second
        if any("waits for 0F3" in line for line in one.describe_others()):
            published.set()
            break
        published.wait(0.05)
    assert one.describe_others()[0].startswith("rank 1 waits for 0F3 since ")
    assert one.name(1).startswith("rank 1 (pid ")


def test_a_new_run_starts_with_an_empty_board():
    """Ranks that are threads can run again after a failure."""
    shared = SharedBoard(2)
    shared.for_rank(0).doing("is at 0F0")
    shared.fail("a reason")
    shared.reset()
    assert shared.for_rank(0).failure() is None
    assert shared.line(0) == "rank 0 has not begun since 0 s"


def test_reasons_name_the_rank_whatever_the_error():
    """Penstock's own errors name the rank themselves; an error without a message has its class."""
    assert (
        reason_of(StageFailed(1, 2, "2F0", 3, "x"), 1)
        == "rank 1 (stage 2) failed in 2F0 of step 3: x"
    )
    assert reason_of(RunError("all said")) == "all said"
    assert reason_of(KeyError("x"), 3) == "rank 3: KeyError: 'x'"
    assert reason_of(KeyboardInterrupt()) == "KeyboardInterrupt"
    assert describe(1, "is at 1F5", 41.6) == "rank 1 is at 1F5 since 42 s"


def test_the_latest_status_is_the_one_that_began_last_with_its_age(monkeypatch):
    """A deadline counts from it, whichever rank it is of."""
    now_s = [100.0]
    monkeypatch.setattr(status_board, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    shared = SharedBoard(3)
    for rank, begun_s in ((2, 103.0), (0, 105.0), (1, 104.0)):
        now_s[0] = begun_s
        assert shared.for_rank(rank).doing(f"is at {rank}F0") == begun_s
    now_s[0] = 112.0
    assert shared.latest() == (0, "is at 0F0", 7.0)
    assert shared.line(2) == "rank 2 is at 2F0 since 9 s"
    shared.reset()
    now_s[0] = 113.0
    assert shared.latest()[1:] == ("has not begun", 1.0)
    assert [shared.line(rank) for rank in range(3)] == [
        f"rank {rank} has not begun since 1 s" for rank in range(3)
    ]
