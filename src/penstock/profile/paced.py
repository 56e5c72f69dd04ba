"""One profile, several kinds of devices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from penstock.cluster.cluster import Cluster
from penstock.cluster.device import Device
from penstock.errors import PlanError
from penstock.profile.profile import LayerProfile, Profile, Timing

#: A profile, or one for every kind of device by the device's name.
Profiles = Profile | Mapping[str, Profile]


def paced(profile: Profile, factor: float) -> Profile:
    """The profile of a device that takes `factor` times as long for everything; itself where that
    is 1.
    """
    if factor == 1:
        return profile

    def slower(timing: Timing) -> Timing:
        return replace(
            timing,
            median_s=tuple(factor * each for each in timing.median_s),
            spread_s=tuple(factor * each for each in timing.spread_s),
        )

    def layer(each: LayerProfile) -> LayerProfile:
        return replace(
            each,
            forward=slower(each.forward),
            backward=slower(each.backward),
            input_grad=slower(each.input_grad),
            weight_grad=slower(each.weight_grad),
        )

    return replace(
        profile,
        layers=tuple(map(layer, profile.layers)),
        update_s_per_byte=factor * profile.update_s_per_byte,
        update_fixed_s=factor * profile.update_fixed_s,
        accumulate_s_per_byte=factor * profile.accumulate_s_per_byte,
    )


def profiles_of(profiles: Profiles, cluster: Cluster) -> tuple[Profile, ...]:
    """What the layers cost on every rank's device; ranks with devices of one name share one
    profile.

    Where there is one profile for devices of several kinds, it is of the device that it names, or
    if it names none, of rank 0's; the others take as much longer or shorter as their peak at
    float32 is lower or higher.

    Raises:
        PlanError: a device has no profile, the profiles are of different models, or nothing says
        how fast a device is.
    """
    by_name: dict[str, Profile] = {}
    if isinstance(profiles, Profile):
        kinds = {device.name: device for device in cluster.devices}
        if len(kinds) > 1 and profiles.device and profiles.device not in kinds:
            names = ", ".join(kinds)
            example = ", ".join(f"{name!r}: …" for name in kinds)
            raise PlanError(
                f"{cluster.name} has devices of different kinds, {names}, and the profile is of {profiles.device}, which is none of them: "
                f"give a profile for each, ps.plan({{{example}}}, cluster, …), each measured on that device"
            )
        reference = kinds.get(profiles.device, cluster.devices[0])
        for name, device in kinds.items():
            by_name[name] = paced(profiles, _slower(device, reference, cluster.name))
    else:
        if len({each.fingerprint for each in profiles.values()}) > 1:
            raise PlanError(
                "the profiles are of different models: "
                + ", ".join(
                    f"{name} has fingerprint {each.fingerprint}" for name, each in profiles.items()
                )
            )
        by_name = dict(profiles)
    missing = [device.name for device in cluster.devices if device.name not in by_name]
    if missing:
        raise PlanError(
            f"there is no profile for {missing[0]} of {cluster.name}, only for {', '.join(by_name) or 'nothing'}: measure the model on "
            f"that device (ps.profile, or penstock profile), and give it beside the others by the name {missing[0]!r}"
        )
    return tuple(by_name[device.name] for device in cluster.devices)


def _slower(device: Device, reference: Device, where: str) -> float:
    """How many times as long a device takes as another."""
    if device.name == reference.name:
        return 1.0
    own, other = device.peak("float32"), reference.peak("float32")
    if own is None or other is None:
        lacking = device.name if own is None else reference.name
        raise PlanError(
            f"{where} has devices of different kinds, and nothing says how fast {lacking} is: give its flops in the "
            "cluster file, or one profile for every kind"
        )
    return other / own


def with_optimizer_states(profiles: Sequence[Profile], states: float) -> tuple[Profile, ...]:
    """The profiles of ranks for an optimizer that keeps so many numbers for each parameter; ranks
    alike go on sharing one object.
    """
    own = {
        id(each): each
        if each.optimizer_states == states
        else replace(each, optimizer_states=states)
        for each in profiles
    }
    return tuple(own[id(each)] for each in profiles)
