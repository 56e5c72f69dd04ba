"""The board: where every rank is, and what went wrong first; between threads, and between processes
by a store.
"""

from __future__ import annotations

import threading

import pytest
from torch.distributed import HashStore

from penstock.errors import RunError, StageFailed
from penstock.runtime.board import SharedBoard, describe, reason_of
from penstock.runtime.store_board import StoreBoard

SOON_S = 60


@pytest.fixture
def boards():
    """Two ranks' views of one board in a store, and an event for each that is set when it hears of
    a failure.
    """
    store = HashStore()
    heard = [threading.Event(), threading.Event()]
    made = [StoreBoard(store, rank, 2, heard[rank].set) for rank in range(2)]
    yield made, heard
    for board in made:
        board.close()


def test_the_first_reason_stays(boards):
    """What comes later is mostly its consequence."""
    shared = SharedBoard(2)
    shared.for_rank(0).fail("the first")
    shared.for_rank(1).fail("the second")
    assert shared.for_rank(1).failure() == "the first"
    (one, other), _ = boards
    assert one.failure() is None
    other.fail("the first")
    one.fail("the second")
    assert one.failure(SOON_S) == other.failure() == "the first"


def test_a_failure_is_heard_by_all_ranks_without_asking(boards):
    """A rank that computes, or waits inside a library, asks nothing."""
    (one, _), heard = boards
    one.fail("a reason")
    assert all(event.wait(SOON_S) for event in heard)


def test_others_are_told_with_what_they_do_and_since_when(boards):
    """One line each, oneself left out."""
    shared = SharedBoard(3)
    shared.for_rank(2).doing("is at 2B7")
    assert shared.for_rank(1).elsewhere() == [
        "rank 0 has not begun since 0 s",
        "rank 2 is at 2B7 since 0 s",
    ]
    assert shared.latest()[:2] == (2, "is at 2B7")
    (one, other), _ = boards
    other.doing("waits for 0F3")
    seen = threading.Event()
    for _ in range(600):  # the watcher writes it down twice a second
        if any("waits for 0F3" in line for line in one.elsewhere()):
            seen.set()
            break
        seen.wait(0.05)
    assert one.elsewhere()[0].startswith("rank 1 waits for 0F3 since ")
    assert one.name(1).startswith("rank 1 (pid ")


def test_a_new_run_begins_with_a_clean_board():
    """Threads go on after a failure."""
    shared = SharedBoard(2)
    shared.for_rank(0).doing("is at 0F0")
    shared.fail("a reason")
    shared.reset()
    assert shared.for_rank(0).failure() is None
    assert shared.line(0) == "rank 0 has not begun since 0 s"


def test_reasons_name_the_rank_whatever_the_error():
    """Penstock's own errors name it themselves; an empty message still has a kind."""
    assert (
        reason_of(StageFailed(1, 2, "2F0", 3, "x"), 1)
        == "rank 1 (stage 2) failed in 2F0 of step 3: x"
    )
    assert reason_of(RunError("all said")) == "all said"
    assert reason_of(KeyError("x"), 3) == "rank 3: KeyError: 'x'"
    assert reason_of(KeyboardInterrupt()) == "KeyboardInterrupt"
    assert describe(1, "is at 1F5", 41.6) == "rank 1 is at 1F5 since 42 s"
