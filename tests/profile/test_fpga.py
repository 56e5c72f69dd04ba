"""FPGA boards: what limits a layer, where the weights are, and whose units run what."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.cluster.device import Device
from penstock.errors import SettingError
from penstock.profile.counts import LayerCounts, ModelCounts, Work
from penstock.profile.fpga import (
    REACHED,
    dsp_flops,
    fits_on_chip,
    fpga,
    off_chip_seconds,
    streamed_transfer_seconds,
)

BOARD = Device(
    "toy",
    10**9,
    "fpga",
    flops=(("float32", 1000.0), ("float16", 2000.0)),
    memory_bytes_per_s=100.0,
    on_chip_bytes=800,
)


def layer(name, flops, weights, saved_bytes):
    """Products of `flops` forward and twice as many backward; ReLUs that pass by."""
    one = (
        Work("mm", "matrix", 1, 0.0, flops, 0.0, 1.0),
        Work("relu", "other", 1, 0.0, 1e9, 0.0, 1e9),
    )
    two = (Work("mm", "matrix", 2, 0.0, 2 * flops, 0.0, 1.0),)
    return LayerCounts(name, "Toy", one, two, one, one, weights // 4, weights, 0, saved_bytes, 8.0)


def model(*layers, batch=4):
    """Counts of these layers."""
    return ModelCounts(tuple(layers), "0123456789ab", 8.0, 8.0, batch)


SMALL = model(layer("a", 800.0, 100, 10.0), layer("b", 80.0, 300, 10.0))


def test_products_at_the_dsps_rate_bound_a_layer_whose_weights_are_on_the_chip():
    """Elements pass through a ReLU on the way; nothing is launched."""
    estimated = fpga(SMALL, BOARD, sizes=(1, 2))
    assert estimated.machine["weights"] == "on the chip"
    assert estimated.layers[0].forward.median_s == pytest.approx(
        (1 / REACHED * 0.8, 2 / REACHED * 0.8)
    )
    assert estimated.layers[0].backward.median_s[0] == pytest.approx(
        2 * estimated.layers[0].forward.median_s[0]
    )
    assert estimated.update_s_per_byte == 0
    assert (estimated.device, estimated.sizes) == ("toy", (1, 2))


def test_weights_off_the_chip_come_through_the_ddr_in_every_micro_batch_whatever_its_size():
    """Read for F, read again for I, and the gradients' sum read and written for W."""
    estimated = fpga(SMALL, BOARD, sizes=(1, 2), on_chip=False)
    second = estimated.layers[1]
    assert second.forward.median_s == pytest.approx((3.1, 3.2))
    assert (
        second.input_grad.median_s[0],
        second.weight_grad.median_s[0],
        second.backward.median_s[0],
    ) == pytest.approx((3.1, 6.1, 9.1))
    assert estimated.update_s_per_byte == pytest.approx(0.05)


def test_weights_stay_on_the_chip_if_weights_and_gradients_fit_together():
    """BaPipe counts 2w."""
    assert fits_on_chip(400, BOARD)
    assert not fits_on_chip(401, BOARD)
    too_large = model(layer("a", 800.0, 100, 10.0), layer("b", 80.0, 304, 10.0))
    assert fpga(too_large, BOARD).machine["weights"] == "in the DDR"
    assert fpga(too_large, BOARD, dtype="float16").machine["weights"] == "on the chip"


@given(st.floats(0.1, 50), st.floats(0.1, 50), st.integers(1, 2000))
@settings(deadline=None, max_examples=60)
def test_a_stage_off_the_chip_takes_no_less_and_on_it_the_same(forward_s, backward_s, weight_bytes):
    """How a planner corrects the stages of a model that fits on no board whole."""
    slower = off_chip_seconds(forward_s, backward_s, weight_bytes, BOARD)
    if 2 * weight_bytes <= 800:
        assert slower == (forward_s, backward_s)
    else:
        assert slower == pytest.approx(
            (max(forward_s, weight_bytes / 100), max(backward_s, 3 * weight_bytes / 100))
        )


def test_separate_units_share_the_dsps_so_that_both_directions_take_forward_and_backward_together():
    """FBP-AS: each takes F + B, at the same time."""
    shared, separate = (
        fpga(SMALL, BOARD, sizes=(2,)),
        fpga(SMALL, BOARD, sizes=(2,), units="separate"),
    )
    whole = sum(shared.step_seconds(2))
    assert sum(separate.seconds("forward", 2)) == pytest.approx(whole)
    assert sum(separate.seconds("backward", 2)) == pytest.approx(whole)
    assert separate.machine["units"] == "separate"


def test_dsps_and_clock_make_the_peak():
    """A product and its sum in each slice and cycle; float32 takes several slices."""
    assert dsp_flops(6840, 200e6) == 2.736e12
    assert dsp_flops(6840, 200e6, 5) == pytest.approx(0.5472e12)


def test_a_stream_waits_for_a_link_only_where_the_link_is_the_slower():
    """Its output leaves while it is computed."""
    assert streamed_transfer_seconds(100, 50, 3.0) == 0
    assert streamed_transfer_seconds(100, 20, 3.0) == 2


def test_a_board_without_bandwidth_is_refused():
    """Weights that do not fit must come from somewhere."""
    bare = Device("bare", 10**9, "fpga", flops=(("float32", 1.0),))
    with pytest.raises(SettingError, match="bare has no memory bandwidth"):
        fpga(SMALL, bare)
    with pytest.raises(
        SettingError, match="bare has no memory_bytes_per_s, and 100 bytes of weights"
    ):
        off_chip_seconds(1.0, 1.0, 100, bare)
    with pytest.raises(SettingError, match=r"sizes \[0\] must be 1 or more"):
        fpga(SMALL, BOARD, sizes=(0,))
