"""Every configuration with every cut."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.search.random_requests import links, profiles

from penstock.cluster.cluster import Cluster, Device, Link
from penstock.search.cut_search import explore_cuts as module
from penstock.search.cut_search.cut_bounds import CutBounds, all_cuts, lengths_of
from penstock.search.cut_search.explore_cuts import explore_cuts
from penstock.search.evaluate import evaluate
from penstock.search.instantiate import instantiate
from penstock.search.plan_search import PlanSearch
from penstock.search.proposal import Proposal
from penstock.search.request import PlanRequest
from penstock.search.search_space import SearchSpace
from penstock.search.shapes import shapes

NAMES = ("1f1b", "zb-h1")


def on(ranks: int, link: Link) -> Cluster:
    """Equal devices."""
    return Cluster("c", (Device("d", 10**12),) * ranks, 1, link, link)


def request_for(profile, ranks, link, **options):
    """One pipeline without copies."""
    return PlanRequest(profile, on(ranks, link), 8, NAMES, max_replicas=1, **options)


def best_of_all_cuts(request):
    """The slow way: every schedule, number of stages and of micro-batches, and cut, one by one."""
    best_s = math.inf
    for stages in range(1, min(request.cluster.ranks, len(request.profile)) + 1):
        for ends in all_cuts(len(request.profile), stages):
            for name in NAMES:
                for count in request.micro_batch_counts():
                    placed = instantiate(request, Proposal(lengths_of(ends), name, count))
                    best_s = min(best_s, evaluate(placed)[-1].step_s)
    return best_s


@settings(max_examples=10, deadline=None)
@given(profiles(3, 5), st.integers(2, 3), links())
def test_the_best_of_all_cuts_is_found_from_nothing(profile, ranks, link):
    """No cut of an earlier step is needed: bounds alone decide what is simulated."""
    request = request_for(profile, ranks, link, budget_s=1000)
    search = PlanSearch(request)
    assert explore_cuts(search, SearchSpace(request, shapes(request)).configurations)
    assert search.best_s <= best_of_all_cuts(request) * (1 + 1e-9)


def test_a_spent_budget_ends_it_and_it_says_that_it_is_not_complete(profile_of):
    """The next best cut stays untried."""
    request = request_for(profile_of([1.0, 3.0, 2.0, 5.0]), 3, Link(0.0, 1e12))
    search = PlanSearch(request, 1)
    assert not explore_cuts(search, SearchSpace(request, shapes(request)).configurations)
    assert search.evaluated == 1
    assert search.stopped_by == "work"


@pytest.mark.parametrize("work", [1, 20_000])
def test_a_budget_that_ends_among_the_cuts_of_one_configuration_is_not_complete(profile_of, work):
    """Cuts whose bound is below the best time are left, whichever round they were in."""
    seconds = [1.0, 3.0, 2.0, 5.0, 1.0, 4.0]
    link = Link(1e-3, 1e2)
    request = request_for(profile_of(seconds), 3, link, stages=3, micro_batches=2)
    (one, *_) = SearchSpace(request, shapes(request)).configurations
    search = PlanSearch(request, work)
    assert not explore_cuts(search, [one])
    assert 0 < search.evaluated < 10
    assert explore_cuts(PlanSearch(request), [one])


def test_a_named_partition_method_leaves_nothing_to_explore(profile_of):
    """Its cut is the only one."""
    request = request_for(profile_of([1.0, 3.0]), 2, Link(0.0, 1e12), by="uniform")
    search = PlanSearch(request)
    assert explore_cuts(search, SearchSpace(request, shapes(request)).configurations)
    assert search.evaluated == 0


def test_of_many_cuts_a_local_search_finds_one_at_least_as_good_as_the_exact_cut(
    profile_of, monkeypatch
):
    """The slowest stage is as fast as possible with more than one cut: filling decides."""
    monkeypatch.setattr(module, "MOST_CUTS", 0)
    seconds = [4.0, 1.0, 1.0, 2.0, 1.0, 3.0, 1.0, 1.0]
    request = request_for(profile_of(seconds), 4, Link(0.0, 1e12), stages=4, budget_s=1000)
    space = SearchSpace(request, shapes(request))
    exact = PlanSearch(request)
    for configuration in space.configurations:
        exact.evaluate_configuration(configuration)
    search = PlanSearch(request)
    assert not explore_cuts(search, space.configurations), "nothing is proved"
    assert search.best_s <= exact.best_s * (1 + 1e-9)
    assert search.best_s == pytest.approx(best_of_all_cuts_in(request, 4), rel=0.02)


def test_of_many_cuts_the_one_that_is_simulated_has_no_better_bound_beside_it(
    profile_of, monkeypatch
):
    """Boundaries move by up to four layers while the bound falls; only the end is simulated."""
    monkeypatch.setattr(module, "MOST_CUTS", 0)
    monkeypatch.setattr(module, "refine_cut", lambda _, candidate: candidate)
    seconds = [4.0, 1.0, 1.0, 2.0, 1.0, 3.0, 1.0, 1.0, 2.0, 5.0]
    output = [900.0, 800.0, 10.0, 700.0, 900.0, 20.0, 800.0, 900.0, 30.0, 1.0]
    profile = profile_of(seconds, output=output)
    request = request_for(profile, 3, Link(0.1, 1e2), stages=3, micro_batches=4)
    moved = 0
    for configuration in SearchSpace(request, shapes(request)).configurations:
        search = PlanSearch(request)
        explore_cuts(search, [configuration])
        (candidate,) = search.feasible
        lengths = candidate.placed.proposal.lengths
        result = search.schedule_of(configuration)
        bounds = CutBounds(request, configuration.shape, result, configuration.micro_batches)
        start = search.lengths_of(configuration, result, "time")
        moved += lengths != start
        cuts = all_cuts(len(seconds), 3)
        seconds_of = {
            lengths_of(ends): bound
            for ends, bound in zip(cuts, bounds.seconds(cuts).tolist(), strict=True)
        }
        assert seconds_of[lengths] <= seconds_of[start]
        first, second = lengths[0], lengths[0] + lengths[1]
        for step in module.STEPS:
            for ends in ((first + step, second), (first, second + step)):
                other = (ends[0], ends[1] - ends[0], len(seconds) - ends[1])
                assert seconds_of.get(other, math.inf) >= seconds_of[lengths]
    assert moved


def best_of_all_cuts_in(request, stages):
    """The same with one number of stages."""
    best_s = math.inf
    for ends in all_cuts(len(request.profile), stages):
        for name in NAMES:
            placed = instantiate(request, Proposal(lengths_of(ends), name, 8))
            best_s = min(best_s, evaluate(placed)[-1].step_s)
    return best_s
