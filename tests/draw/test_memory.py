"""Memory of ranks, as drawn."""

from __future__ import annotations

import numpy as np

from penstock.draw.memory import downsample, holder_text, holders_at_peak, memory_steps
from penstock.event import MemoryCurve
from penstock.schedule.catalogue import schedule
from penstock.simulate.costs import Costs
from penstock.simulate.simulate import simulate_schedule


def timeline(**costs):
    return simulate_schedule(schedule("1f1b", stages=3, micro_batches=4), Costs(**costs))


def test_a_thinned_curve_keeps_its_peaks():
    """A short peak between two samples is the one that does not fit the device."""
    curve = MemoryCurve(np.arange(1000) / 100, np.where(np.arange(1000) == 617, 99, 1))
    few = downsample(curve, 20, 10.0)
    assert len(few.seconds) == 20
    assert few.bytes.tolist() == [1] * 12 + [99] + [1] * 7
    assert downsample(few, 20, 10.0) is few


def test_an_interval_without_a_change_keeps_its_memory():
    """Otherwise a curve would fall to 0 in each interval without a change."""
    curve = MemoryCurve(np.array([0.0, 1.0, 1.1, 1.2, 9.0]), np.array([5, 7, 6, 4, 2]))
    assert downsample(curve, 4, 10.0).bytes.tolist() == [7, 4, 4, 4]


def test_one_step_per_moment():
    """A release and an allocation at the same time would be drawn as a notch that never existed."""
    for curve in memory_steps(timeline(activation_bytes=1024)):
        assert (np.diff(curve.seconds) > 0).all()
    assert memory_steps(timeline()) is None


def test_holders_stand_largest_first_with_their_bytes():
    """At a peak, the first question is what occupies the memory."""
    both = timeline(activation_bytes=1024, weight_bytes=2048)
    assert holders_at_peak(both, 0) == [("activations", 3072), ("weights", 2048)]
    assert holder_text(both, 2) == "weights 2.0 KiB, activations 1.0 KiB"
    assert holder_text(timeline(), 0) == ""
