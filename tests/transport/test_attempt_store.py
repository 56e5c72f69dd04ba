"""Attempts under torchrun: restarted ranks read nothing of the attempt before."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from torch.distributed import HashStore

from penstock.errors import RunError
from penstock.transport.attempt_store import separate_attempts


def attempt(store, ranks):
    """Let all ranks of an attempt find each other; return what each reads of another's key."""

    def rank(number):
        own = separate_attempts(store, number, ranks, timeout_s=30.0)
        assert own.num_keys() >= 0
        seen = own.check(["address"])
        if number == 0:
            own.set("address", "here")
        return seen

    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(rank, range(ranks)))


def test_every_attempt_has_keys_of_its_own_though_greetings_of_earlier_ones_are_there():
    """Also if ranks are fewer or more than before, and if some of an attempt never came."""
    store = HashStore()
    store.set("greeting/1", "of a rank that has ended")
    for ranks in (3, 2, 4, 1, 3):
        seen = attempt(store, ranks)
        assert seen[0] is False, "an address of an earlier attempt"


def test_a_rank_that_does_not_come_is_named():
    """torchrun has started all of them, so it is not slow."""
    with pytest.raises(RunError, match=r"rank \[1\] did not join"):
        separate_attempts(HashStore(), 0, 2, timeout_s=0.0)
    with pytest.raises(RunError, match=r"ranks \[1, 2\] did not join"):
        separate_attempts(HashStore(), 0, 3, timeout_s=0.0)
    with pytest.raises(RunError, match="rank 0 did not join"):
        separate_attempts(HashStore(), 1, 2, timeout_s=0.0)
