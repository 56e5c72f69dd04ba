"""A profile without the hardware: count the model here, and put a device's roofline over it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn

from penstock.cluster.device import Device
from penstock.cluster.presets import Presets
from penstock.measure.counts import count
from penstock.measure.passes import Loss
from penstock.measure.replicable import with_single_copy_reasons
from penstock.profile.calibrate import calibrated
from penstock.profile.fpga import fpga
from penstock.profile.profile import Profile
from penstock.profile.roofline import Efficiency, roofline
from penstock.tracing.chain import TracedChain, chain


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
    """What a model would cost on a device that is not here, by its operations, bytes and launches.

    Nothing is computed and no memory taken, so the model may be of any size; on the meta device,
    too.

    Args:
        model: a chain, or anything that `chain` takes.
        example: inputs of the model, any number of samples in their first dimension, on any device.
        device: a preset's name, such as "V100", or a `Device` with a peak at `dtype` and a memory
        bandwidth. FPGAs are of another
            kind: see `penstock.profile.fpga`.
        batch: samples of a batch. By default as many as `example` has.
        sizes: micro-batch sizes to give seconds for. By default a batch in parts by powers of two.
        dtype: in which it computes: "float32", "tf32", "bfloat16", "float16"; see `roofline` for
        what is narrower then. calibrate: a profile of the same model that was measured on this
        device, or its file: the shares of the peaks are fitted to it.
            Without it they are those of a V100.
        loss, targets: as training has them; what the loss takes then counts with the last layer.
        Targets of any number of samples.

    Returns:
        The profile; its `device` is the device's name.

    Raises:
        UnknownName: no preset has that name.
        SettingError: the device lacks a figure, or the profile to calibrate with is of another
        model. LayerFailed: a layer cannot be counted, for example because it looks at values.
        FileError: the profile to calibrate with cannot be read.
    """
    target = Presets.load().device(device) if isinstance(device, str) else device
    traced = model if isinstance(model, TracedChain) else chain(model)
    counts = count(traced, example, batch, loss=loss, targets=targets)
    if target.kind == "fpga":
        return with_single_copy_reasons(fpga(counts, target, sizes=sizes, dtype=dtype), traced)
    reached: Efficiency | None = None
    if calibrate is not None:
        measured = calibrate if isinstance(calibrate, Profile) else Profile.load(calibrate)
        reached = calibrated(counts, measured, target, dtype=dtype)
    found = roofline(counts, target, sizes=sizes, dtype=dtype, efficiency=reached)
    return with_single_copy_reasons(found, traced)
