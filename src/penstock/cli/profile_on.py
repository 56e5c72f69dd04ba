"""`penstock profile --on DEVICE`: what a model would cost on hardware that is not here."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.cluster.device import Device
from penstock.errors import SettingError, UnknownName

if TYPE_CHECKING:
    from torch import Tensor, nn

    from penstock.profile.profile import Profile
    from penstock.training.config import TrainConfig


@dataclass(frozen=True)
class Wanted:
    """A model and the device to reckon for. `data`: the data set whose shapes the model gets; None:
    `--image` or `--tokens` alone.
    """

    config: TrainConfig
    data: str | None
    device: str
    dtype: str = "float32"
    calibrate: Path | None = None
    sizes: list[int] | None = None


def profile_on(wanted: Wanted) -> Profile:
    """The profile by operation counts and a roofline; nothing is timed.

    Raises:
        UnknownName, SettingError, FileError, ClusterError: model, device or the profile to
        calibrate with cannot be had.
    """
    from penstock.measure.analytic import analytic

    made, example = _model(wanted)
    return analytic(
        made,
        example,
        device_called(wanted.device),
        batch=wanted.config.batch,
        sizes=wanted.sizes,
        dtype=wanted.dtype,
        calibrate=wanted.calibrate,
    )


def device_called(name: str) -> Device:
    """A preset's device, or the first of a cluster: a preset's, or a description's in a file.

    Raises:
        UnknownName: there is no such device, nor cluster.
        ClusterError, FileError: the description cannot be read.
    """
    from penstock.cluster.cluster import cluster
    from penstock.cluster.presets import Presets

    presets = Presets.load()
    try:
        return presets.device(name)
    except UnknownName:
        if Path(name).suffix or name.lower() in {known.lower() for known in presets.clusters}:
            return cluster(name).devices[0]
        raise


def _model(wanted: Wanted) -> tuple[nn.Module, Tensor]:
    """The model and one sample of its input, both on the meta device unless a data set is named."""
    import torch

    from penstock.training.task import make_task
    from penstock.zoo.catalogue import model, models

    config = wanted.config
    if wanted.data is not None:
        task = make_task(config)
        return task.model, task.example()
    known = models()
    if config.model not in known:
        model(config.model)  # says what there is
    facts = known[config.model]
    fitting: dict[str, object] = {
        "image": config.image,
        "channels": config.channels,
        "tokens": config.tokens,
    }
    options = {
        name: value for name, value in fitting.items() if name in facts.options
    } | config.model_options
    made = model(config.model, device="meta", **options)
    chosen = facts.options | options
    if facts.task == "classify":
        whole = ("features",) if "features" in chosen else ("channels", "image", "image")
        shape = [_count(name, chosen[name]) for name in whole]
        return made, torch.empty(1, *shape, device="meta")
    tokens = _count("tokens", chosen.get("tokens", config.tokens))
    rows = (2,) if facts.task == "translate" else ()
    return made, torch.empty(1, *rows, tokens, dtype=torch.int64, device="meta")


def _count(name: str, value: object) -> int:
    if not isinstance(value, int):
        raise SettingError(f"{name}={value!r} must be a whole number")
    return value
