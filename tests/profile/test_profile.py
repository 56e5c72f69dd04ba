"""Timing: values between and beyond the measured sizes. Profile: saved as JSON and loaded with
strict checks.
"""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import FileError, SettingError
from penstock.profile.profile import LayerProfile, Profile, Timing, check_timing

SIZES = st.lists(st.integers(1, 512), min_size=1, max_size=6, unique=True).map(
    lambda sizes: tuple(sorted(sizes))
)


@st.composite
def timings(draw):
    sizes = draw(SIZES)
    seconds = st.one_of(st.just(0.0), st.floats(1e-7, 10.0))
    return Timing(sizes, tuple(draw(st.lists(seconds, min_size=len(sizes), max_size=len(sizes)))))


@given(
    st.lists(st.integers(1, 512), min_size=2, max_size=6, unique=True),
    st.floats(0, 0.1),
    st.floats(1e-6, 0.1),
)
@settings(deadline=None, max_examples=100)
def test_the_fit_of_affine_times_is_exact(sizes, fixed, per_sample):
    """A fixed cost per call and a cost per sample is how devices behave; then the fit must find
    both.
    """
    sizes = tuple(sorted(sizes))
    timing = Timing(sizes, tuple(fixed + per_sample * size for size in sizes))
    assert timing.fixed_s == pytest.approx(fixed, rel=1e-6, abs=1e-6 * timing.median_s[-1])
    assert timing.per_sample_s == pytest.approx(per_sample, rel=1e-6)
    for samples in (1, 2.5, sizes[0], sizes[-1], 3 * sizes[-1]):
        assert timing.at(samples) == pytest.approx(fixed + per_sample * samples, rel=1e-6, abs=1e-9)


@given(timings(), st.floats(0, 2000))
@settings(deadline=None, max_examples=200)
def test_no_time_is_ever_negative(timing, samples):
    """Noise may fall with size; a layer that takes less than nothing would attract every cut."""
    assert timing.fixed_s >= 0
    assert timing.per_sample_s >= 0
    assert timing.at(samples) >= 0


@given(timings())
@settings(deadline=None, max_examples=100)
def test_measured_sizes_return_the_measured_times(timing):
    """The fit is only for sizes that were not measured."""
    for size, median in zip(timing.sizes, timing.median_s, strict=True):
        assert timing.at(size) == pytest.approx(median, rel=1e-12)


def test_between_sizes_times_lie_on_straight_lines_and_beyond_they_follow_the_fit():
    """1 + n seconds, then a kink: 4 more at size 8."""
    assert Timing((2, 4, 8), (3.0, 5.0, 13.0)).at(6) == 9.0
    affine = Timing((2, 4), (3.0, 5.0))
    assert affine.at(10) == pytest.approx(11.0)
    assert affine.at(1) == pytest.approx(2.0)
    assert affine.at(0) == pytest.approx(1.0)


def test_one_measured_size_counts_as_time_per_sample():
    """Nothing is known of the fixed cost."""
    timing = Timing((4,), (2.0,))
    assert (timing.fixed_s, timing.per_sample_s, timing.at(8), timing.at(2)) == (0.0, 0.5, 4.0, 1.0)


def test_times_that_decrease_with_size_count_as_fixed_time():
    """Noise on a layer too small to matter."""
    timing = Timing((1, 2), (4.0, 2.0))
    assert (timing.fixed_s, timing.per_sample_s, timing.at(100)) == (3.0, 0.0, 2.0)


def test_a_time_of_zero_does_not_make_the_larger_sizes_free():
    """The weight gradient is a difference of two measurements, at small sizes often 0; one 0 once
    made the fit 0.
    """
    timing = Timing((1, 2, 4, 8), (0.0, 0.0, 0.004, 0.008))
    assert timing.per_sample_s == pytest.approx(0.001, rel=0.3)
    assert timing.at(16) == pytest.approx(0.016, rel=0.3)
    assert Timing((1, 2), (0.0, 0.0)).at(64) == 0.0


