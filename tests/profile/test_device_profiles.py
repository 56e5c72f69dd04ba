"""One profile for several kinds of devices."""

from dataclasses import replace

import pytest

from penstock.cluster.cluster import Cluster, Device, Link
from penstock.errors import PlanError
from penstock.profile.device_profiles import (
    busy_profiles,
    profiles_of,
    scale_profile,
    with_optimizer,
)
from penstock.profile.profile import LayerProfile, Profile, Timing

LINK = Link(0.0, 1e12)


def timing(seconds: float) -> Timing:
    """With a fixed cost and a spread."""
    return Timing((1, 4), (1 + seconds, 1 + 4 * seconds), (0.5, 0.25))


PROFILE = Profile(
    tuple(
        LayerProfile(f"l{i}", "L", *map(timing, (1.0, 2.0, 3.0, 4.0)), 1, 4, 1, 5.0, 6.0)
        for i in range(2)
    ),
    "f",
    7.0,
    8,
    update_s_per_byte=1e-9,
    device="V",
    update_fixed_s=1e-3,
    accumulate_s_per_byte=1e-8,
)


def device(name: str, tera: float | None = None) -> Device:
    """With a peak, or without."""
    return Device(name, 10**9, flops=() if tera is None else (("float32", tera * 1e12),))


def cluster(*devices: Device) -> Cluster:
    """All in one node."""
    return Cluster("mixed", devices, len(devices), LINK, LINK)


def test_a_slowdown_scales_all_times_and_no_bytes():
    """Seconds are of the device, bytes of the model."""
    slow = scale_profile(PROFILE, 3.0)
    for original, other in zip(PROFILE, slow, strict=True):
        for phase in ("forward", "backward", "input_grad", "weight_grad"):
            for samples in (0.5, 1, 2, 4, 16):
                assert other.seconds(phase, samples) == pytest.approx(
                    3 * original.seconds(phase, samples)
                )
            assert getattr(other, phase).spread_s == (1.5, 0.75)
        bare = {
            "forward": original.forward,
            "backward": original.backward,
            "input_grad": original.input_grad,
            "weight_grad": original.weight_grad,
        }
        assert replace(other, **bare) == original
    seconds = ("update_s_per_byte", "update_fixed_s", "accumulate_s_per_byte")
    for name in seconds:
        assert getattr(slow, name) == pytest.approx(3 * getattr(PROFILE, name))
    assert (
        replace(slow, layers=PROFILE.layers, **{name: getattr(PROFILE, name) for name in seconds})
        == PROFILE
    )


def test_a_pace_of_one_is_the_profile_itself():
    """Ranks alike are found by their one object."""
    assert scale_profile(PROFILE, 1) is PROFILE


def test_devices_of_one_name_share_one_object():
    """Results that are computed for one device are then computed for all."""
    profiles = profiles_of(
        PROFILE, cluster(device("V", 10), device("P", 5), device("V", 10), device("P", 5))
    )
    assert profiles[0] is profiles[2] is PROFILE
    assert profiles[1] is profiles[3] is not PROFILE


def test_other_devices_are_estimated_from_one_profile_by_their_peaks():
    """Half the peak takes twice as long, wherever the profiled device is; an unnamed profile is
    that of rank 0.
    """
    on = cluster(device("P", 5), device("V", 10))
    slow, unscaled = profiles_of(PROFILE, on)
    assert unscaled is PROFILE
    assert slow.step_seconds(4) == pytest.approx(
        [2 * seconds for seconds in PROFILE.step_seconds(4)]
    )
    nameless = replace(PROFILE, device="")
    unscaled, fast = profiles_of(nameless, on)
    assert unscaled is nameless
    assert fast.step_seconds(4) == pytest.approx(
        [seconds / 2 for seconds in PROFILE.step_seconds(4)]
    )


def test_a_profile_of_none_of_several_kinds_is_refused():
    """A profile of "cpu" does not show which of two unlike hosts it was measured on."""
    on = cluster(device("cpu-0", 5), device("cpu-1", 10))
    with pytest.raises(
        PlanError, match=r"kinds, cpu-0, cpu-1, and the profile is of cpu, .*'cpu-1': …"
    ):
        profiles_of(replace(PROFILE, device="cpu"), on)
    assert len(profiles_of({"cpu-0": PROFILE, "cpu-1": PROFILE}, on)) == 2


def test_one_kind_of_devices_needs_no_peak():
    """A measured profile is all there is to know."""
    assert profiles_of(PROFILE, cluster(device("x"), device("x"))) == (PROFILE, PROFILE)


