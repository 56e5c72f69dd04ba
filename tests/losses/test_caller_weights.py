"""Counts of micro-batches by a function of the caller."""

from __future__ import annotations

import math

import pytest
import torch

from penstock.batches.batch import make_batch
from penstock.errors import SettingError
from penstock.losses.call import LossCall
from penstock.losses.caller_weights import CallerCounts, number_of

CPU = torch.device("cpu")


def test_the_function_is_called_with_the_targets_of_every_micro_batch():
    """In their order, also for a tensor of one number."""
    batch = make_batch(torch.ones(5, 2), torch.arange(5), 2, step=0, training=True)
    call = LossCall(torch.nn.functional.cross_entropy, CPU)
    assert CallerCounts(lambda target: target.sum(), call).of(batch) == [3.0, 7.0]
    assert CallerCounts(len, call).of(batch) == [3.0, 2.0]


def test_counts_are_read_from_targets_in_host_memory_where_that_is_possible():
    """Those on a device would make the host wait; a function that fails on the host gets them, also
    in later batches.
    """
    batch = make_batch(torch.ones(5, 2), torch.arange(5), 2, step=0, training=True)
    call = LossCall(torch.nn.functional.cross_entropy, torch.device("meta"))
    assert CallerCounts(lambda target: target.sum(), call).of(batch) == [3.0, 7.0]
    devices = []

    def count(target):
        devices.append(target.device.type)
        if target.is_cpu:
            raise RuntimeError("not on this device")
        return len(target)

    for _ in range(2):
        assert CallerCounts(count, call).of(batch) == [3.0, 2.0]
    assert devices == ["cpu", *["meta"] * 4]


def test_a_refused_count_names_its_micro_batch():
    """The first of them."""
    batch = make_batch(torch.ones(5, 2), torch.arange(5), 3, step=0, training=True)
    call = LossCall(torch.nn.functional.cross_entropy, CPU)
    with pytest.raises(SettingError, match=r"for micro-batch 1 it returned -1$"):
        CallerCounts(lambda target: 1 if target[0] == 0 else -1, call).of(batch)


@pytest.mark.parametrize(
    ("count", "words"),
    [
        (-1, "-1"),
        (math.nan, "nan"),
        (math.inf, "inf"),
        (torch.tensor(math.inf), "inf"),
        (True, "True"),
        (torch.tensor([True]), "True"),
        (torch.ones(2), "Tensor"),
        ("3", "str"),
        (None, "NoneType"),
    ],
)
def test_what_is_no_finite_number_of_0_or_more_is_refused_with_its_micro_batch(count, words):
    """An infinite weight would make those of all others NaN."""
    with pytest.raises(SettingError, match=rf"for micro-batch 4 it returned {words}$"):
        number_of(count, 4)
    for fine in (0, 2.5, torch.tensor(3), torch.tensor([[4.0]])):
        assert number_of(fine, 0) == float(fine)
