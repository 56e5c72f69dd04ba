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
from typing import Final, Literal

from penstock.cluster.device import Device
from penstock.errors import SettingError
from penstock.profile.counts import LayerCounts, ModelCounts
from penstock.profile.profile import Phase, Profile
from penstock.profile.roofline import UPDATE_TRAFFIC, Roof, Seconds, analytic_profile, halves

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

Units = Literal["shared", "separate"]


def fpga(
    counts: ModelCounts,
    board: Device,
    *,
    sizes: Sequence[int] | None = None,
    dtype: str = "float32",
    on_chip: bool | None = None,
    units: Units = "shared",
) -> Profile:
    """Estimate a model's profile on an FPGA board.

    Activations saved for the backward go through the DDR once in each direction, wherever the
    weights are.

    Args:
        counts: of the model.
        board: with a peak for `dtype` (`dsp_flops`), the DDR's bandwidth, and its on-chip bytes.
        sizes: micro-batch sizes for which to estimate; by default the counts' batch, halved down to
            1.
        dtype: of the numbers.
        on_chip: whether weights and gradients stay on the chip. None: if those of the whole model
            fit.
            Of a partitioned model each board holds a part: call `fits_on_chip` for every stage, and
            correct its seconds with `off_chip_seconds`.
        units: "shared": forward and backward run on the same units, one after the other, each with
            all DSPs (1F1B-AS). "separate": both have their own units, and DSPs and bandwidth are
            divided so that both take equally long for the whole model, F + B, and run at the same
            time (FBP-AS).

    Raises:
        SettingError: a figure of the board is missing, or a size is below 1.
    """
    points = tuple(sorted(set(sizes if sizes is not None else halves(counts.batch))))
    if not points or points[0] < 1:
        raise SettingError(f"sizes {list(points)} must be 1 or more")
    roof = Roof.of(board, dtype, counts.dtype_bytes)
    if on_chip is None:
        on_chip = fits_on_chip(counts.parameter_bytes * roof.narrower, board)
    seconds_on_all_units = partial(_seconds_on_all_units, roof, on_chip)

    def seconds(layer: LayerCounts, phase: Phase, samples: float) -> float:
        """Return the seconds of one phase of a layer with its share of the units."""
        share = forward_share[int(samples)]
        if phase != "forward" and units == "separate":
            share = 1 - share
        return seconds_on_all_units(layer, phase, samples) / share

    forward_share = dict.fromkeys(points, 1.0)
    if units == "separate":
        for size in points:
            forward_share[size] = _forward_share(counts, size, seconds_on_all_units)

    return replace(
        analytic_profile(counts, points, roof, seconds),
        machine={
            "device": f"fpga: {board.name}, by operation counts at {dtype}",
            "weights": "on the chip" if on_chip else "in the DDR",
            "units": units,
        },
        device=board.name,
        update_s_per_byte=0.0 if on_chip else UPDATE_TRAFFIC / roof.bytes_per_s,
    )


def _seconds_on_all_units(
    roof: Roof, on_chip: bool, layer: LayerCounts, phase: Phase, samples: float
) -> float:
    """Return the seconds of one phase of a layer with all DSPs and the whole bandwidth."""
    if not layer.work(phase):
        return 0.0
    products = sum(work.flops_at(samples) for work in layer.work(phase) if work.family != "other")
    weights = 0 if on_chip else _WEIGHT_PASSES[phase] * layer.parameter_bytes
    moved = roof.narrower * (weights + samples * layer.activation_bytes_per_sample)
    return max(products / (roof.flops_per_s * REACHED), moved / roof.bytes_per_s)


def _forward_share(counts: ModelCounts, samples: float, seconds: Seconds) -> float:
    """Return the share of the DSPs for the forward units: its share of the work."""
    forward = sum(seconds(layer, "forward", samples) for layer in counts)
    backward = sum(seconds(layer, "backward", samples) for layer in counts)
    return forward / (forward + backward) if forward and backward else 0.5


def dsp_flops(dsps: int, clock_hz: float, dsps_per_product: float = 1.0) -> float:
    """Return the FLOP/s of `dsps` DSP slices at a clock.

    Every `dsps_per_product` slices compute a multiply-add, two operations, per cycle.

    >>> dsp_flops(6840, 200e6) / 1e12
    2.736
    """
    return 2.0 * dsps * clock_hz / dsps_per_product


def fits_on_chip(weight_bytes: float, board: Device) -> bool:
    """Return whether weights of this size fit on the chip with their gradients (BaPipe's 2w)."""
    return 2 * weight_bytes <= board.on_chip_bytes


def off_chip_seconds(
    forward_s: float, backward_s: float, weight_bytes: float, board: Device
) -> tuple[float, float]:
    """Correct the seconds of a stage for weights that do not fit on the chip.

    Unchanged if they fit. Otherwise every micro-batch streams them through the DDR during the
    computation: the longer of the two counts.

    Args:
        forward_s, backward_s: with the weights on the chip.
        weight_bytes: of the stage.
        board: the stage's board.

    Returns:
        The corrected seconds of forward and backward.

    Raises:
        SettingError: the board's bandwidth is not known.
    """
    if fits_on_chip(weight_bytes, board):
        return forward_s, backward_s
    if board.memory_bytes_per_s is None:
        raise SettingError(
            f"board {board.name} has no memory_bytes_per_s, and {weight_bytes:,.0f} bytes of "
            f"weights do not fit on its chip of {board.on_chip_bytes:,} bytes"
        )
    pass_s = weight_bytes / board.memory_bytes_per_s
    return (
        max(forward_s, _WEIGHT_PASSES["forward"] * pass_s),
        max(backward_s, _WEIGHT_PASSES["backward"] * pass_s),
    )


def streamed_transfer_seconds(
    count: float, bandwidth_bytes_per_s: float, compute_s: float
) -> float:
    """Return the seconds that a transfer adds to a stage that streams its output while it computes.

    0 unless the link is slower than the computation.

    Args:
        count: bytes.
        bandwidth_bytes_per_s: of the link.
        compute_s: seconds of the stage.
    """
    return max(count / bandwidth_bytes_per_s - compute_s, 0.0)
