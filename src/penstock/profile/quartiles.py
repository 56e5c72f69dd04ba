"""A profile at the quartiles of its measurements, to predict how much a step varies."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from penstock.profile.profile import Profile, Timing


def at_quartile(profile: Profile, quartile: Literal["lower", "upper"]) -> Profile:
    """Return a profile in which every layer takes the lower or upper quartile of its repeats.

    All layers vary together in it, as they do when the whole machine is slower; where they vary
    independently, the step varies less. The recorded spread is the distance of the quartiles, and
    half of it counts to each side of the median.
    """
    half = -0.5 if quartile == "lower" else 0.5

    def shifted(timing: Timing) -> Timing:
        """Return a timing at the quartile."""
        if len(timing.spread_s) != len(timing.median_s):
            return timing
        pairs = zip(timing.median_s, timing.spread_s, strict=True)
        return replace(timing, median_s=tuple(max(m + half * s, 0.0) for m, s in pairs))

    layers = tuple(layer.with_timings(shifted) for layer in profile.layers)
    return replace(profile, layers=layers)
