"""Meetings of ranks before they run, here over a store in memory, with a thread for each rank."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from torch.distributed import HashStore

from penstock.errors import DeadlineExceeded, PenstockError, RanksDiffer
from penstock.runtime.differences import Description
from penstock.runtime.meeting import Meeting


def described(seed, kind="Linear"):
    """A description of a rank."""
    return Description({"seed": seed}, {"layer": [("0", kind)]}, [], [])


def outcome(meeting, description):
    """None if the ranks agree, else the error."""
    try:
        return meeting.compare(description)
    except PenstockError as error:
        return error


def meet(*descriptions):
    """What all ranks get."""
    store = HashStore()
    size = len(descriptions)
    meetings = [Meeting(store, rank, size, 30.0) for rank in range(size)]
    with ThreadPoolExecutor(size) as ranks:
        return list(ranks.map(outcome, meetings, descriptions))


def test_ranks_that_agree_go_on():
    """Any number of times."""
    assert meet(described(seed="0"), described(seed="0"), described(seed="0")) == [None] * 3


def test_every_rank_has_the_same_message_with_all_differences():
    """Whichever rank's output is read says all."""
    errors = meet(described(seed="0"), described(seed="0"), described(seed="1", kind="Conv2d"))
    assert all(isinstance(error, RanksDiffer) for error in errors)
    assert len({str(error) for error in errors}) == 1
    assert errors[0].differences == (
        "seed: 0 on ranks 0 and 1; 1 on rank 2",
        "layer 0: Linear on ranks 0 and 1; Conv2d on rank 2",
    )


def test_a_rank_that_fails_lets_the_others_know_why():
    """They would wait for it until the deadline."""
    store = HashStore()
    Meeting(store, 1, 2, 30.0).fail(ValueError("no such layer"))
    with pytest.raises(
        PenstockError, match="rank 1 could not make its Pipeline: ValueError: no such layer"
    ):
        Meeting(store, 0, 2, 30.0).compare(described(seed="0"))


def test_a_rank_that_does_not_come_is_named_at_the_deadline():
    """For example because it is still reading its data."""
    with pytest.raises(
        DeadlineExceeded, match="rank 0 waits for ranks 1 and 2 to make the same Pipeline"
    ):
        Meeting(HashStore(), 0, 3, 0.01).compare(described(seed="0"))
