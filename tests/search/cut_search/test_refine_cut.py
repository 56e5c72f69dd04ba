"""Cuts made better by simulation."""

from itertools import combinations, pairwise

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.search.random_requests import cuts, links, profiles

from penstock.cluster.cluster import Cluster, Device, Link
from penstock.search.cut_search.refine_cut import WORTH, refine_cut
from penstock.search.evaluate import evaluate
from penstock.search.instantiate import instantiate
from penstock.search.plan_search import PlanSearch
from penstock.search.proposal import Proposal
from penstock.search.request import PlanRequest


def on(ranks: int, link: Link = Link(0.0, 1e12)) -> Cluster:
    """Equal devices."""
    return Cluster("c", (Device("d", 10**12),) * ranks, 1, link, link)


@settings(max_examples=25, deadline=None)
@given(
    st.data(),
    profiles(3, 6),
    links(),
    st.integers(2, 3),
    st.sampled_from(["1f1b", "gpipe"]),
    st.integers(1, 8),
)
def test_no_boundary_moved_by_one_layer_makes_it_faster(
    data, profile, link, stages, name, micro_batches
):
    """And it is never slower than what it began with."""
    hunt = PlanSearch(PlanRequest(profile, on(stages, link), 8, budget_s=1000))
    first = hunt.evaluate(Proposal(data.draw(cuts(len(profile), stages)), name, micro_batches))
    refined = refine_cut(hunt, first)
    assert refined.step_s <= first.step_s
    lengths = refined.placed.proposal.lengths
    for boundary, step in [(b, s) for b in range(stages - 1) for s in (1, -1)]:
        moved = list(lengths)
        moved[boundary] += step
        moved[boundary + 1] -= step
        if min(moved) > 0:
            other = evaluate(
                instantiate(hunt.request, Proposal(tuple(moved), name, micro_batches))
            )[-1]
            assert other.step_s >= refined.step_s * (1 - WORTH)


def test_one_micro_batch_is_cut_for_its_links_alone(profile_of):
    """Nothing overlaps then: the boundary with the least to send is best, however uneven the
    stages.
    """
    profile = profile_of([1.0, 1.0, 1.0, 1.0], output=[1.0, 500.0, 100.0, 0.0])
    hunt = PlanSearch(PlanRequest(profile, on(2, Link(0.0, 100.0)), 1, budget_s=1000))
    refined = refine_cut(hunt, hunt.evaluate(Proposal((2, 2), "1f1b", 1)))
    every = {
        lengths: evaluate(instantiate(hunt.request, Proposal(lengths, "1f1b", 1)))[-1].step_s
        for lengths in (
            tuple(b - a for a, b in pairwise((0, *inner, 4)))
            for inner in combinations(range(1, 4), 1)
        )
    }
    assert (
        refined.placed.proposal.lengths == min(every, key=lambda lengths: every[lengths]) == (1, 3)
    )


def test_a_cut_that_was_asked_for_is_left_alone(profile_of):
    """So is a program that is made to measure for another cut."""
    profile = profile_of([3.0, 1.0, 1.0])
    hunt = PlanSearch(PlanRequest(profile, on(2), 8, by=(2, 1), budget_s=1000))
    first = hunt.evaluate(Proposal((2, 1), "1f1b", 4))
    assert refine_cut(hunt, first) is first
    free = PlanSearch(PlanRequest(profile, on(2), 8, budget_s=1000))
    candidate = free.evaluate(Proposal((2, 1), "zb-auto", 4))
    assert refine_cut(free, candidate) is candidate
    assert refine_cut(
        free, free.evaluate(Proposal((2, 1), "1f1b", 4), force=True)
    ).placed.proposal.lengths == (1, 2)
