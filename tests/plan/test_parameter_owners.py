"""The replica that owns a parameter at level 1 of ZeRO."""

from __future__ import annotations

import itertools

import pytest

from penstock.plan.parameter_owners import assign_owners


def test_every_parameter_has_one_owner_and_the_largest_are_spread():
    """Greedy by bytes; parameters without state count nothing."""
    sizes = [5, 9, 0, 8, 2]
    assert assign_owners(sizes, 2, stage=0) == [1, 0, 0, 1, 0]
    assert set(assign_owners(sizes, 3, stage=0)) == {0, 1, 2}


@pytest.mark.parametrize("replicas", [2, 3, 4])
def test_no_division_of_the_largest_first_is_far_from_the_best(replicas):
    """Graham 1969: largest first is at most 4/3 - 1/(3 replicas) of the best, here by trying all."""
    sizes = [7, 7, 6, 5, 3, 3, 1]

    def most(owners):
        """Return the bytes of the replica with the most."""
        return max(
            sum(size for size, owner in zip(sizes, owners, strict=True) if owner == replica)
            for replica in range(replicas)
        )

    best = min(map(most, itertools.product(range(replicas), repeat=len(sizes))))
    limit = (4 / 3 - 1 / (3 * replicas)) * best
    assert most(assign_owners(sizes, replicas, stage=0)) <= limit


def test_stages_on_the_same_ranks_give_the_odd_parameter_to_different_replicas():
    """Chimera's ranks hold several stages; with three parameters each the sums are equal."""
    first, second = (assign_owners([4, 4, 4], 2, stage) for stage in range(2))
    assert [first.count(0) + second.count(0), first.count(1) + second.count(1)] == [3, 3]