@pytest.mark.parametrize(
    ("timing", "message"),
    [
        (Timing((), ()), r"here: sizes \[\] must be 1 or more and ascend"),
        (Timing((0, 1), (1, 1)), r"here: sizes \[0, 1\] must be 1 or more"),
        (Timing((2, 2), (1, 1)), r"here: sizes \[2, 2\] must be 1 or more and ascend"),
        (Timing((4, 2), (1, 1)), r"here: sizes \[4, 2\] must be 1 or more and ascend"),
        (Timing((1, 2), (1,)), r"here: needs 2 times of 0 s or more, one for each size"),
        (Timing((1,), (-1,)), r"here: needs 1 times of 0 s or more"),
        (Timing((1,), (float("nan"),)), r"here: needs 1 times of 0 s or more"),
        (Timing((1,), (float("inf"),)), r"here: needs 1 times of 0 s or more"),
    ],
)
def test_a_timing_that_cannot_be_is_refused(timing, message):
    """Interpolation over sizes that do not ascend gives nonsense without any error."""
    with pytest.raises(SettingError, match=message):
        check_timing(timing, "here")


def test_a_timing_of_zero_seconds_is_accepted():
    """The weight gradient of a layer without weights costs nothing."""
    check_timing(Timing((1, 2), (0.0, 0.0)), "here")


LAYER = LayerProfile("stem", "Conv2d", Timing((1, 2), (1.0, 2.0), (0.1, 0.1)), Timing((1, 2), (2.0, 4.0)), Timing((1, 2), (1.0, 2.0)),
                     Timing((1, 2), (1.0, 1.5)), 100, 400, 8, 64.5, 16.0)  # fmt: skip
PROFILE = Profile(
    (LAYER, replace(LAYER, name="head µ")), "0123456789ab", 12.0, 2, {"cpu": "test"}, "2.13"
)


def test_a_profile_gives_seconds_layer_by_layer():
    """Partitioners want lists."""
    assert len(PROFILE) == 2
    assert [layer.name for layer in PROFILE] == ["stem", "head µ"]
    assert PROFILE.sizes == (1, 2)
    assert PROFILE.seconds("weight_grad", 1.5) == [1.25, 1.25]
    assert PROFILE.step_seconds(2) == [6.0, 6.0]
    assert LAYER.seconds("input_grad", 1) == 1.0
    assert replace(PROFILE, layers=()).sizes == ()


def test_a_saved_profile_loads_as_an_equal_profile(tmp_path):
    """A profile is measured once and used for many plans."""
    PROFILE.save(tmp_path / "p.json")
    assert Profile.load(tmp_path / "p.json") == PROFILE
    assert (
        Profile.load(str(tmp_path / "p.json")).layers[1].forward.fixed_s
        == PROFILE.layers[1].forward.fixed_s
    )


