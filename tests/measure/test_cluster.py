"""Three processes measure the cluster that they form, two of them on one host."""

from __future__ import annotations

import os
import socket
import sys

import cloudpickle
import pytest
import torch

from penstock.cluster.cluster import cluster
from penstock.errors import SettingError
from penstock.measure.cluster import _ALL_PAIRS, _pairs, measure_cluster
from penstock.measure.host_links import link_of
from penstock.measure.messages import SIZES
from penstock.ranks.process_world import join
from penstock.ranks.processes.launch import launch


@pytest.fixture(scope="module")
def results():
    """What each of the three found."""
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    try:
        return launch(_measure, 3, threads=1)
    finally:
        cloudpickle.unregister_pickle_by_value(sys.modules[__name__])


def _measure():
    join()
    socket.gethostname = lambda: f"host{int(os.environ['RANK']) // 2}"
    steps = []
    measured = measure_cluster(
        "lab",
        torch.device("cpu"),
        repeats=1,
        seconds=1e-3,
        progress=lambda *step: steps.append(step),
    )
    return measured, steps


def test_all_ranks_find_the_same(results):
    """Each plans for itself, and all must make the same plan."""
    assert results[0][0] == results[1][0] == results[2][0]


def test_what_is_found_is_a_cluster_of_hosts(results, tmp_path):
    """Hosts are nodes; the file is what `penstock plan` reads."""
    measured_cluster = results[0][0].cluster
    assert [measured_cluster.node(rank) for rank in range(3)] == [0, 0, 1]
    assert measured_cluster.kinds == ("cpu",)
    measured_cluster.save(tmp_path / "lab.yaml")
    assert cluster(tmp_path / "lab.yaml") == measured_cluster


def test_every_figure_is_sane(results):
    """Above 0, and no faster than any machine."""
    for device in results[0][0].cluster.devices:
        assert {dtype for dtype, _ in device.flops} == {"float32", "bfloat16"}
        assert all(1e6 < peak < 1e16 for _, peak in device.flops)
        assert 1e6 < device.memory_bytes_per_s < 1e14
        assert 0 < device.launch_s < 1
        assert device.memory_bytes > 2**20
        assert device.together >= 1
    for pair in results[0][0].pairs:
        # Between hosts, sizes end with the first that takes long.
        count = len(SIZES) if (pair.a, pair.b) == (0, 1) else len(pair.times.sizes)
        assert pair.times.sizes == SIZES[: max(count, 2)]
        assert all(0 < seconds < 60 for seconds in (*pair.times.fresh_s, *pair.times.used_s))
        assert pair.times.both_ways >= 1


def test_links_are_those_of_their_pairs(results):
    """One pair is inside a host, two are between hosts."""
    measured_cluster = results[0][0]
    assert [(pair.a, pair.b) for pair in measured_cluster.pairs] == [(0, 1), (0, 2), (1, 2)]
    assert measured_cluster.cluster.link(0, 1).bandwidth_bytes_per_s == pytest.approx(
        measured_cluster.pairs[0].fit.bandwidth_bytes_per_s, rel=1e-3
    )
    # Not a fit to all sizes, which token buckets would mislead.
    slower, _ = sorted(
        link_of(pair.times).bandwidth_bytes_per_s for pair in measured_cluster.pairs[1:]
    )
    assert measured_cluster.cluster.between.bandwidth_bytes_per_s == pytest.approx(slower, rel=1e-3)


def test_progress_counts_to_the_end(results):
    """A bar that stops short, or runs over, looks like a fault."""
    steps = results[0][1]
    assert [done for done, _, _ in steps] == list(range(steps[0][1] + 1))


def test_many_ranks_measure_few_pairs():
    """All pairs of a hundred ranks would take an hour; every rank is in one of them."""
    assert len(_pairs(_ALL_PAIRS)) == 28
    many = _pairs(100)
    assert len(many) < 200
    assert {rank for pair in many for rank in pair} == set(range(100))
    assert _pairs(1) == []


@pytest.mark.parametrize(("repeats", "seconds"), [(0, 1.0), (1, 0.0), (1, float("inf"))])
def test_no_time_to_measure_in_is_refused(repeats, seconds):
    """Nothing comes of it."""
    with pytest.raises(SettingError, match="both must be above 0"):
        measure_cluster("x", torch.device("cpu"), repeats=repeats, seconds=seconds)
