"""Lower bounds of many cuts at once: valid for every schedule, and as sharp as the older ones."""

from __future__ import annotations

from itertools import combinations, pairwise
from math import comb

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.search.random_requests import clusters, profiles

from penstock.cluster.cluster import Cluster, Device, Link
from penstock.errors import PenstockError
from penstock.schedule.catalogue import schedule
from penstock.search.cut_search.cut_bounds import CutBounds, all_cuts, lengths_of
from penstock.search.evaluate import evaluate
from penstock.search.instantiate import instantiate
from penstock.search.plan_search import PlanSearch
from penstock.search.request import PlanRequest
from penstock.search.schedule_bound import schedule_bound_s
from penstock.search.search_space import SearchSpace
from penstock.search.shapes import Shape, shapes


@pytest.mark.parametrize(("layers", "stages"), [(1, 1), (4, 1), (5, 3), (6, 6)])
def test_all_cuts_are_all_cuts(layers, stages):
    """Each once, as ends of stages that have a layer at least."""
    expected = [(0, *inner, layers) for inner in combinations(range(1, layers), stages - 1)]
    cuts = all_cuts(layers, stages)
    assert [tuple(row) for row in cuts.tolist()] == expected
    assert len(cuts) == comb(layers - 1, stages - 1)
    assert [lengths_of(row) for row in cuts] == [
        tuple(b - a for a, b in pairwise(ends)) for ends in expected
    ]


@settings(max_examples=25, deadline=None)
@given(
    profiles(2, 5, simple=False),
    clusters(4, memory=(10**12,)),
    st.sampled_from([4, 6]),
    st.data(),
)
def test_no_cut_is_faster_than_its_bound(profile, cluster, batch, data):
    """Of all schedules, on one pipeline or several, with devices and links of two kinds."""
    request = PlanRequest(profile, cluster, batch, asynchronous=True)
    space = SearchSpace(request, shapes(request))
    configuration = data.draw(st.sampled_from(space.configurations))
    search = PlanSearch(request)
    pipeline = search.schedule_of(configuration)
    if pipeline is None:
        return
    cuts = all_cuts(len(profile), configuration.stages)
    micro_batches = configuration.micro_batches
    bounds = CutBounds(request, configuration.shape, pipeline, micro_batches).seconds(cuts)
    for ends, bound_s in zip(cuts, bounds.tolist(), strict=True):
        proposal = search.proposal_of(configuration, pipeline, lengths_of(ends))
        try:
            candidate = evaluate(instantiate(request, proposal))[-1]
        except PenstockError:
            continue
        assert bound_s <= candidate.step_s * (1 + 1e-9)


def test_a_schedule_with_more_ranks_than_the_cluster_is_rejected(profile_of):
    """HetPipe has two workers of two stages: on two devices the search says so, and goes on."""
    link = Link(1e-4, 1e7)
    cluster = Cluster("pair", (Device("d", 10**12),) * 2, 1, link, link)
    request = PlanRequest(profile_of([1e-3] * 4), cluster, 4, asynchronous=True)
    search = PlanSearch(request)
    configurations = SearchSpace(request, shapes(request)).configurations
    hetpipe = [
        configuration
        for configuration in configurations
        if configuration.schedule == "hetpipe" and configuration.stages == 2
    ]
    assert hetpipe
    assert [search.schedule_of(configuration) for configuration in hetpipe] == [None] * len(hetpipe)
    assert "hetpipe in 2 stages needs 4 ranks, pair has 2" in search.rejected


@settings(max_examples=20, deadline=None)
@given(
    profiles(4, 6),
    st.sampled_from(["1f1b", "gpipe", "zb-h1", "interleaved", "zb-v", "pipedream"]),
    st.sampled_from([2, 4]),
)
def test_the_bound_is_no_weaker_than_that_of_one_schedule(profile, name, micro_batches):
    """That one leaves out updates and transfers, and is computed cut by cut."""
    link = Link(1e-4, 1e7)
    cluster = Cluster("c", (Device("d", 10**12),) * 2, 1, link, link)
    request = PlanRequest(profile, cluster, 4, asynchronous=True)
    pipeline = schedule(name, 4 if name in ("interleaved", "zb-v") else 2, micro_batches)
    cuts = all_cuts(len(profile), pipeline.stages)
    shape = Shape(1, 2, (0, 1))
    bounds = CutBounds(request, shape, pipeline, micro_batches).seconds(cuts)
    space_search = PlanSearch(request)
    for configuration in SearchSpace(request, [shape]).configurations:
        if (configuration.schedule, configuration.stages) == (name, pipeline.stages):
            break
    for ends, bound_s in zip(cuts, bounds.tolist(), strict=True):
        proposal = space_search.proposal_of(configuration, pipeline, lengths_of(ends))
        placed = instantiate(request, proposal)
        if placed.schedule.micro_batches == micro_batches:
            assert bound_s >= schedule_bound_s(pipeline, placed.costs) * (1 - 1e-6)