def _set(path, value):
    """A change of a profile's JSON: the value at a path of keys."""

    def change(data):
        for key in path[:-1]:
            data = data[key]
        data[path[-1]] = value

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            _set(["schema"], 99),
            r"is no profile of schema 1: its schema is 99\. Create it again with this version of penstock",
        ),
        (_set(["colour"], "red"), r"is no profile: at colour: "),
        (_set(["fingerprint"], "0" * 5000), r"the fingerprint '000.* must be printable text"),
        (_set(["layers", 0, "colour"], "red"), r"is no profile: at layers\.0\.colour: "),
        (
            _set(["layers", 1, "forward", "unit"], "ms"),
            r"is no profile: at layers\.1\.forward\.unit: ",
        ),
        (
            _set(["layers", 0, "forward", "median_s"], [1, None]),
            r"at layers\.0\.forward\.median_s\.1: ",
        ),
        (
            _set(["layers", 0, "forward", "median_s"], [1, float("nan")]),
            r"is not JSON: NaN is not a finite number",
        ),
        (
            _set(["layers", 0, "forward", "spread_s"], [float("inf")]),
            r"is not JSON: Infinity is not a finite number",
        ),
        (
            _set(["layers", 0, "forward", "median_s"], [1]),
            r"layer stem: needs 2 times of 0 s or more, one for each size",
        ),
        (
            _set(["layers", 1, "backward", "median_s"], [1, -1]),
            r"layer head µ: needs 2 times of 0 s or more",
        ),
        (
            _set(["layers", 0, "weight_grad", "sizes"], [2, 1]),
            r"layer stem: sizes \[2, 1\] must be 1 or more and ascend",
        ),
        (
            _set(["layers", 0, "activation_bytes_per_sample"], -1.0),
            r"layer stem: activation_bytes_per_sample is -1\.0, and cannot be below 0",
        ),
        (
            _set(["layers", 0, "parameters"], -5),
            r"layer stem: parameters is -5, and cannot be below 0",
        ),
        (
            _set(["layers", 0, "parameters"], 2**62),
            r"layer stem: parameters is 4\.61e\+18, and cannot be above 1\.15e\+18",
        ),
        (
            _set(["layers", 0, "forward", "median_s"], [1, 1e308]),
            r"layer stem: takes 1e\+308 s; a layer takes 0 s, or 1e-15 s to 1e\+09 s",
        ),
        (
            _set(["layers", 0, "forward", "median_s"], [5e-324, 1]),
            r"layer stem: takes 4\.94e-324 s",
        ),
        (
            _set(["layers", 0, "forward", "sizes"], [1, 2**63]),
            r"layer stem: a batch of 9\.22e\+18 samples is larger than any",
        ),
        (
            _set(["layers", 0, "tensor_bytes"], [390]),
            r"layer stem: tensor_bytes add up to 390, and parameter_bytes are 400",
        ),
        (_set(["layers", 0, "tensor_bytes"], [401, -1]), r"layer stem: tensor_bytes are 0 or more"),
        (
            _set(["layers", 1, "tied_tensors"], [[0, 0]]),
            r"layer head µ: tied_tensors has \[0, 0\], and there is no such parameter",
        ),
        (
            _set(["step_ratios"], {"Adam, 2 states": 0}),
            r"step_ratios has 0 for Adam, 2 states; it is above 0, and at most 10000",
        ),
        (_set(["batch"], -128), r"batch is -128, and cannot be below 0"),
        (_set(["layers"], {}), r"is no profile: at layers: "),
    ],
)
def test_a_changed_file_is_refused_with_the_place(tmp_path, change, message):
    """A profile comes from anywhere; a negative size in it would make a plan that looks splendid."""
    path = tmp_path / "p.json"
    PROFILE.save(path)
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))
    with pytest.raises(FileError, match=message) as caught:
        Profile.load(path)
    assert str(path) in str(caught.value)


def test_a_missing_field_is_refused(tmp_path):
    """Half a profile is none."""
    path = tmp_path / "p.json"
    PROFILE.save(path)
    data = json.loads(path.read_text())
    del data["layers"][1]["backward"]
    path.write_text(json.dumps(data))
    with pytest.raises(
        FileError, match=r"is no profile: at layers\.1\.backward: the key is missing"
    ):
        Profile.load(path)


@pytest.mark.parametrize("length", [0, 1, 200, -3])
def test_a_truncated_file_is_refused(tmp_path, length):
    """The disk was full, or the copy was cut short."""
    path = tmp_path / "p.json"
    PROFILE.save(path)
    path.write_text(path.read_text()[:length])
    with pytest.raises(FileError, match="is not JSON"):
        Profile.load(path)


def test_a_profile_of_before_devices_had_names_is_still_read(tmp_path):
    """Its device is then not known, and nothing else is lost."""
    path = tmp_path / "old.json"
    Profile((), "0123456789ab", 4.0, 8, device="V100").save(path)
    assert Profile.load(path).device == "V100"
    old = json.loads(path.read_text())
    del old["device"]
    path.write_text(json.dumps(old))
    assert Profile.load(path).device == ""


def test_steps_of_optimizers_are_those_measured_or_estimated_from_adam():
    """Weight, gradient and states are read, and all but the gradient written: 3 + 2 x states."""
    ratios = {"SGD, 0 states": 0.6, "Adam, 2 states": 4.0, "Adam, 2 states, fused": 1.1}
    profile = replace(PROFILE, step_ratios=ratios)
    assert profile.step_ratio("Adam", 2.0) == 4.0
    assert profile.step_ratio("Adam", 2.0, fused=True) == 1.1
    assert profile.step_ratio("SGD", 0.0) == 0.6
    assert profile.step_ratio("SGD", 1.0) == profile.step_ratio("", 1.0) == 1.0
    assert profile.step_ratio("Adam", 3.0) == pytest.approx(4.0 * 9 / 7)
    assert profile.step_ratio("", 2.0) == 4.0
    assert profile.step_ratio("Lion", 1.0) == pytest.approx(4.0 * 5 / 7)
    assert profile.step_ratio("SGD", 0.0, fused=True) == pytest.approx(3 / 5)
    assert PROFILE.step_ratio("Adam", 2.0) == pytest.approx(7 / 5)
