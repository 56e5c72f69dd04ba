"""FPGA boards: what limits a layer, where the weights are, and whose units run what."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.cluster.device import Device
from penstock.errors import SettingError
from penstock.profile.counts import LayerCounts, ModelCounts, Work
from penstock.profile.fpga import REACHED, fits_on_chip, fpga

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
    estimated = fpga(SMALL, replace(BOARD, on_chip_bytes=799), sizes=(1, 2))
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


def test_a_board_without_bandwidth_is_refused():
    """Weights that do not fit must come from somewhere."""
    bare = Device("bare", 10**9, "fpga", flops=(("float32", 1.0),))
    with pytest.raises(SettingError, match="bare has no memory bandwidth"):
        fpga(SMALL, bare)
    with pytest.raises(SettingError, match=r"sizes \[0\] must be 1 or more"):
        fpga(SMALL, BOARD, sizes=(0,))
