"""Profiles at the quartiles of their measurements."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.profile.profile import LayerProfile, Profile, Timing
from penstock.profile.quartiles import at_quartile

LAYER = LayerProfile(
    "a",
    "Linear",
    Timing((1, 4), (1.0, 2.0), (0.5, 1.0)),
    Timing((1, 4), (2.0, 4.0), (0.5, 6.0)),
    Timing((1, 4), (0.5, 1.0), (3.0, 0.5)),
    Timing((1, 4), (1.5, 3.0), ()),
    1,
    4,
    1,
    5.0,
    6.0,
)
PROFILE = Profile((LAYER, replace(LAYER, name="b")), "f", 7.0, 8)

EXPECTED = {
    "lower": {
        "forward": (0.75, 1.5),
        "backward": (1.75, 1.0),
        "input_grad": (0.0, 0.75),
        "weight_grad": (1.5, 3.0),
    },
    "upper": {
        "forward": (1.25, 2.5),
        "backward": (2.25, 7.0),
        "input_grad": (2.0, 1.25),
        "weight_grad": (1.5, 3.0),
    },
}


@pytest.mark.parametrize("quartile", EXPECTED)
def test_half_of_the_spread_counts_to_each_side_of_the_median(quartile):
    """No time is below 0, and one that was measured once stays as it is."""
    profile = at_quartile(PROFILE, quartile)
    for layer, original in zip(profile.layers, PROFILE.layers, strict=True):
        for phase, medians in EXPECTED[quartile].items():
            timing = getattr(layer, phase)
            assert timing.median_s == pytest.approx(medians)
            assert timing.sizes == (1, 4)
            assert timing.spread_s == getattr(original, phase).spread_s
        assert layer.name == original.name
    assert replace(profile, layers=PROFILE.layers) == PROFILE
