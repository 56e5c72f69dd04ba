"""Stages on different numbers of ranks."""

import math
from dataclasses import replace
from itertools import product
from math import inf, lcm

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.search.random_requests import FAST, SLOW, links, profiles

from penstock.cluster.cluster import Cluster, Device, Link, cluster
from penstock.profile.profile import PHASES
from penstock.search.cut_search.uneven_replication import (
    RECOMPUTED,
    uneven,
    uneven_configurations,
    uneven_placements,
)
from penstock.search.cuts import layer_bytes
from penstock.search.evaluate import evaluate
from penstock.search.instantiate import instantiate
from penstock.search.request import PlanRequest
from penstock.search.shapes import Shape, placements
from penstock.simulate.gradient_sync import all_reduce_seconds


def on(ranks: int, link: Link = Link(0.0, 1e12)) -> Cluster:
    """Equal devices, one on each node."""
    return Cluster("c", (Device("d", 10**12),) * ranks, 1, link, link)


@settings(max_examples=15, deadline=None)
@given(
    profiles(2, 5), st.integers(3, 5), links(), st.integers(3, 20), st.sampled_from([None, 2, 3])
)
def test_proposals_can_be_made_and_keep_what_was_asked(profile, ranks, link, batch, most):
    """Copies within what is allowed, ranks within what there are, each with a micro-batch at least."""
    request = PlanRequest(profile, on(ranks, link), batch, max_replicas=most)
    for proposal in uneven(request):
        assert sum(proposal.lengths) == len(profile)
        assert len(set(proposal.replicas)) > 1, "others are whole pipelines"
        assert sum(proposal.replicas) <= ranks
        assert max(proposal.replicas) <= min(most or ranks, proposal.micro_batches)
        candidate = evaluate(instantiate(request, proposal))[-1]
        assert not candidate.memory_shortfall
        assert candidate.replicas == proposal.replicas


@settings(max_examples=30, deadline=None)
@given(profiles(2, 4), st.integers(3, 4), links(), st.sampled_from([2, 3]))
def test_the_slowest_stage_is_the_fastest_possible(profile, ranks, link, stages):
    """Against all cuts and all copies, by the same measure worked out here; unless all have as many
    copies, or some rank is left over.
    """
    if stages > len(profile):
        return
    request = PlanRequest(
        profile, on(ranks, link), 2 * ranks, stages=stages, micro_batches=ranks, schedules=("1f1b",)
    )
    candidate = list(uneven(request))
    if not candidate:
        return

    def slowest(lengths, copies):
        times, start = [], 0
        for length, count in zip(lengths, copies, strict=True):
            stage_layers = profile.layers[start : start + length]
            comes = (
                0.0
                if start == 0
                else link.transfer_seconds(2 * profile.layers[start - 1].output_bytes_per_sample)
            )
            met = all_reduce_seconds(
                range(count), sum(layer.parameter_bytes for layer in stage_layers), request.cluster
            )
            work = sum(
                layer.seconds("forward", 2) + layer.seconds("backward", 2) for layer in stage_layers
            )
            times.append(max(work / count, met / ranks, comes / count))
            start += length
        return max(times)

    every = [
        slowest(lengths, copies)
        for lengths in product(range(1, len(profile) + 1), repeat=stages)
        if sum(lengths) == len(profile)
        for copies in product(range(1, ranks + 1), repeat=stages)
        if sum(copies) == ranks
    ]
    (proposal,) = candidate
    assert slowest(proposal.lengths, proposal.replicas) == pytest.approx(min(every, default=inf))


def test_fewer_copies_than_the_best_has_are_tried_where_no_more_are_allowed(profile_of):
    """A limit makes another cut best; it does not mean that there is none."""
    profile = profile_of([4.0] * 4 + [0.1] * 2, parameters=[10] * 4 + [10**9] * 2)
    free = {
        proposal.replicas for proposal in uneven(PlanRequest(profile, on(5, Link(0.0, 1e9)), 64))
    }
    assert max(map(max, free)) > 2
    bound = {
        proposal.replicas
        for proposal in uneven(PlanRequest(profile, on(5, Link(0.0, 1e9)), 64, max_replicas=2))
    }
    assert bound
    assert max(map(max, bound)) == 2


