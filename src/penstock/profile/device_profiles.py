"""Profiles for clusters of several kinds of devices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from penstock.cluster.cluster import Cluster
from penstock.cluster.device import Device
from penstock.errors import PlanError
from penstock.profile.profile import Profile, Timing

#: A profile, or one per kind of device by the device's name.
Profiles = Profile | Mapping[str, Profile]


def scale_profile(profile: Profile, factor: float) -> Profile:
    """Return the profile of a device on which everything takes `factor` times as long.

    If that is 1, return the same object; and always the same object for the same factor, since
    searches identify devices of one kind by their profile.
    """
    if factor == 1:
        return profile
    # Like a cached property: no field, so that profiles still compare by their figures alone.
    scaled: dict[float, Profile] = profile.__dict__.setdefault("_scaled", {})
    if factor not in scaled:
        scaled[factor] = _scale_all(profile, factor)
    return scaled[factor]


def _scale_all(profile: Profile, factor: float) -> Profile:
    """Return a profile with all seconds multiplied by a factor."""

    def scale_timing(timing: Timing) -> Timing:
        """Return the timing of one phase on that device."""
        return replace(
            timing,
            median_s=tuple(factor * seconds for seconds in timing.median_s),
            spread_s=tuple(factor * seconds for seconds in timing.spread_s),
        )

    return replace(
        profile,
        layers=tuple(layer.with_timings(scale_timing) for layer in profile.layers),
        update_s_per_byte=factor * profile.update_s_per_byte,
        update_fixed_s=factor * profile.update_fixed_s,
        accumulate_s_per_byte=factor * profile.accumulate_s_per_byte,
    )


def profiles_of(profiles: Profiles, cluster: Cluster) -> tuple[Profile, ...]:
    """Return the profile of every rank's device while it computes alone; devices of one name share
    one object.

    A single profile for several kinds of devices is taken to be of the device that it names, or, if
    it names none, of rank 0's; the times of other devices are scaled by the ratio of their float32
    peaks.

    Raises:
        PlanError: a device has no profile, the profiles are of different models, or the speed of a
            device is unknown.
    """
    if isinstance(profiles, Profile):
        by_name = _scaled_profiles(profiles, cluster)
    else:
        by_name = dict(profiles)
        if len({profile.fingerprint for profile in by_name.values()}) > 1:
            fingerprints = ", ".join(
                f"{name} has fingerprint {profile.fingerprint}" for name, profile in by_name.items()
            )
            raise PlanError(f"the profiles are of different models: {fingerprints}")
    missing = [device.name for device in cluster.devices if device.name not in by_name]
    if missing:
        raise PlanError(
            f"there is no profile for {missing[0]} of {cluster.name}, only for "
            f"{', '.join(by_name) or 'nothing'}: measure the model on that device (ps.profile, or "
            f"penstock profile), and add the profile under the name {missing[0]!r}"
        )
    alone_by_name: dict[str, Profile] = {}
    for name, rank in _rank_on_largest_node(cluster).items():
        alone_by_name[name] = _alone(by_name[name], rank, cluster)
    return tuple(alone_by_name[device.name] for device in cluster.devices)


def _rank_on_largest_node(cluster: Cluster) -> dict[str, int]:
    """Return by kind of device its first rank on the node with the most ranks: a profile of busy
    ranks is taken to be measured there.
    """
    rank_of: dict[str, int] = {}
    most: dict[str, int] = {}
    for rank, device in enumerate(cluster.devices):
        count = len(cluster.ranks_of_node(cluster.node(rank)))
        if count > most.get(device.name, 0):
            rank_of[device.name], most[device.name] = rank, count
    return rank_of


def _alone(profile: Profile, rank: int, cluster: Cluster) -> Profile:
    """Return the profile of a rank that computes alone, from one measured on busy ranks.

    It says that one rank was busy, also where the others did not slow it down: those of a part of
    the cluster are derived from it, and must not be corrected again.
    """
    if profile.busy_ranks == 1:
        return profile
    node_ranks = cluster.ranks_of_node(cluster.node(rank))
    measured = cluster.slowdown(rank, node_ranks[: profile.busy_ranks])
    scaled = scale_profile(profile, 1 / measured)
    # One object per kind of device, as in `scale_profile`.
    alone: Profile = scaled.__dict__.setdefault("_alone", replace(scaled, busy_ranks=1))
    return alone


def busy_profiles(
    profiles: Sequence[Profile], cluster: Cluster, busy: Sequence[int]
) -> tuple[Profile, ...]:
    """Return the profiles of the ranks `busy` while all of them compute.

    Args:
        profiles: per entry of `busy`, the profile of the rank that computes alone.
        cluster: the whole cluster.
        busy: its ranks that are used.
    """
    return tuple(
        scale_profile(profile, cluster.slowdown(rank, busy))
        for profile, rank in zip(profiles, busy, strict=True)
    )


def _scaled_profiles(profile: Profile, cluster: Cluster) -> dict[str, Profile]:
    """Return a profile per kind of device, scaled from a single one."""
    kinds = {device.name: device for device in cluster.devices}
    if len(kinds) > 1 and profile.device and profile.device not in kinds:
        example = ", ".join(f"{name!r}: …" for name in kinds)
        raise PlanError(
            f"{cluster.name} has devices of different kinds, {', '.join(kinds)}, and the profile "
            f"is of {profile.device}, which is none of them: give a profile for each, "
            f"ps.plan({{{example}}}, cluster, …), each measured on that device"
        )
    reference = kinds.get(profile.device, cluster.devices[0])
    return {
        name: scale_profile(profile, _slowdown(device, reference, cluster.name))
        for name, device in kinds.items()
    }


def _slowdown(device: Device, reference: Device, cluster_name: str) -> float:
    """Return how many times as long a device takes as the reference."""
    if device.name == reference.name:
        return 1.0
    peak, reference_peak = device.peak("float32"), reference.peak("float32")
    if peak is None or reference_peak is None:
        unknown = device.name if peak is None else reference.name
        raise PlanError(
            f"{cluster_name} has devices of different kinds, and the speed of {unknown} is "
            f"unknown: give its flops in the cluster file, or one profile for every kind"
        )
    return reference_peak / peak


def with_optimizer(
    profiles: Sequence[Profile], name: str, states: float, fused: bool = False
) -> tuple[Profile, ...]:
    """Return the profiles of ranks for an optimizer: its states, and the seconds of its step.

    Equal ranks continue to share one object.

    Args:
        profiles: per rank.
        name: of the optimizer's torch class; empty if only its states are known.
        states: numbers that it keeps per parameter.
        fused: whether its step is one kernel.
    """
    updated: dict[int, Profile] = {}
    for profile in profiles:
        if id(profile) not in updated:
            ratio = profile.step_ratio(name, states, fused)
            updated[id(profile)] = profile
            if (ratio, states) != (1.0, profile.optimizer_states):
                updated[id(profile)] = replace(
                    profile,
                    optimizer_states=states,
                    update_s_per_byte=ratio * profile.update_s_per_byte,
                    step_ratios={},
                )
    return tuple(updated[id(profile)] for profile in profiles)
