"""Calibration: what made the timings is found again, whatever roof each op was at. No test looks at
a clock.
"""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from penstock.cluster.device import Device
from penstock.errors import SettingError
from penstock.profile.calibration import Sample, calibrated, fit_efficiency
from penstock.profile.counts import LayerCounts, ModelCounts, Work
from penstock.profile.roofline import Efficiency, Roof, roofline

DEVICE = Device("toy", 10**9, flops=(("float32", 1e12),), memory_bytes_per_s=1e11, launch_s=1e-5)
TRUE = Efficiency(
    matrix=0.4,
    convolution=0.3,
    winograd=2.0,
    attention=0.2,
    recurrent=0.25,
    memory=0.6,
    launch=1.5,
    fill_s=2e-5,
    call_s=3e-5,
    source="made up",
)


def layer(name, family, flops, moved, launches=(1, 1)):
    """A layer with products and ops of memory in every phase, twice as much in the backward."""
    one = (
        Work("product", family, launches[0], 0.0, flops, moved, moved / 50),
        Work("relu", "other", launches[1], 0.0, 1.0, 0.0, moved / 9),
    )
    two = tuple(
        replace(work, flops_per_sample=2 * work.flops_per_sample, launches=2 * work.launches)
        for work in one
    )
    return LayerCounts(name, "Toy", one, two, one, one, 1, 4, 0, 1.0, 1.0)


def model():
    """Layers of each family but grouped convolutions, large and small, at either roof."""
    layers = []
    for number in range(6):
        flops, moved = 1e6 * 4.0**number, 1e7 / 4.0**number
        layers += [
            layer(f"{family}{number}", family, flops, moved, (1 + number % 3, 1 + number % 4))
            for family in ("matrix", "convolution", "convolution_3x3", "attention", "recurrent")
        ]
    return ModelCounts(tuple(layers), "0123456789ab", 1.0, 1.0, 64)


def shares(efficiency):
    """What is fit_efficiency, by name."""
    return {
        field.name: getattr(efficiency, field.name)
        for field in fields(efficiency)
        if field.name not in ("source", "other")
    }


def test_calibration_recovers_the_efficiencies_behind_synthetic_timings():
    """The tolerance of a twentieth allows for the regularisation of efficiencies that no timing
    determines.
    """
    counts = model()
    measured = roofline(counts, DEVICE, efficiency=TRUE)
    efficiency = calibrated(counts, measured, DEVICE)
    expected = shares(TRUE)
    del expected["grouped_convolution"]
    assert {name: shares(efficiency)[name] for name in expected} == pytest.approx(
        expected, rel=0.05
    )
    assert efficiency.source == "a profile on toy"


def test_a_calibration_on_one_model_predicts_another():
    """This is the purpose of a calibration."""
    counts = model()
    fitted = calibrated(counts, roofline(counts, DEVICE, efficiency=TRUE), DEVICE)
    other = ModelCounts(
        (
            layer("a", "matrix", 3e8, 2e6),
            layer("b", "convolution_3x3", 7e9, 5e6),
            layer("c", "recurrent", 1e7, 1e8),
        ),
        "ba9876543210",
        1.0,
        1.0,
        32,
    )
    ours, theirs = (roofline(other, DEVICE, efficiency=efficiency) for efficiency in (fitted, TRUE))
    for size in ours.sizes:
        assert ours.step_seconds(size) == pytest.approx(theirs.step_seconds(size), rel=0.02)


def test_unmeasured_families_get_the_slowdown_of_the_measured_ones():
    """A slow machine is slow for all families: its LSTM layers are not assumed to be as fast as a
    V100's because none was timed.
    """
    counts = ModelCounts(
        tuple(layer(f"m{n}", "matrix", 10.0 ** (8 + n), 1e4) for n in range(4)),
        "0123456789ab",
        1.0,
        1.0,
        64,
    )
    efficiency = calibrated(
        counts, roofline(counts, DEVICE, efficiency=replace(TRUE, matrix=0.07)), DEVICE
    )
    assert efficiency.matrix == pytest.approx(0.07, rel=0.05)
    assert efficiency.recurrent / Efficiency().recurrent == pytest.approx(
        efficiency.matrix / Efficiency().matrix, rel=0.1
    )


def test_noise_in_the_timings_stays_noise_in_the_efficiencies():
    """A tenth up and down: nothing may be off by more than a third."""
    counts = model()
    roof = Roof.of(DEVICE, "float32", 4)
    samples = [
        Sample(work, size, roof.seconds(work, size, TRUE) * (1.1 if (number + size) % 2 else 0.9))
        for number, one in enumerate(counts)
        for work in (one.forward, one.backward)
        for size in (1, 8, 63)
    ]
    efficiency = fit_efficiency(samples, roof)
    for name in ("matrix", "convolution", "attention", "recurrent", "memory"):
        assert getattr(efficiency, name) == pytest.approx(getattr(TRUE, name), rel=0.34), name


def test_a_profile_of_another_model_is_refused_with_both_fingerprints():
    """Layers would be compared with layers that they are not."""
    counts = model()
    measured = replace(roofline(counts, DEVICE), fingerprint="ffffffffffff")
    with pytest.raises(SettingError, match=r"0123456789ab, the profile is of ffffffffffff"):
        calibrated(counts, measured, DEVICE)


def test_a_profile_without_timed_work_is_refused_for_calibration():
    """A profile of views has no information about a device."""
    empty = LayerCounts("flatten", "Flatten", (), (), (), (), 0, 0, 0, 0.0, 1.0)
    counts = ModelCounts((empty,), "0123456789ab", 1.0, 1.0, 4)
    with pytest.raises(SettingError, match="no timed layer launches an op"):
        calibrated(counts, roofline(counts, DEVICE), DEVICE)