def test_every_copy_in_a_stream_gets_as_many_micro_batches(profile_of):
    """A stream goes on from batch to batch, so that what is left over would fall to another copy
    each time.
    """
    request = PlanRequest(
        profile_of([4.0] * 4 + [0.1] * 2, parameters=[10] * 4 + [10**9] * 2),
        on(5, Link(0.0, 1e9)),
        64,
        asynchronous=True,
    )
    streams = [proposal for proposal in uneven(request) if proposal.schedule == "pipedream"]
    assert streams
    assert all(proposal.micro_batches % lcm(*proposal.replicas) == 0 for proposal in streams)


MIXED = Cluster(
    "c",
    (Device("fast", 10**9, flops=FAST), Device("slow", 10**9, flops=SLOW)) * 2,
    4,
    Link(0, 1e12),
    Link(0, 1e12),
)


@pytest.mark.parametrize(
    ("where", "options"),
    [
        (MIXED, {}),
        (on(2), {}),
        (cluster("17x8xV100-NVLink-25GbE"), {}),
        (on(4), {"max_replicas": 1}),
        (on(4), {"by": "uniform"}),
        (on(4), {"schedules": ("chimera",)}),
    ],
    ids=[
        "unlike devices",
        "two ranks",
        "many",
        "no copies",
        "another cut",
        "no schedule with one stage per rank",
    ],
)
def test_nothing_is_proposed_where_that_is_not_asked_or_not_known(profile_of, where, options):
    """Other parts of the search look there."""
    profile = profile_of([4.0] * 4 + [0.1] * 2, parameters=[10] * 4 + [10**9] * 2)
    assert list(uneven(PlanRequest(profile, where, 64, **options))) == []


def estimates_of(request, devices, replicas, counts):
    """Seconds, micro-batches and lengths of every cut, layer by layer."""
    profile = request.profile
    layers, stages = len(profile), len(replicas)
    for count in counts:
        weights, activations = layer_bytes(request, count)
        for lengths in product(range(1, layers + 1), repeat=stages):
            if sum(lengths) != layers:
                continue
            start = first = 0
            times, exceeds = [], False
            for stage, (length, ranks) in enumerate(zip(lengths, replicas, strict=True)):
                group = devices[first : first + ranks]
                span = range(start, start + length)
                phases = [
                    [request.mean_seconds(rank, phase, count) for phase in PHASES] for rank in group
                ]
                times.append(
                    sum(max(f[i] + min(b[i], g[i] + w[i]) for f, b, g, w in phases) for i in span)
                )
                in_flight = math.ceil((stages - stage) / ranks)
                stage_bytes = sum(weights[i] + in_flight * activations[i] for i in span)
                exceeds |= stage_bytes > min(request.memory_bytes(rank) for rank in group)
                start, first = start + length, first + ranks
            slowest = max(time / ranks for time, ranks in zip(times, replicas, strict=True))
            seconds = count * slowest + sum(times)
            yield seconds * (RECOMPUTED if exceeds else 1), count, lengths


@pytest.mark.parametrize(
    ("parameters", "memory"),
    [
        ([100, 900, 100, 400], 10**12),
        ([100, 900, 100, 400], 9000),
        # Activations of the micro-batches in flight fill these.
        ([10] * 4, 400),
        ([10] * 4, 700),
    ],
)
@pytest.mark.parametrize("options", [{}, {"stages": 2}, {"micro_batches": 4}, {"max_replicas": 2}])
def test_placements_of_uneven_replicas_have_the_cut_with_the_least_estimate(
    profile_of, parameters, memory, options
):
    """For each numbers of replicas one proposal per placement, the most promising first. Memory
    that does not suffice costs a third more.
    """
    link = Link(0.0, 1e12)
    devices = (
        Device("fast", memory, flops=FAST),
        Device("slow", memory, flops=SLOW),
        Device("fast", memory, flops=FAST),
    )
    request = PlanRequest(
        replace(profile_of([3.0, 1.0, 2.0, 4.0], parameters=parameters), device="fast"),
        Cluster("c", devices, 3, link, link),
        8,
        **options,
    )
    single = [shape for shape in placements(request) if shape.pipelines == 1]
    seen = []
    for shape, proposals in uneven_placements(request):
        replicas = proposals[0].replicas
        seen.append(replicas)
        assert shape == Shape(1, sum(replicas), tuple(range(sum(replicas))))
        counts = (
            [4] if "micro_batches" in options else sorted({3, 6, *request.micro_batch_counts()})
        )
        expected = []
        for choice in single:
            if choice.ranks == sum(replicas):
                rows = estimates_of(
                    request, choice.devices, replicas, [n for n in counts if n >= max(replicas)]
                )
                expected.append((*min(rows), choice.devices))
        expected.sort(key=lambda row: row[0])
        assert [proposal.devices for proposal in proposals] == [row[3] for row in expected]
        for proposal, (_, count, lengths, _) in zip(proposals, expected, strict=True):
            assert (proposal.lengths, proposal.micro_batches) == (lengths, count)
            assert (proposal.schedule, proposal.options) == ("1f1b", (("replicas", replicas),))
    all_counts = {
        replicas
        for stages in (2, 3)
        for replicas in product(range(1, options.get("max_replicas", 3) + 1), repeat=stages)
        if sum(replicas) <= 3 and len(set(replicas)) > 1 and options.get("stages", stages) == stages
    }
    assert set(seen) == all_counts
    assert len(seen) == len(set(seen))


