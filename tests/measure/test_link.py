"""Measuring a link between two real processes."""

from __future__ import annotations

import sys

import cloudpickle
import pytest
import torch.distributed as dist

from penstock.errors import RunError
from penstock.measure.link import measure_link
from penstock.ranks.process_world import join
from penstock.ranks.processes.launch import launch


def test_a_link_is_the_same_seen_from_both_ends():
    """Both ranks plan for themselves, and must make the same plan; what came is what was sent, or
    it raises.
    """
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    try:
        first, second = launch(_measure, 2, threads=1)
    finally:
        cloudpickle.unregister_pickle_by_value(sys.modules[__name__])
    assert first == second
    assert first.latency_s >= 0
    assert first.bandwidth_bytes_per_s > 0
    assert first.source.startswith("measured: off by ")


def test_a_link_has_two_ends(monkeypatch):
    """Between three ranks there are three links, and they need not be alike."""
    monkeypatch.setattr(dist, "get_world_size", lambda: 3)
    with pytest.raises(RunError, match=r"^a link is between 2 ranks, but there are 3$"):
        measure_link()


def _measure():
    join()
    return measure_link(repeats=1)
