"""Stages on different numbers of ranks."""

from itertools import product
from math import inf, lcm

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.search.random_requests import FAST, SLOW, links, profiles

from penstock.cluster.cluster import Cluster, Device, Link, cluster
from penstock.search.cut_search.uneven_replication import uneven
from penstock.search.evaluate import evaluate
from penstock.search.instantiate import instantiate
from penstock.search.request import PlanRequest
from penstock.simulate.gradient_sync import all_reduce_seconds


def on(ranks: int, link: Link = Link(0.0, 1e12)) -> Cluster:
    """So many equal devices, one on each node."""
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
        found = evaluate(instantiate(request, proposal))[-1]
        assert not found.memory_shortfall
        assert found.replicas == proposal.replicas


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
    found = list(uneven(request))
    if not found:
        return

    def slowest(lengths, copies):
        times, start = [], 0
        for length, count in zip(lengths, copies, strict=True):
            own = profile.layers[start : start + length]
            comes = (
                0.0
                if start == 0
                else link.transfer_seconds(2 * profile.layers[start - 1].output_bytes_per_sample)
            )
            met = all_reduce_seconds(
                range(count), sum(layer.parameter_bytes for layer in own), request.cluster
            )
            work = sum(layer.seconds("forward", 2) + layer.seconds("backward", 2) for layer in own)
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
    (proposal,) = found
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
