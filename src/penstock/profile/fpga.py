"""Profiles of FPGA boards, as BaPipe has them: from operation counts, DSPs and clock, and what fits
on the chip.

A layer is a pipeline of its own: its output leaves while it is computed, and elements pass through
activations and the like on the way. So there is no launch and only products take time, at the DSPs'
rate; what must come from or go to the board's DDR does so meanwhile:

    seconds of a phase = max(operations of products / (peak x reached), bytes through the DDR / its
    bandwidth)

Source: Zhao et al. 2020, BaPipe (LITERATURE 4.3; its own numbers are not public): the inputs of its
exploration, in formulas of ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final, Literal

from penstock.cluster.device import Device
from penstock.errors import SettingError
from penstock.profile.counts import LayerCounts, ModelCounts
from penstock.profile.profile import Phase, Profile
from penstock.profile.roofline import UPDATE_TRAFFIC, Roof, Seconds, analytic_profile, halves

#: Share of the DSPs' peak that a layer's pipeline reaches: assumed; FPDeep, by the same group,
#: reports about that on VGG-16.
REACHED: Final = 0.8
#: How often a phase moves all weights, where they are not on the chip: F reads them; I reads them;
#: W reads and writes the gradients'
#: sum so far; B does what I and W do.
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
    """What the layers would cost on an FPGA board.

    Features that a forward keeps for its backward go through the DDR once each way, wherever the
    weights are.

    Args:
        counts: of the model.
        board: with a peak for `dtype` (`dsp_flops`), the DDR's bandwidth, and the bytes on its
        chip. sizes: micro-batch sizes to give seconds for; by default the counts' batch in parts by
        powers of two. dtype: of the numbers. on_chip: whether weights and gradients stay on the
        chip. None: if those of the whole model fit there. Of a model that is cut,
            each board holds a part: ask `fits_on_chip` of every stage, and correct its seconds with
            `off_chip_seconds`.
        units: "shared": forward and backward run on the same units, one after the other, each with
        all DSPs (1F1B-AS). "separate":
            both have units of their own, DSPs and bandwidth shared out so that both take as long
            for the whole model, F + B, and run at the same time (FBP-AS).

    Raises:
        SettingError: the board lacks a figure, or a size is below 1.
    """
    points = tuple(sorted(set(sizes if sizes is not None else halves(counts.batch))))
    if not points or points[0] < 1:
        raise SettingError(f"sizes {list(points)} must be 1 or more")
    roof = Roof.of(board, dtype, counts.dtype_bytes)
    held = (
        fits_on_chip(counts.parameter_bytes * roof.narrower, board) if on_chip is None else on_chip
    )

    def alone(layer: LayerCounts, phase: Phase, samples: float) -> float:
        if not layer.work(phase):
            return 0.0
        products = sum(
            work.flops_at(samples) for work in layer.work(phase) if work.family != "other"
        )
        weights = 0 if held else _WEIGHT_PASSES[phase] * layer.parameter_bytes
        moved = roof.narrower * (weights + samples * layer.activation_bytes_per_sample)
        return max(products / (roof.flops_per_s * REACHED), moved / roof.bytes_per_s)

    parts = {
        size: _part_of_forward(counts, size, alone) if units == "separate" else 1.0
        for size in points
    }

    def seconds(layer: LayerCounts, phase: Phase, samples: float) -> float:
        part = parts[int(samples)]
        return alone(layer, phase, samples) / (
            part if phase == "forward" or units == "shared" else 1 - part
        )

    return replace(
        analytic_profile(counts, points, roof, seconds),
        machine={
            "device": f"fpga: {board.name}, by operation counts at {dtype}",
            "weights": "on the chip" if held else "in the DDR",
            "units": units,
        },
        device=board.name,
        update_s_per_byte=0.0 if held else UPDATE_TRAFFIC / roof.bytes_per_s,
    )


def _part_of_forward(counts: ModelCounts, samples: float, alone: Seconds) -> float:
    """The part of the DSPs that forward units get: that of the work."""
    forward = sum(alone(layer, "forward", samples) for layer in counts)
    backward = sum(alone(layer, "backward", samples) for layer in counts)
    return forward / (forward + backward) if forward and backward else 0.5


def dsp_flops(dsps: int, clock_hz: float, dsps_per_product: float = 1.0) -> float:
    """FLOP/s of `dsps` DSP slices at a clock: a product and its sum, two operations, on so many
    slices in a cycle.

    >>> dsp_flops(6840, 200e6) / 1e12
    2.736
    """
    return 2.0 * dsps * clock_hz / dsps_per_product


def fits_on_chip(weight_bytes: float, board: Device) -> bool:
    """Whether weights of so many bytes and as many of gradients fit on the chip: BaPipe's 2w."""
    return 2 * weight_bytes <= board.on_chip_bytes


def off_chip_seconds(
    forward_s: float, backward_s: float, weight_bytes: float, board: Device
) -> tuple[float, float]:
    """Forward and backward of a stage, given those with its weights on the chip; unchanged where
    they fit there.

    Where they do not, every micro-batch brings them through the DDR while it is computed: the
    longer of the two counts.

    Raises:
        SettingError: the board's bandwidth is not known.
    """
    if fits_on_chip(weight_bytes, board):
        return forward_s, backward_s
    if board.memory_bytes_per_s is None:
        raise SettingError(
            f"board {board.name} has no memory_bytes_per_s, and {weight_bytes:,.0f} bytes of weights do not fit on its "
            f"chip of {board.on_chip_bytes:,} bytes"
        )
    once = weight_bytes / board.memory_bytes_per_s
    return max(forward_s, _WEIGHT_PASSES["forward"] * once), max(
        backward_s, _WEIGHT_PASSES["backward"] * once
    )


def streamed_hop_seconds(count: float, bandwidth_bytes_per_s: float, compute_s: float) -> float:
    """What a transfer of `count` bytes adds to a stage that streams its output while it computes:
    nothing, until the link is slower.
    """
    return max(count / bandwidth_bytes_per_s - compute_s, 0.0)
