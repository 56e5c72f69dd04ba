"""Measuring a link between two real processes, and the fit behind it."""

from __future__ import annotations

import sys

import cloudpickle
import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import RunError
from penstock.measure.link import SIZES, _fit, measure_link
from penstock.runtime.launch import launch
from penstock.runtime.processes import join


@given(st.floats(1e-6, 1e-2), st.floats(1e6, 1e11))
@settings(deadline=None, max_examples=100)
def test_the_fit_of_latency_and_bandwidth_finds_both(latency_s, bandwidth):
    """The first message of 64 bytes stands for latency alone; the rest tell the bandwidth."""
    found_latency, found_bandwidth = _fit([latency_s + size / bandwidth for size in SIZES])
    assert found_latency == pytest.approx(latency_s + SIZES[0] / bandwidth)
    slowest = latency_s + SIZES[-1] / bandwidth
    assert found_latency + SIZES[-1] / found_bandwidth == pytest.approx(slowest, rel=0.01)


@given(st.lists(st.floats(1e-7, 1.0), min_size=len(SIZES), max_size=len(SIZES)))
@settings(deadline=None, max_examples=100)
def test_noise_never_makes_a_bandwidth_that_is_no_number_above_0(times):
    """A large message may by chance come sooner than a small one; a plan must not divide by 0 or less."""
    latency, bandwidth = _fit(times)
    assert latency > 0
    assert 0 < bandwidth < float("inf")


def test_a_link_is_the_same_seen_from_both_ends():
    """Both ranks plan for themselves, and must make the same plan; what came back is what was sent, or it raises."""
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    try:
        first, second = launch(_measure, 2, threads=1)
    finally:
        cloudpickle.unregister_pickle_by_value(sys.modules[__name__])
    assert first == second
    assert first.latency_s > 0
    assert first.bandwidth_bytes_per_s > 0


def test_a_link_has_two_ends(monkeypatch):
    """Between three ranks there are three links, and they need not be alike."""
    monkeypatch.setattr(dist, "get_world_size", lambda: 3)
    with pytest.raises(RunError, match=r"^a link is between 2 ranks, and there are 3$"):
        measure_link()


def _measure():
    join()
    return measure_link(repeats=3)
