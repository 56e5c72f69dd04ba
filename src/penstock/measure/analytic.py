"""Estimate a profile without the hardware, from the model's work and a device's roofline."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn

from penstock.cluster.device import Device
from penstock.cluster.presets import Presets
from penstock.measure.example_samples import example_to_trace
from penstock.measure.replicable import with_single_copy_reasons
from penstock.measure.timed_passes import Loss
from penstock.measure.work.work_counter import count
from penstock.profile.calibration import calibrated
from penstock.profile.fpga import fpga
from penstock.profile.profile import Profile
from penstock.profile.roofline import Efficiency, roofline
from penstock.tracing.traced_chain import TracedChain, as_chain


def analytic(
    model: TracedChain | nn.Module | Sequence[nn.Module],
    example: Any,
    device: str | Device,
    *,
    batch: int | None = None,
    sizes: Sequence[int] | None = None,
    dtype: str = "float32",
    calibrate: Profile | str | Path | None = None,
    loss: Loss | None = None,
    targets: Any = None,
) -> Profile:
    """Estimate a model's profile on a device that is not present.

    No number is computed and no memory allocated, so the model may be of any size, also on the meta
    device.

    Args:
        model: a chain, or anything that `chain` accepts.
        example: inputs of the model, any number of samples in their first dimension, on any device.
        device: a preset's name, such as "V100", or a `Device` with a peak at `dtype` and a memory
            bandwidth. For FPGAs see `penstock.profile.fpga`.
        batch: samples of a batch. By default the number in `example`.
        sizes: micro-batch sizes for which to estimate. By default a batch divided by powers of two.
        dtype: of the computation: "float32", "tf32", "bfloat16", "float16"; see `roofline` for what
            shrinks with it.
        calibrate: a profile of the same model measured on this device, or its file: the shares of
            the peaks are fitted to it. By default they are those of a V100.
        loss, targets: as in training; the loss's cost is added to the last layer. Any number of
            targets.

    Returns:
        The profile; its `device` is the device's name.

    Raises:
        UnknownName: there is no preset of that name.
        SettingError: a figure of the device is missing, or the calibration profile is of a
            different model.
        LayerFailed: a layer cannot be counted, for example because it reads values.
        FileError: the calibration profile cannot be read.

    Examples:
        >>> import torch
        >>> from torch import nn
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> analytic(model, torch.ones(8, 4), "V100", batch=8).device
        'V100'
    """
    target = Presets.load().device(device) if isinstance(device, str) else device
    traced = as_chain(model, example_to_trace(example))
    counts = count(traced, example, batch, loss=loss, targets=targets)
    if target.kind == "fpga":
        return with_single_copy_reasons(fpga(counts, target, sizes=sizes, dtype=dtype), traced)
    efficiency: Efficiency | None = None
    if calibrate is not None:
        measured = calibrate if isinstance(calibrate, Profile) else Profile.load(calibrate)
        efficiency = calibrated(counts, measured, target, dtype=dtype)
    estimated = roofline(counts, target, sizes=sizes, dtype=dtype, efficiency=efficiency)
    return with_single_copy_reasons(estimated, traced)
