"""Cuts found with one schedule are tried with the others."""

from __future__ import annotations

from penstock.cluster.cluster import Cluster, Device, Link
from penstock.search.cut_search.share_cuts import NEAR, share_cuts
from penstock.search.plan_search import PlanSearch
from penstock.search.proposal import Proposal
from penstock.search.request import PlanRequest

#: Twelve equal layers of which only the fourth has a small output.
OUTPUT = [1e6, 1e6, 1e6, 1.0, 1e6, 1e6, 1e6, 1e6, 1e6, 1e6, 1e6, 0.0]


def _search(profile_of, **options):
    """A search of two stages on a link on which a message of the fourth layer alone is cheap."""
    link = Link(0.0, 1e8)
    cluster = Cluster("c", (Device("d", 10**12),) * 2, 1, link, link)
    profile = profile_of([1e-3] * 12, output=OUTPUT)
    return PlanSearch(PlanRequest(profile, cluster, 16, budget_s=1000, **options))


def _proposals(search):
    """The proposals of all candidates."""
    return [candidate.placed.proposal for candidate in search.feasible]


def test_a_cut_found_with_one_schedule_is_tried_with_the_others(profile_of):
    """A boundary jumps to the layer with the small output, for both schedules."""
    search = _search(profile_of, micro_batches=4)
    for name in ("1f1b", "gpipe"):
        search.evaluate(Proposal((8, 4), name, 4), force=True)
    share_cuts(search)
    best = min(search.feasible, key=lambda candidate: candidate.step_s)
    assert best.placed.proposal.lengths == (4, 8)
    with_cut = [proposal for proposal in _proposals(search) if proposal.lengths == (4, 8)]
    assert {proposal.schedule for proposal in with_cut} == {"1f1b", "gpipe"}


def test_a_cut_is_tried_with_half_and_twice_the_micro_batches(profile_of):
    """And none of the proposals is evaluated twice."""
    search = _search(profile_of)
    search.evaluate(Proposal((4, 8), "1f1b", 4), force=True)
    share_cuts(search)
    proposals = _proposals(search)
    with_cut = {proposal.micro_batches for proposal in proposals if proposal.lengths == (4, 8)}
    assert {2, 4, 8} <= with_cut
    assert len(set(proposals)) == len(proposals)


def test_a_requested_cut_is_not_searched(profile_of):
    """A cut that the request names stays."""
    search = _search(profile_of, by=(6, 6))
    search.evaluate(Proposal((6, 6), "1f1b", 4), force=True)
    share_cuts(search)
    assert [proposal.lengths for proposal in _proposals(search)] == [(6, 6)]


def test_what_is_far_from_the_best_is_not_refined(profile_of):
    """Its cut would have to gain more than a local search ever has."""
    for factor, is_refined in ((NEAR * 0.99, True), (NEAR * 1.01, False)):
        search = _search(profile_of, micro_batches=4)
        candidate = search.evaluate(Proposal((8, 4), "1f1b", 4), force=True)
        search.best_s = candidate.step_s / factor
        share_cuts(search)
        assert (len(search.feasible) > 1) == is_refined


def test_cuts_of_one_stage_and_of_cost_schedules_are_not_refined(profile_of):
    """One stage has no boundary; a program that is built from costs is built for its cut."""
    search = _search(profile_of, micro_batches=4)
    for lengths, name in (((12,), "1f1b"), ((8, 4), "zb-auto")):
        search.evaluate(Proposal(lengths, name, 4), force=True)
    share_cuts(search)
    assert len(search.feasible) == 2


def test_other_devices_keep_their_own_cut_and_requested_micro_batches_stay(profile_of):
    """A cut suits the devices that it was found for. The request's number is the only one."""
    search = _search(profile_of, micro_batches=4)
    first = search.evaluate(Proposal((8, 4), "1f1b", 4), force=True)
    other = search.evaluate(Proposal((8, 4), "gpipe", 4, devices=(1, 0)), force=True)
    other_name = other.placed.proposal.schedule
    share_cuts(search)
    for proposal in _proposals(search):
        assert proposal.micro_batches == 4
        assert (proposal.schedule == other_name) == (proposal.devices == (1, 0))
    assert first.placed.proposal in _proposals(search)


def test_a_spent_budget_ends_it(profile_of):
    """What was refined so far stays."""
    search = _search(profile_of, micro_batches=4)
    search.evaluate(Proposal((8, 4), "1f1b", 4), force=True)
    search.allow(0)
    share_cuts(search)
    assert len(search.feasible) == 1
