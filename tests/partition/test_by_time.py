"""torchgpipe's time balance through the method."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.errors import PartitionError
from penstock.partition.block import block_partition
from penstock.partition.catalogue import partition
from penstock.profile.profile import Timing

SMALL, LARGE = [9.0] * 3 + [1.0] * 6, [1.0] * 6 + [9.0] * 3


@pytest.fixture(scope="module")
def crossing(make_profile):
    """At 1 sample the first three of nine layers are dear, at 32 the last three."""
    profile = make_profile([1.0] * 9, sizes=(1, 32))
    layers = [
        replace(layer, forward=Timing((1, 32), times))
        for layer, *times in zip(profile, SMALL, LARGE, strict=True)
    ]
    return replace(profile, layers=tuple(layers))


@pytest.mark.parametrize(
    ("stages", "lengths"), [(2, [8, 17]), (4, [4, 4, 5, 12]), (8, [2, 2, 3, 2, 2, 2, 3, 9])]
)
def test_vgg_is_cut_as_in_the_table(vgg, stages, lengths):
    """docs/literature/vgg-19-profile.md once more, this time from a profile."""
    assert partition(vgg, stages, "time") == lengths


def test_forward_and_backward_are_added(make_profile):
    """A layer's cost is its whole step."""
    profile = make_profile([1, 1, 1, 1, 1, 9], [9, 1, 1, 1, 1, 1])
    assert partition(profile, 2, "time") == block_partition([10, 2, 2, 2, 2, 10], 2)


def test_the_largest_measured_size_is_what_counts_unless_another_is_given(crossing):
    """Small micro-batches show launch costs rather than work."""
    assert (
        partition(crossing, 3, "time")
        == partition(crossing, 3, "time", micro_batch=32)
        == block_partition(LARGE, 3)
    )
    assert partition(crossing, 3, "time", micro_batch=1) == block_partition(SMALL, 3)
    assert block_partition(SMALL, 3) != block_partition(LARGE, 3)


@pytest.mark.parametrize("size", [0, -1, "32", True])
def test_a_micro_batch_that_is_no_size_is_refused(vgg, size):
    """Times at 0 samples are 0, and every cut would do."""
    with pytest.raises(
        PartitionError, match=r"micro_batch is .*; it must be a plain number above 0"
    ):
        partition(vgg, 4, "time", micro_batch=size)


def test_an_endless_micro_batch_is_refused(vgg):
    """It is a number above 0, but no cost comes of it."""
    with pytest.raises(PartitionError, match="costs: entry 0 is inf"):
        partition(vgg, 4, "time", micro_batch=float("inf"))
