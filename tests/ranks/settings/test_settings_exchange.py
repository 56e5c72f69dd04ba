"""Comparison of ranks before they run, over a store in memory with a thread for each rank."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from torch.distributed import HashStore

from penstock.errors import DeadlineExceeded, PenstockError, RanksDiffer, RunError
from penstock.ranks.settings.setting_differences import Description
from penstock.ranks.settings.settings_exchange import SettingsExchange, missing_keys


def described(seed, kind="Linear"):
    """Return the description of a rank."""
    return Description({"seed": seed}, {"layer": [("0", kind)]}, [], [])


def outcome(meeting, description):
    """Return None if the ranks agree, else the error."""
    try:
        return meeting.compare(description)
    except PenstockError as error:
        return error


def meet(*descriptions):
    """Return the outcomes of all ranks."""
    store = HashStore()
    size = len(descriptions)
    meetings = [SettingsExchange(store, rank, size, 30.0) for rank in range(size)]
    with ThreadPoolExecutor(size) as ranks:
        return list(ranks.map(outcome, meetings, descriptions))


def test_ranks_that_agree_continue():
    """They can be compared any number of times."""
    assert meet(described(seed="0"), described(seed="0"), described(seed="0")) == [None] * 3


def test_every_rank_has_the_same_message_with_all_differences():
    """The output of any rank suffices to see all differences."""
    errors = meet(described(seed="0"), described(seed="0"), described(seed="1", kind="Conv2d"))
    assert all(isinstance(error, RanksDiffer) for error in errors)
    assert len({str(error) for error in errors}) == 1
    assert errors[0].differences == (
        "seed: 0 on ranks 0, 1; 1 on rank 2",
        "layer 0: Linear on ranks 0, 1; Conv2d on rank 2",
    )


def test_a_failed_rank_reports_its_reason_to_the_others():
    """Otherwise they would wait until the deadline."""
    store = HashStore()
    SettingsExchange(store, 1, 2, 30.0).fail(ValueError("no such layer"))
    with pytest.raises(
        PenstockError, match="rank 1 could not make its Pipeline: ValueError: no such layer"
    ):
        SettingsExchange(store, 0, 2, 30.0).compare(described(seed="0"))


def test_a_failure_after_a_rank_has_sent_its_key_does_not_end_the_exchange():
    """The key may arrive between the look at the keys and the look at failures."""
    store = HashStore()

    def send_and_fail():
        store.set("0/1", "")
        raise RunError("rank 1 failed at a later point")

    assert missing_keys(store, ["0/1"], send_and_fail, 30.0) == []
    with pytest.raises(RunError, match="rank 1 failed at a later point"):
        missing_keys(store, ["0/1", "0/2"], send_and_fail, 30.0)


def test_a_missing_rank_is_named_at_the_deadline():
    """It may still be reading its data."""
    with pytest.raises(
        DeadlineExceeded,
        match=r"rank 0 has waited \d+ s for ranks 1, 2 to make the same Pipeline",
    ):
        SettingsExchange(HashStore(), 0, 3, 0.01).compare(described(seed="0"))
