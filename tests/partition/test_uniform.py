"""Even layer counts."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import PartitionError
from penstock.partition.catalogue import partition
from penstock.partition.uniform import partition_uniform


@pytest.mark.parametrize(("layers", "stages", "lengths"), [
    (10, 4, [3, 3, 2, 2]), (8, 4, [2, 2, 2, 2]), (5, 5, [1] * 5), (7, 1, [7]), (11, 3, [4, 4, 3]),
])  # fmt: skip
def test_the_residual_goes_to_the_first_stages(layers, stages, lengths):
    """DeepSpeed's rule; torchgpipe's start gives it to the last."""
    assert partition_uniform(layers, stages) == lengths


@settings(deadline=None)
@given(st.data())
def test_lengths_differ_by_one_at_most_and_never_rise(data):
    """That is all that uniform means."""
    layers = data.draw(st.integers(1, 200))
    lengths = partition_uniform(layers, data.draw(st.integers(1, layers)))
    assert sum(lengths) == layers
    assert max(lengths) - min(lengths) <= 1
    assert lengths == sorted(lengths, reverse=True)


def test_costs_do_not_matter(make_profile):
    """The method is for models without a useful profile."""
    assert partition(make_profile([100, 0, 0, 0, 0]), 2, "uniform") == [3, 2]


def test_more_stages_than_layers_are_refused():
    """DeepSpeed makes empty stages of them; we do not."""
    with pytest.raises(PartitionError, match="cannot make 5 stages from 4 layers"):
        partition_uniform(4, 5)
