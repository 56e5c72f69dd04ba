"""torchgpipe's memory balance through the method."""

from __future__ import annotations

import pytest

from penstock.errors import PartitionError
from penstock.partition.block import block_partition
from penstock.partition.catalogue import partition

OUTPUT, PARAMETERS = [64.0, 32.0, 32.0, 16.0, 8.0, 8.0, 1.0, 0.0], [1, 0, 4, 0, 16, 0, 300, 250]


@pytest.fixture(scope="module")
def profile(make_profile):
    """Outputs shrink along the model while parameters grow, as in a convolutional network."""
    return make_profile(
        [1.0] * 8, parameters=PARAMETERS, output_bytes=OUTPUT
    )  # a batch of 64, 4 bytes a parameter


@pytest.mark.parametrize(("options", "samples", "scale"), [
    ({}, 64, 2.0),
    ({"batch": 16}, 16, 2.0),
    ({"batch": 16, "micro_batches": 8}, 2, 2.0),
    ({"micro_batches": 4}, 16, 2.0),
    ({"param_scale": 5}, 64, 5.0),
    ({"batch": 1, "param_scale": 0}, 1, 0.0),
])  # fmt: skip
def test_a_layer_costs_its_output_and_its_parameters_with_what_they_need(
    profile, options, samples, scale
):
    """The formula of balance_by_size, with each option in it."""
    costs = [
        out * samples + 4 * count * scale for out, count in zip(OUTPUT, PARAMETERS, strict=True)
    ]
    assert partition(profile, 3, "size", **options) == block_partition(costs, 3)


def test_the_options_move_the_cuts(profile):
    """Otherwise the test above would show nothing."""
    assert partition(profile, 3, "size", batch=1) != partition(profile, 3, "size", batch=64)


@pytest.mark.parametrize(
    ("option", "bound"),
    [("batch", "above 0"), ("micro_batches", "above 0"), ("param_scale", "0 or more")],
)
@pytest.mark.parametrize("value", [-1, "8", False])
def test_an_option_that_is_no_amount_is_refused(profile, option, bound, value):
    """The message names the option, not the layer whose cost came out wrong."""
    with pytest.raises(PartitionError, match=f"{option} is .*; it must be a plain number {bound}"):
        partition(profile, 3, "size", **{option: value})