def test_all_schedules_are_tried_with_the_placed_replicas_and_their_bound_is_one(profile_of):
    """So that each can be tried with every cut; a stage needs a micro-batch for each replica."""
    request = PlanRequest(profile_of([3.0, 1.0, 2.0], parameters=0), on(3), 8)
    shape = Shape(1, 3, (0, 1, 2))
    configurations = uneven_configurations(request, [((2, 1), shape)])
    assert {configuration.micro_batches for configuration in configurations} == {2, 3, 4, 6, 8}
    names = list(dict.fromkeys(configuration.schedule for configuration in configurations))
    assert names[:2] == ["1f1b", "zb-h1"]
    assert {"gpipe", "naive"} <= set(names)
    assert "chimera" not in names
    for configuration in configurations:
        assert (configuration.shape, configuration.stages) == (shape, 2)
        assert configuration.options == (("replicas", (2, 1)),)
        assert configuration.estimate_s == configuration.bound_s
        # The best cut is (1, 2): 9 s / 2 and 9 s for a sample.
        samples = 8 / configuration.micro_batches
        best_s = min(max(9 / 2, 9), max(12 / 2, 6))
        if 8 % configuration.micro_batches == 0:
            expected = configuration.micro_batches * best_s * samples
            assert configuration.bound_s == pytest.approx(expected)
            assert configuration.bound_s < expected


def test_more_ranks_than_are_enumerated_have_no_placements(profile_of):
    """The number of orders of devices grows with their factorial."""
    assert list(uneven_placements(PlanRequest(profile_of([1.0] * 6), on(5), 8))) == []
    assert list(uneven_placements(PlanRequest(profile_of([1.0] * 6), on(4), 8)))
    assert list(uneven_placements(PlanRequest(profile_of([1.0] * 6), on(4), 8, by="uniform"))) == []
    named = PlanRequest(profile_of([1.0] * 6), on(4), 8, schedules=("chimera",))
    assert list(uneven_placements(named)) == []


@pytest.mark.parametrize(
    ("ranks", "batch", "options", "counts"),
    [
        (3, 8, {}, {1, 2, 3, 4, 6, 8}),
        (5, 64, {}, {5, 10, 20, 40}),
        (5, 39, {}, {5, 10, 20}),
        (5, 64, {"micro_batches": 7}, {7}),
    ],
)
def test_numbers_of_micro_batches_are_small_multiples_of_the_ranks(
    profile_of, ranks, batch, options, counts
):
    """And on few ranks those that other configurations have."""
    profile = profile_of([4.0] * 4 + [0.1] * 2, parameters=[10] * 4 + [10**9] * 2)
    request = PlanRequest(profile, on(ranks, Link(0.0, 1e9)), batch, **options)
    proposals = list(uneven(request))
    assert proposals
    assert {proposal.micro_batches for proposal in proposals} <= counts
    if ranks == 5:
        assert {proposal.micro_batches for proposal in proposals} == counts


def test_on_many_ranks_only_two_schedules_are_proposed(profile_of):
    """On up to eight every schedule with one stage per rank."""
    profile = profile_of([4.0] * 4 + [0.1] * 6, parameters=[10] * 4 + [10**9] * 6)
    for ranks, expected in ((8, {"1f1b", "zb-h1", "gpipe"}), (9, {"1f1b", "zb-h1"})):
        request = PlanRequest(profile, on(ranks, Link(0.0, 1e9)), 64)
        names = {proposal.schedule for proposal in uneven(request)}
        assert expected <= names
        assert (names == expected) == (ranks == 9)
    one = PlanRequest(profile, on(9, Link(0.0, 1e9)), 64, schedules=("gpipe", "naive"))
    assert {proposal.schedule for proposal in uneven(one)} == {"gpipe"}
