"""Lower bounds of many cuts at once: valid for every schedule, and as sharp as the older ones."""

from __future__ import annotations

from itertools import combinations, pairwise
from math import comb

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.search.random_requests import clusters, links, profiles

from penstock.cluster.cluster import Cluster, Device, Link
from penstock.errors import PenstockError
from penstock.profile.profile import LayerProfile, Profile, Timing
from penstock.schedule.catalogue import schedule
from penstock.schedule.op import Kind
from penstock.search.cut_search.cut_bounds import CutBounds, all_cuts, lengths_of
from penstock.search.evaluate import evaluate
from penstock.search.instantiate import instantiate
from penstock.search.plan_search import PlanSearch
from penstock.search.proposal import Proposal
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


def slow_bound(placed, boundary_s):
    """The bound of one placed schedule, op by op: what a rank waits for at first, its ops, and what
    waits for its last backward, to the update of stage 0.
    """
    costs, least = placed.costs, 0.0
    seconds = {
        Kind.F: costs.forward,
        Kind.B: costs.backward,
        Kind.I: costs.input_grad,
        Kind.W: costs.weight_grad,
        Kind.U: costs.spread("update", placed.schedule.stages),
    }
    for program in placed.schedule.programs:
        first = program[0].stage
        waited = sum(costs.forward[:first]) + sum(boundary_s[:first])
        busy = drained = 0.0
        for op in program:
            busy += seconds[op.kind][op.stage]
            if op.kind in (Kind.B, Kind.I):
                back = sum(map(min, costs.backward[: op.stage], costs.input_grad[: op.stage]))
                update = seconds[Kind.U][0] if op.stage else 0.0
                drained = busy + back + sum(boundary_s[: op.stage]) + update
        least = max(least, waited + busy, waited + drained)
    return least


@settings(max_examples=40, deadline=None)
@given(
    profiles(4, 6, simple=False),
    links(),
    st.sampled_from(["1f1b", "gpipe", "zb-h1", "interleaved", "zb-v"]),
    st.sampled_from([2, 4]),
)
def test_the_bounds_of_all_cuts_are_those_of_each_alone(profile, link, name, micro_batches):
    """A weaker bound is valid too, but the search would then simulate what cannot win."""
    cluster = Cluster("c", (Device("d", 10**12),) * 2, 1, link, link)
    request = PlanRequest(profile, cluster, 4)
    options = (("chunks", 2),) if name == "interleaved" else ()
    stages = 4 if name in ("interleaved", "zb-v") else 2
    pipeline = schedule(name, stages, micro_batches, **dict(options))
    cuts = all_cuts(len(profile), stages)
    bounds = CutBounds(request, Shape(1, 2, (0, 1)), pipeline, micro_batches).seconds(cuts)
    for ends, bound_s in zip(cuts, bounds.tolist(), strict=True):
        placed = instantiate(request, Proposal(lengths_of(ends), name, micro_batches, options))
        boundary_s = []
        for stage, end in enumerate(ends[1:-1].tolist()):
            size = 4 / micro_batches * profile.layers[end - 1].output_bytes_per_sample
            ranks = (placed.schedule.placement[s, 0] for s in (stage, stage + 1))
            boundary_s.append(cluster.transfer_seconds(size, *ranks))
        assert bound_s == pytest.approx(slow_bound(placed, boundary_s), rel=1e-6)


def card_bounds(micro_batches, batch, kind="cpu", nodes=2):
    """The bounds of the cuts of three layers on two ranks, each on a host of its own."""
    layers = profile_of_layers([1.0, 2.0, 3.0], output=[100.0, 10_000.0, 1.0])
    link = Link(0.5, 100.0)
    cluster = Cluster("c", (Device("d", 10**12, kind),) * 2, 2 // nodes, link, link)
    pipeline = schedule("1f1b", 2, micro_batches)
    request = PlanRequest(layers, cluster, batch)
    return CutBounds(request, Shape(1, 2, (0, 1)), pipeline, micro_batches).seconds(all_cuts(3, 2))


def profile_of_layers(seconds, output):
    """Layers whose backward takes twice their forward, and whose halves take as long each."""

    def timing(per_sample):
        return Timing((1, 16), (per_sample, 16 * per_sample))

    layers = [
        LayerProfile(
            f"l{index}", "L", *(timing(part * f) for part in (1, 2, 1, 1)), 0, 0, 0, 1.0, out
        )
        for index, (f, out) in enumerate(zip(seconds, output, strict=True))
    ]
    return Profile(tuple(layers), "abc", 1.0, 16)


def test_the_network_card_of_a_host_bounds_the_step():
    """Between hosts whose cards carry one message at a time: the first forward, the bytes of all
    activations of one direction, and the backward of stage 0 (an I takes nothing there, so that
    nothing is sure of it). After layer 1 each of four messages takes 100 s and after layer 0 1 s,
    where the ranks' own work is more.
    """
    by_card = card_bounds(4, 4)
    assert by_card[1] == pytest.approx(3 + 4 * 100)
    by_rank = [
        # Rank 1 waits for the first forward and message; its last gradient goes back.
        1 + (0.5 + 1) + 4 * 3 * 5 + (0.5 + 1),
        3 + (0.5 + 100) + 4 * 3 * 3 + (0.5 + 100),
    ]
    assert by_card[0] == pytest.approx(by_rank[0])
    for bounds in (
        card_bounds(4, 4, kind="gpu"),
        card_bounds(4, 4, nodes=1),
    ):
        assert bounds.tolist() == pytest.approx(by_rank)


def test_of_uneven_micro_batches_each_counts_with_its_own_size():
    """Five samples in four micro-batches: one of two samples, three of one."""
    bounds = card_bounds(4, 5, kind="gpu")
    exact = []
    for lengths in ((1, 2), (2, 1)):
        placed = instantiate(
            PlanRequest(
                profile_of_layers([1.0, 2.0, 3.0], [100.0, 10_000.0, 1.0]),
                Cluster(
                    "c", (Device("d", 10**12, "gpu"),) * 2, 1, Link(0.5, 100.0), Link(0.5, 100.0)
                ),
                5,
            ),
            Proposal(lengths, "1f1b", 4),
        )
        exact.append(evaluate(placed)[-1].step_s)
    # The first micro-batch is the largest, and the last one of the smallest.
    assert bounds[0] == pytest.approx(2 * 1 + (0.5 + 2) + 5 * 15 + (0.5 + 1))
    assert all(bound <= step_s for bound, step_s in zip(bounds, exact, strict=True))


def test_before_a_hosts_card_the_ramp_has_both_messages_of_each_boundary():
    """Stages 0 and 1 are on one host, stage 2 on another: before the first of its messages the card
    waits for the forwards of both stages and the message between them, and after the last for its
    way back.
    """
    layers = profile_of_layers([1.0, 2.0, 3.0], output=[100.0, 10_000.0, 1.0])
    inside, between = Link(7.0, 1e12), Link(0.5, 100.0)
    devices = (Device("d", 10**12, "cpu"),) * 3
    cluster = Cluster("c", devices, 1, inside, between, node_of=(0, 0, 1))
    request = PlanRequest(layers, cluster, 4)
    pipeline = schedule("1f1b", 3, 4)
    bounds = CutBounds(request, Shape(1, 3, (0, 1, 2)), pipeline, 4).seconds(all_cuts(3, 3))
    # Four messages of 100 s. An I of stage 0 takes nothing, one of stage 1 takes 2 s.
    assert bounds.tolist() == pytest.approx([1 + 2 + 7 + 4 * 100 + 7 + 2])
