"""Batches: every sample once, in an order that all ranks share and that nothing else can disturb."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import SettingError
from penstock.training.data.batches import Dataset, batches, count_batches


def numbered(samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs 0, 1, 2, … and targets ten times as large, so that a pair torn apart shows."""
    inputs = torch.arange(samples, dtype=torch.float32)
    return inputs, inputs * 10


def order(samples: int, batch: int, **options) -> list[float]:
    """The samples in the order in which the batches bring them."""
    return [x for part, _ in batches(*numbered(samples), batch, **options) for x in part.tolist()]


@settings(deadline=None, max_examples=60)
@given(
    samples=st.integers(1, 60),
    batch=st.integers(1, 70),
    seed=st.integers(-5, 2**70),
    epoch=st.integers(0, 9),
)
def test_an_epoch_has_every_sample_once_with_its_own_target(samples, batch, seed, epoch):
    """A sample twice or a target of another sample would be learned, silently."""
    pairs = list(batches(*numbered(samples), batch, seed=seed, epoch=epoch))
    assert sorted(x for part, _ in pairs for x in part.tolist()) == list(range(samples))
    assert all(torch.equal(x * 10, y) for x, y in pairs)
    assert all(len(x) == batch for x, _ in pairs[:-1])
    assert len(pairs) == count_batches(samples, batch)


@settings(deadline=None, max_examples=40)
@given(samples=st.integers(1, 60), batch=st.integers(1, 60))
def test_drop_last_leaves_only_whole_batches_as_many_as_counted(samples, batch):
    """A schedule of fixed micro-batch size cannot take a smaller batch."""
    if samples < batch:
        with pytest.raises(
            SettingError,
            match=f"no batch of {batch} can be made of {samples} samples with drop_last",
        ):
            batches(*numbered(samples), batch, seed=0, epoch=0, drop_last=True)
        return
    sizes = [len(x) for x, _ in batches(*numbered(samples), batch, seed=0, epoch=0, drop_last=True)]
    assert sizes == [batch] * count_batches(samples, batch, drop_last=True)


def test_the_same_seed_and_epoch_give_the_same_order_whatever_the_global_generators_do():
    """Ranks draw different numbers for dropout, and must still agree on the batch."""
    torch.manual_seed(1)
    first = order(100, 7, seed=3, epoch=2)
    torch.manual_seed(99)
    torch.rand(5)
    random.seed(4)
    assert order(100, 7, seed=3, epoch=2) == first


def test_the_order_stays_the_same_when_global_numbers_are_drawn_between_batches():
    """Dropout draws from the global generator in every step, so between any two batches."""
    quiet = order(50, 8, seed=0, epoch=0)
    disturbed = []
    for part, _ in batches(*numbered(50), 8, seed=0, epoch=0):
        torch.rand(3)
        disturbed += part.tolist()
    assert disturbed == quiet


def test_shuffling_does_not_move_the_global_generators():
    """Otherwise a run with shuffling would drop out other units than one without."""
    torch.manual_seed(5)
    random.seed(5)
    before, python_before = torch.get_rng_state(), random.getstate()
    list(batches(*numbered(30), 4, seed=0, epoch=0))
    assert torch.equal(torch.get_rng_state(), before)
    assert random.getstate() == python_before


def test_another_epoch_and_another_seed_give_other_orders_that_never_coincide():
    """With seed + epoch as the seed, epoch 1 of seed 0 was epoch 0 of seed 1: the seeds of a study
    shared their orders.
    """
    orders = {
        tuple(order(40, 5, seed=seed, epoch=epoch)) for seed in range(6) for epoch in range(6)
    }
    assert len(orders) == 36


def test_without_shuffling_the_samples_keep_their_order():
    """Evaluation compares predictions with a list."""
    assert order(10, 3, seed=1, epoch=1, shuffle=False) == list(range(10))


def test_the_batch_size_does_not_change_the_order():
    """A run with another batch size sees the same samples in the same order."""
    assert order(30, 4, seed=1, epoch=0) == order(30, 11, seed=1, epoch=0)


@pytest.mark.parametrize("shuffle", [True, False])
def test_batches_are_copies_so_that_work_in_place_leaves_the_data_alone(shuffle):
    """A model whose first layer works in place would otherwise spoil the next epoch."""
    inputs, targets = numbered(6)
    for x, y in batches(inputs, targets, 2, seed=0, epoch=0, shuffle=shuffle):
        x.zero_()
        y.zero_()
    assert torch.equal(inputs, numbered(6)[0])
    assert torch.equal(targets, numbered(6)[1])


@pytest.mark.parametrize("batch", [0, -1, 2.0, True])
def test_a_batch_that_is_no_positive_whole_number_is_refused_at_the_call(batch):
    """A generator would complain only at the first batch, far from who chose the number."""
    with pytest.raises(SettingError, match=f"batch is a whole number of 1 or more, not {batch!r}"):
        batches(*numbered(4), batch, seed=0, epoch=0)


def test_inputs_and_targets_of_different_numbers_are_refused():
    """The targets beyond would be lost, or the missing ones found too late."""
    with pytest.raises(SettingError, match="4 inputs and 3 targets"):
        batches(torch.zeros(4), torch.zeros(3), 2, seed=0, epoch=0)


def test_no_samples_at_all_are_refused():
    """Who trains for a number of steps would wait for the first one for ever."""
    with pytest.raises(
        SettingError, match="no batch of 2 can be made of 0 samples: choose a smaller batch"
    ):
        batches(torch.zeros(0), torch.zeros(0), 2, seed=0, epoch=0)


def test_a_data_set_prints_its_facts_and_not_its_tensors_and_can_be_compared():
    """The equality of tensors is a tensor: a dataclass's own == would raise."""
    parts = [torch.arange(3.0) for _ in range(4)]
    one, same_again = (
        Dataset("d", *parts, classes=3, task="classify", description="three numbers")
        for _ in range(2)
    )
    assert repr(one) == "Dataset(name='d', classes=3, task='classify', description='three numbers')"
    assert one == one  # noqa: PLR0124  # the comparison itself is under test
    assert one != same_again
