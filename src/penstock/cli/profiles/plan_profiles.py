"""The profiles that `penstock plan` works on: read from files, or made of a model first."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from penstock.cli.flags.model_flags import ModelFlags
from penstock.cli.flags.options import refuse_flags
from penstock.errors import SettingError

if TYPE_CHECKING:
    from penstock.cluster.machines import Cluster
    from penstock.profile.device_profiles import Profiles
    from penstock.profile.profile import Profile
    from penstock.training.config import TrainConfig


def load_or_make_profiles(
    sources: list[str], flags: ModelFlags, cluster_name: str, batch: int | None
) -> tuple[Profiles, int]:
    """Load profiles from files, or make them of the model that the words or flags name.

    Args:
        sources: files, or a model.
        flags: a model and its data.
        cluster_name: the cluster to plan for. For `local:N` the layers are measured, otherwise
            estimated for its devices.
        batch: samples per batch; None: the profile's, or 64.

    Returns:
        The profile, or profiles by the name of their device; and samples per batch.

    Raises:
        SettingError: there is neither, or there are both.
        FileError: a profile cannot be read.
    """
    settings = flags.settings()
    if len(sources) == 1 and _is_model(sources[0]):
        if flags.model is not None:
            raise SettingError(f"two models: {sources[0]} and --model {flags.model}. Name one")
        settings["model"] = sources[0]
    if "model" not in settings:
        refuse_flags(
            "belongs to a model, and the profile has its own: leave it out, or name a model "
            "instead of a profile",
            **vars(flags),
        )
        if not sources:
            raise SettingError(
                "name what to plan for: a profile, penstock plan profile.json; or a model, "
                "penstock plan vgg11_bn"
            )
        return load_profiles([Path(source) for source in sources], batch)
    if "model" in settings and flags.model is not None and sources:
        raise SettingError(
            f"--model {flags.model} is profiled first, and {', '.join(sources)} would be its "
            "profile: leave one of them out"
        )
    from penstock.training.sources.user_settings import complete_settings

    if batch is not None:
        settings["batch"] = batch
    config = complete_settings(settings)
    return _make_profiles(config, cluster_name), config.batch


def _is_model(text: str) -> bool:
    """Whether a word names a model, not a file."""
    # A JSON file that does not exist is a profile: the error is that it cannot be read.
    return (not Path(text).is_file() and Path(text).suffix != ".json") or text.startswith("hf:")


def _make_profiles(config: TrainConfig, cluster_name: str) -> Profiles:
    """Measure a model with all ranks of a local cluster, or estimate it for another one."""
    from penstock.cluster.cluster import cluster as describe
    from penstock.training.devices import Devices
    from penstock.training.measurement import measure_profile
    from penstock.training.task import make_task

    target = describe(cluster_name)
    task = make_task(config)
    if cluster_name.startswith("local"):

        def say(text: str) -> None:
            """Print a message."""
            typer.echo(text, err=True)

        return measure_profile(config, task.chain, target.ranks, Devices(), say)
    return _estimate_profiles(config, target)


def _estimate_profiles(config: TrainConfig, target: Cluster) -> Profiles:
    """Estimate a model for every kind of device of a cluster."""
    from penstock.measure.analytic import analytic
    from penstock.training.task import make_task

    task = make_task(config)
    devices = {device.name: device for device in target.devices}
    typer.echo(f"layer times are estimated for {', '.join(devices)}: nothing is measured", err=True)
    profiles: dict[str, Profile] = {}
    for name, device in devices.items():
        profiles[name] = analytic(task.chain, task.example()[:2], device, batch=config.batch)
    return next(iter(profiles.values())) if len(profiles) == 1 else profiles


def load_profiles(paths: list[Path], batch: int | None) -> tuple[Profiles, int]:
    """Load one profile, or several by the name of their device.

    Returns:
        The profile, or profiles; and samples per batch, by default those of the first one.

    Raises:
        FileError: a profile cannot be read.
        SettingError: several profiles do not have a device name each.
    """
    from penstock.profile.profile import Profile

    profiles = [Profile.load(path) for path in paths]
    samples = profiles[0].batch if batch is None else batch
    if len(profiles) == 1:
        return profiles[0], samples
    for path, profile in zip(paths, profiles, strict=True):
        if not profile.device:
            raise SettingError(
                f"{path} does not name its device: "
                "measure that profile again, or use one profile alone"
            )
    devices = [profile.device for profile in profiles]
    if len(set(devices)) < len(devices):
        raise SettingError(f"two profiles are of the same device: {', '.join(devices)}")
    return dict(zip(devices, profiles, strict=True)), samples