@pytest.mark.parametrize(
    ("devices", "lacking"),
    [((device("V", 10), device("x")), "x"), ((device("x"), device("P", 5)), "x")],
)
def test_a_device_of_unknown_speed_is_refused(devices, lacking):
    """An assumed speed would give a wrong plan."""
    with pytest.raises(
        PlanError,
        match=f"the speed of {lacking} is unknown: give its flops in the cluster file, or one profile",
    ):
        profiles_of(replace(PROFILE, device=""), cluster(*devices))


def test_profiles_are_found_by_the_name_of_the_device():
    """Order and further profiles do not matter."""
    other = replace(PROFILE, update_s_per_byte=2.0)
    assert profiles_of(
        {"P": other, "z": PROFILE, "V": PROFILE}, cluster(device("V"), device("P"))
    ) == (PROFILE, other)


@pytest.mark.parametrize(
    ("profiles", "message"),
    [
        ({"V": PROFILE}, "there is no profile for P of mixed, only for V"),
        ({}, "there is no profile for V of mixed, only for nothing"),
        (
            {"V": PROFILE, "P": replace(PROFILE, fingerprint="g")},
            "of different models: V has fingerprint f, P has fingerprint g",
        ),
    ],
)
def test_profiles_that_do_not_cover_the_cluster_are_refused(profiles, message):
    """The message names the missing devices."""
    with pytest.raises(PlanError, match=message):
        profiles_of(profiles, cluster(device("V", 10), device("P", 5)))


def shared(count: int) -> Cluster:
    """Ranks on half as many cores."""
    device = Device("V", 10**9, together=2.0)
    return Cluster("c", (device,) * count, count, LINK, LINK)


def test_a_profile_of_busy_ranks_is_that_of_ranks_alone_slowed_down():
    """Measured alone or on all ranks at once, a plan for all ranks has the same seconds."""
    on = shared(4)
    busy = replace(scale_profile(PROFILE, 2.0), busy_ranks=4)
    for measured in (PROFILE, busy):
        alone = profiles_of(measured, on)
        assert {profile.seconds("forward", 4)[0] for profile in alone} == {5.0}
        for used, factor in (((0,), 1.0), ((0, 1), 1.0), ((0, 1, 2), 1.5), ((0, 1, 2, 3), 2.0)):
            scaled = busy_profiles([alone[rank] for rank in used], on, used)
            assert {profile.seconds("forward", 4)[0] for profile in scaled} == {5.0 * factor}


def test_a_busy_profile_is_corrected_for_devices_of_other_kinds_too():
    """A device of half the speed takes twice the seconds of the measured one alone; it used to take
    twice those of the busy one.
    """
    fast = Device("V", 10**9, flops=(("float32", 10.0),), together=2.0)
    slow = replace(fast, name="P", flops=(("float32", 5.0),))
    on = Cluster("c", (fast, fast, slow, slow), 2, LINK, LINK)
    busy = replace(scale_profile(PROFILE, 2.0), device="V", busy_ranks=2)
    seconds = [profile.seconds("forward", 4)[0] for profile in profiles_of(busy, on)]
    assert seconds == [5.0, 5.0, 10.0, 10.0]


def test_a_profile_says_that_its_rank_computes_alone():
    """Also where others did not slow it down: a part of the cluster must not correct it again."""
    measured = replace(PROFILE, busy_ranks=2)
    alone = profiles_of(measured, shared(4))
    assert {profile.busy_ranks for profile in alone} == {1}
    assert len({id(profile) for profile in alone}) == 1
    assert alone[0] == PROFILE


def test_equal_ranks_share_one_object_while_busy():
    """Searches recognise devices of one kind by their profile."""
    on = shared(4)
    scaled = busy_profiles(profiles_of(PROFILE, on), on, range(4))
    assert len({id(profile) for profile in scaled}) == 1
    assert scaled == busy_profiles(profiles_of(PROFILE, on), on, range(4))


def test_an_optimizer_sets_the_states_and_the_seconds_of_the_step_once():
    """A plan applies it to the profile of its request, and a simulation to that of the user."""
    measured = replace(PROFILE, step_ratios={"Adam, 2 states": 4.0, "SGD, 0 states": 0.5})
    first, other, second = with_optimizer((measured, PROFILE, measured), "Adam", 2.0)
    assert first is second
    assert first.optimizer_states == other.optimizer_states == 2.0
    assert first.update_s_per_byte == pytest.approx(4e-9)
    assert first.update_fixed_s == PROFILE.update_fixed_s
    assert other.update_s_per_byte == pytest.approx(1e-9 * 7 / 5)
    assert with_optimizer((first,), "Adam", 2.0) == (first,)
    assert with_optimizer((measured,), "", 1.0)[0] is measured
