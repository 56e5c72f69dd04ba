"""`penstock profile --on DEVICE`: estimate a model's costs on hardware that is not here."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.cluster.device import Device
from penstock.errors import SettingError, UnknownName

if TYPE_CHECKING:
    from torch import Tensor, nn

    from penstock.profile.profile import Profile
    from penstock.tracing.traced_chain import TracedChain
    from penstock.training.config import TrainConfig


@dataclass(frozen=True)
class EstimateRequest:
    """A model and the device to estimate its costs for.

    Attributes:
        config: names the model and the sizes of its input.
        data: data set that sets the input's shape; None: `--image` or `--tokens` alone.
        device: name of a preset's device or of a cluster, or a cluster's file.
        dtype: data type of weights and activations.
        calibrate: profile of the same model, measured on that device, to fit the estimate to.
        sizes: micro-batch sizes; None: those of a measured profile.
    """

    config: TrainConfig
    data: str | None
    device: str
    dtype: str = "float32"
    calibrate: Path | None = None
    sizes: list[int] | None = None


def estimate_profile(request: EstimateRequest) -> Profile:
    """Estimate a profile from operation counts and a roofline, without timing anything.

    Raises:
        UnknownName: there is no such model, data set, device or cluster.
        SettingError, FileError, ClusterError: an option, the cluster's file or the profile to
            calibrate with cannot be used.
    """
    from penstock.measure.analytic import analytic

    model, example = _model_and_example(request)
    return analytic(
        model,
        example,
        find_device(request.device),
        batch=request.config.batch,
        sizes=request.sizes,
        dtype=request.dtype,
        calibrate=request.calibrate,
    )


def find_device(name: str) -> Device:
    """Return a preset device by name, or the first device of a preset cluster or cluster file.

    Raises:
        UnknownName: there is no such device or cluster.
        ClusterError, FileError: the cluster's file cannot be read.
    """
    from penstock.cluster.cluster import cluster
    from penstock.cluster.presets import Presets

    presets = Presets.load()
    try:
        return presets.device(name)
    except UnknownName:
        cluster_names = {cluster_name.lower() for cluster_name in presets.clusters}
        if Path(name).suffix or name.lower() in cluster_names:
            return cluster(name).devices[0]
        raise


def _model_and_example(request: EstimateRequest) -> tuple[TracedChain | nn.Module, Tensor]:
    """Make the model and one sample of its input; a model of the zoo without a data set is on the
    meta device.
    """
    import torch

    from penstock.training.sources.model_sources import ZooModel, parse_model
    from penstock.training.task import make_task
    from penstock.zoo.catalogue import model

    config = request.config
    source = parse_model(config.model)
    if request.data is not None or not isinstance(source, ZooModel):
        task = make_task(config)
        return task.chain, task.example()
    facts = source.facts
    input_sizes: dict[str, object] = {
        "image": config.image,
        "channels": config.channels,
        "tokens": config.tokens,
    }
    options = {name: value for name, value in input_sizes.items() if name in facts.options}
    options |= config.model_options
    meta_model = model(config.model, device="meta", **options)
    all_options = facts.options | options
    if facts.task == "classify":
        dimensions = ("features",) if "features" in all_options else ("channels", "image", "image")
        shape = [_whole_number(name, all_options[name]) for name in dimensions]
        return meta_model, torch.empty(1, *shape, device="meta")
    tokens = _whole_number("tokens", all_options.get("tokens", config.tokens))
    # A translation model takes source and target as two rows of one sample.
    rows = (2,) if facts.task == "translate" else ()
    return meta_model, torch.empty(1, *rows, tokens, dtype=torch.int64, device="meta")


def _whole_number(name: str, value: object) -> int:
    """Return an option's value as an integer, or raise SettingError."""
    if not isinstance(value, int):
        raise SettingError(f"{name}={value!r} must be a whole number")
    return value
