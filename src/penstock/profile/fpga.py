"""Estimate profiles of FPGA boards, as in BaPipe, from operation counts, DSPs, clock and memory.

A layer is a pipeline of its own: its output is sent while it is computed, and elements pass through
activations and similar layers on the way. So there are no launches and only products take time, at
the DSPs' rate; traffic to and from the board's DDR overlaps:

    seconds of a phase = max(operations of products / (peak x reached), bytes through the DDR / its
    bandwidth)

Source: Zhao et al. 2020, BaPipe (docs/literature/bapipe.md; its own numbers are not public): the
inputs of its exploration, in our own formulas.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Final

from penstock.cluster.device import Device
from penstock.errors import SettingError
from penstock.profile.counts import LayerCounts, ModelCounts
from penstock.profile.profile import Phase, Profile
from penstock.profile.roofline import UPDATE_TRAFFIC, Roof, analytic_profile, halves

#: Share of the DSPs' peak that a layer's pipeline reaches: assumed; FPDeep, by the same group,
#: reports about that on VGG-16.
REACHED: Final = 0.8
#: How many times a phase moves all weights if they are not on the chip: F reads them; I reads them;
#: W reads and writes the accumulated gradients; B does both I and W.
_WEIGHT_PASSES: Final[dict[Phase, int]] = {
    "forward": 1,
    "backward": 3,
    "input_grad": 1,
    "weight_grad": 2,
}


def fpga(
    counts: ModelCounts,
    board: Device,
    *,
    sizes: Sequence[int] | None = None,
    dtype: str = "float32",
    on_chip: bool | None = None,
) -> Profile:
    """Estimate a model's profile on an FPGA board.

    Forward and backward run on the same units, one after the other, each with all DSPs (1F1B-AS).
    Activations saved for the backward go through the DDR once in each direction, wherever the
    weights are.

    Args:
        counts: of the model.
        board: with a peak for `dtype`, the DDR's bandwidth, and its on-chip bytes.
        sizes: micro-batch sizes for which to estimate; by default the counts' batch, halved down to
            1.
        dtype: of the numbers.
        on_chip: whether weights and gradients stay on the chip. None: if those of the whole model
            fit. Of a partitioned model each board holds a part: see `fits_on_chip`.

    Raises:
        SettingError: a figure of the board is missing, or a size is below 1.
    """
    points = tuple(sorted(set(sizes if sizes is not None else halves(counts.batch))))
    if not points or points[0] < 1:
        raise SettingError(f"sizes {list(points)} must be 1 or more")
    roof = Roof.of(board, dtype, counts.dtype_bytes)
    if on_chip is None:
        on_chip = fits_on_chip(counts.parameter_bytes * roof.narrower, board)
    seconds = partial(_phase_seconds, roof, on_chip)
    return replace(
        analytic_profile(counts, points, roof, seconds),
        machine={
            "device": f"fpga: {board.name}, by operation counts at {dtype}",
            "weights": "on the chip" if on_chip else "in the DDR",
            "units": "shared",
        },
        device=board.name,
        update_s_per_byte=0.0 if on_chip else UPDATE_TRAFFIC / roof.bytes_per_s,
    )


def _phase_seconds(
    roof: Roof, on_chip: bool, layer: LayerCounts, phase: Phase, samples: float
) -> float:
    """Return the seconds of one phase of a layer with all DSPs and the whole bandwidth."""
    if not layer.work(phase):
        return 0.0
    products = sum(work.flops_at(samples) for work in layer.work(phase) if work.family != "other")
    weights = 0 if on_chip else _WEIGHT_PASSES[phase] * layer.parameter_bytes
    moved = roof.narrower * (weights + samples * layer.activation_bytes_per_sample)
    return max(products / (roof.flops_per_s * REACHED), moved / roof.bytes_per_s)


def fits_on_chip(weight_bytes: float, board: Device) -> bool:
    """Return whether weights of this size fit on the chip with their gradients (BaPipe's 2w)."""
    return 2 * weight_bytes <= board.on_chip_bytes
