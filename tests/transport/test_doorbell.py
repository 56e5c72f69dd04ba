"""Doors and bells, both sides in one process."""

from __future__ import annotations

import os
import threading

import pytest

from penstock.transport.doorbell import Door


@pytest.fixture
def doors():
    """A door of three ranks, as its owner has it and as another opens it."""
    mine = Door.make(3)
    yield mine, Door.open(os.getpid(), mine.segment.fd)
    mine.segment.close()


def test_who_opens_a_door_knows_it_by_its_nonce(doors):
    """And no two have the same."""
    mine, other = doors
    assert mine.nonce == other.nonce
    assert len(mine.nonce) == 32
    another = Door.make(3)
    assert another.nonce != mine.nonce
    another.segment.close()


def test_every_rank_has_a_line_of_its_own(doors):
    """Where it begins, and its bell."""
    mine, other = doors
    for source in range(3):
        other.begin(source, 1000 + source)
        other.bell(source).set()
    assert [mine.first(source) for source in range(3)] == [1000, 1001, 1002]
    other.bell(1).ring()
    assert [mine._words[8 * (source + 1)] for source in range(3)] == [1, 0, 1]
    assert not mine.stopped
    assert not other.left
    mine.leave()
    assert other.left


def test_who_sleeps_is_woken(doors):
    """For an hour, if the bell does not ring."""
    mine, other = doors
    bell = mine.bell(0)
    bell.set()
    thread = threading.Thread(target=bell.sleep, args=(3600.0,))
    thread.start()
    while thread.is_alive():
        other.bell(0).set()  # whether he slept already or not
        other.bell(0).ring()
    assert mine._words[8] == 0


def test_nobody_sleeps_who_was_rung_for_between(doors):
    """He has set his bell, looked, seen nothing; and then it came."""
    mine, other = doors
    bell = mine.bell(2)
    bell.set()
    other.bell(2).ring()
    bell.sleep(3600.0)
    bell.set()
    bell.clear()
    bell.sleep(3600.0)


def test_a_sleeper_wakes_by_himself_when_his_time_is_over(doors):
    """Else a peer that is gone would never be missed."""
    bell = doors[0].bell(0)
    bell.set()
    bell.sleep(0.001)
    assert doors[0]._words[8] == 1


def test_stopping_the_run_wakes_whoever_sleeps(doors):
    """On whatever line."""
    mine, other = doors
    bells = [mine.bell(source) for source in range(3)]
    for bell in bells:
        bell.set()
    other.stop()
    for bell in bells:
        bell.sleep(3600.0)
    assert mine.stopped
