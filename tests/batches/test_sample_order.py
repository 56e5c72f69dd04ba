"""The order of samples: the same in all processes, another one for each seed and epoch."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from penstock.batches.sample_order import order_checksum, sample_order


@pytest.mark.parametrize("samples", [0, 1, 2, 50])
def test_every_sample_occurs_once(samples):
    """None may be left out of an epoch or be trained twice."""
    assert sorted(sample_order(samples, 3, 7).tolist()) == list(range(samples))


def test_seeds_and_epochs_have_orders_of_their_own():
    """Also those with one sum, or with the same digits: studies compare seeds."""
    pairs = [*itertools.product(range(4), range(4)), (1, 11), (11, 1), (0, 111), (2**32, 0)]
    orders = {tuple(sample_order(50, seed, epoch).tolist()) for seed, epoch in pairs}
    assert len(orders) == len(pairs)


def test_the_order_depends_on_seed_and_epoch_alone():
    """Processes have drawn other random numbers before, and draw theirs as if nothing had been
    drawn here.
    """
    torch.manual_seed(1)
    first = sample_order(20, 5, 6)
    drawn = torch.rand(3)
    torch.manual_seed(1)
    assert torch.equal(torch.rand(3), drawn)
    assert torch.equal(sample_order(20, 5, 6), first)
    assert torch.equal(sample_order(20, np.int64(5), np.int64(6)), first)
    with torch.device("meta"):
        assert torch.equal(sample_order(20, 5, 6), first)


def test_orders_of_released_versions_stay():
    """A run that continues from a checkpoint must not read samples twice."""
    assert sample_order(8, 0, 0).tolist() == [3, 2, 0, 4, 6, 7, 5, 1]
    assert sample_order(8, 0, 1).tolist() == [3, 4, 6, 7, 0, 1, 5, 2]


def test_a_checksum_tells_batches_of_other_samples_or_orders_apart():
    """Processes that have read different samples compare it; digits alone are not enough."""
    batches = [[1, 23], [12, 3], [123], [23, 1], [1, 2, 3], [], [0]]
    checksums = [order_checksum(indices) for indices in batches]
    assert len(set(checksums)) == len(batches)
    assert order_checksum(range(1, 4)) == order_checksum([1, 2, 3])
