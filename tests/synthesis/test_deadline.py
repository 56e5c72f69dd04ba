"""The wall-clock limit behind a budget of work."""

from __future__ import annotations

import math

import pytest

from penstock.synthesis import deadline as module
from penstock.synthesis.deadline import Deadline


class Clock:
    """Seconds that a test sets: of the clock, and of those the ones of compilation."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.prepared_s = 7.0


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands still."""
    stopped = Clock()
    monkeypatch.setattr(module.time, "monotonic", lambda: stopped.now_s)
    monkeypatch.setattr(module, "preparation_s", lambda: stopped.prepared_s)
    return stopped


def test_it_is_over_after_its_seconds_and_remembers_that_it_stopped_something(clock):
    """Not before: asking early leaves no trace."""
    deadline = Deadline(3.0)
    clock.now_s += 2.0
    assert not deadline.is_over()
    assert (deadline.spent_s, deadline.remaining_s, deadline.reached) == (2.0, 1.0, False)
    clock.now_s += 1.0
    assert deadline.is_over()
    assert (deadline.remaining_s, deadline.reached) == (0.0, True)
    clock.now_s += 5.0
    assert (deadline.spent_s, deadline.remaining_s) == (8.0, 0.0)
    assert deadline.part(1.0).remaining_s == 0.0


def test_seconds_of_compilation_do_not_count(clock):
    """They are spent once on a machine, and would end its first search."""
    deadline = Deadline(3.0)
    clock.now_s += 10.0
    clock.prepared_s += 9.0
    assert deadline.spent_s == 1.0
    assert not deadline.is_over()


def test_a_part_ends_no_later_than_the_whole(clock):
    """A step of a search gets its own limit."""
    deadline = Deadline(3.0)
    clock.now_s += 1.0
    assert deadline.part(1.0).remaining_s == 1.0
    assert deadline.part(9.0).remaining_s == 2.0
    assert Deadline().remaining_s == math.inf
