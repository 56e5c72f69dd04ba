"""What a search has found, and what it leaves out."""

import pytest

from penstock.cluster.cluster import Cluster, Device, Link
from penstock.schedule.catalogue import schedule
from penstock.search.plan_search import UNFIT, PlanSearch, fastest_of_kinds, max_in_flight
from penstock.search.proposal import Proposal
from penstock.search.request import PlanRequest
from penstock.search.search_space import SearchSpace
from penstock.search.shapes import shapes
from penstock.synthesis.deadline import Deadline


def on(ranks: int, memory: int = 10**12) -> Cluster:
    """Free links."""
    link = Link(0.0, 1e12)
    return Cluster("c", (Device("d", memory),) * ranks, 1, link, link)


def way_of(request, **wanted):
    """The one way with these numbers."""
    (found,) = (
        way
        for way in SearchSpace(request, shapes(request)).configurations
        if all(getattr(way, name, None) == value for name, value in wanted.items())
        and way.shape.pipelines == 1
    )
    return found


def test_what_cannot_win_is_not_simulated_unless_forced(profile_of):
    """By its bound from the numbers alone, or of its program."""
    hunt = PlanSearch(PlanRequest(profile_of([1.0] * 4), on(4), 16, ("gpipe",)))
    quick, slow = (way_of(hunt.request, stages=4, micro_batches=m) for m in (16, 1))
    assert hunt.evaluate_configuration(quick) is hunt.feasible[0]
    assert hunt.best_s == pytest.approx(19 * 3)
    assert slow.bound_s > hunt.cutoff_s
    assert hunt.evaluate_configuration(slow) is None
    assert hunt.evaluated == 1
    assert hunt.evaluate_configuration(slow, force=True).step_s == pytest.approx(4 * 48)
    assert hunt.best_s == pytest.approx(19 * 3), "the best stays"
    assert hunt.evaluate(Proposal((4,), "gpipe", 1)) is None, (
        "one rank has more to do than that, by its program"
    )
    assert hunt.evaluated == 2


def test_of_several_pipelines_one_is_weighed_first_and_all_only_if_that_may_win(profile_of):
    """Of a hundred pipelines nearly all cost nothing."""
    request = PlanRequest(profile_of([1.0] * 4, fixed=0.2), on(4), 16, ("1f1b",))
    hunt = PlanSearch(request)
    both = Proposal((2, 2), "1f1b", 8, (("replicas", 2),))
    found = hunt.evaluate(both)
    assert (
        len(hunt.representatives),
        hunt.representatives[0].placed.pipelines,
        hunt.representatives[0].placed.schedule.ranks,
    ) == (1, 2, 2)
    assert hunt.feasible == [found]
    assert found.placed.schedule.ranks == 4
    assert found.step_s == pytest.approx(hunt.representatives[0].step_s)
    hunt.best_s = found.step_s / 1.1
    work = hunt.work
    assert hunt.evaluate(both) is None
    assert len(hunt.feasible) == 1
    assert hunt.work == work or len(hunt.representatives) == 2


def test_an_odd_sample_that_only_some_pipelines_get_is_made_room_for(profile_of):
    """Of 5 samples in 4 micro-batches one has 2. The pipeline that stands for both has that one, and
    recomputes as well.
    """
    profile = profile_of([1.0], activation=1000.0, parameters=0)
    hunt = PlanSearch(PlanRequest(profile, on(2, memory=3000), 5, ("gpipe",)))
    found = hunt.evaluate(Proposal((1,), "gpipe", 4, (("replicas", 2),)))
    assert hunt.representatives[0].recompute == found.recompute != "never"
    assert max(found.memory) <= 3000


def test_a_way_that_does_not_fit_is_cut_again_within_memory(profile_of):
    """Even times are uneven bytes here: 1 + 3 layers hold 9,000 bytes of weights on one rank, 2 + 2
    no more than 6,000.
    """
    profile = profile_of([8.0, 1.0, 1.0, 1.0], activation=1.0, parameters=[10, 1000, 1000, 1000])
    request = PlanRequest(profile, on(2, memory=6100), 4, ("gpipe",), recompute="never")
    hunt = PlanSearch(request)
    found = hunt.evaluate_configuration(way_of(request, stages=2, micro_batches=2))
    assert found.placed.proposal.lengths in ((2, 2), (3, 1))
    assert [each.placed.proposal.lengths for each in hunt.infeasible] == [(1, 3)]
    assert hunt.infeasible[0].memory_shortfall


def test_whole_pipelines_that_do_not_fit_are_cut_again_too(profile_of):
    """What one pipeline lacks, all lack."""
    profile = profile_of([8.0, 1.0, 1.0, 1.0], activation=1.0, parameters=[10, 1000, 1000, 1000])
    request = PlanRequest(
        profile, on(4, memory=6100), 8, ("gpipe",), recompute="never", stages=2, micro_batches=4
    )
    (way,) = (
        way
        for way in SearchSpace(request, shapes(request)).configurations
        if way.shape.pipelines == 2
    )
    found = PlanSearch(request).evaluate_configuration(way)
    assert found.placed.schedule.ranks == 4
    assert found.placed.proposal.lengths in ((2, 2), (3, 1))


def test_what_cannot_be_made_is_remembered_once(profile_of):
    """Each reason is told once, however many ways it stops."""
    hunt = PlanSearch(PlanRequest(profile_of([1.0] * 4), on(2), 16))
    for m in (4, 8):
        assert hunt.evaluate(Proposal((1,) * 4, "1f1b", m)) is None
    assert list(hunt.rejected) == ["1f1b in 4 stages needs 4 ranks, c has 2"]


def test_a_search_ends_by_its_work_but_not_before_something_fits(profile_of):
    """Work is counted in ops: the same on every machine."""
    hunt = PlanSearch(PlanRequest(profile_of([1.0] * 4), on(2), 16, budget_s=1000), 1)
    assert not hunt.is_over
    hunt.evaluate(Proposal((2, 2), "1f1b", 4))
    assert hunt.is_over
    hunt.allow(10**6)
    assert not hunt.is_over
    request = PlanRequest(profile_of([1.0] * 4), on(2), 16, deadline=Deadline(0))
    late = PlanSearch(request)
    assert late.is_over
    assert late.deadline.remaining_s == 0
    assert late.stopped_by == "time"


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        (schedule("1f1b", 4, 8), (4, 3, 2, 1)),
        (schedule("gpipe", 2, 8), (8, 8)),
        (schedule("1f1b", 2, 8, replicas=2), (2, 1)),
        (schedule("zb-h1", 2, 8), (2, 2)),
        (schedule("autopipe", 2, 4, sliced=1), (2, 1)),
    ],
    ids=["1f1b", "gpipe", "copies", "split backwards", "slices"],
)
def test_micro_batches_in_flight_are_counted_per_stage_and_rank(made, expected):
    """What memory has to hold at once, until the last part of a backward; slices count by their
    share.
    """
    assert max_in_flight(made) == expected


def test_a_search_in_which_nothing_fits_ends_by_its_work_as_well(profile_of):
    """It is allowed more of it, and also for a small budget."""
    for budget_s in (0, 10):
        search = PlanSearch(PlanRequest(profile_of([1.0] * 4), on(2), 16, budget_s=budget_s))
        search.allow(1000)
        search.work = UNFIT * 1000 - 1
        assert not search.is_over
        search.work += 1
        assert search.is_over
        assert search.stopped_by == "work"


def test_a_spread_has_the_fastest_of_each_kind(profile_of):
    """Three alike would be polished into the same plan."""
    hunt = PlanSearch(PlanRequest(profile_of([1.0] * 4), on(4), 16))
    for name, m, lengths in (
        ("gpipe", 2, (2, 2)),
        ("gpipe", 16, (2, 2)),
        ("1f1b", 16, (2, 2)),
        ("1f1b", 16, (1,) * 4),
    ):
        hunt.evaluate(Proposal(lengths, name, m), force=True)
    kinds = [
        (each.kind[:2], each.placed.proposal.micro_batches)
        for each in fastest_of_kinds(hunt.feasible, 3)
    ]
    assert kinds[0] == (("1f1b", 4), 16)
    assert set(kinds[1:]) == {(("1f1b", 2), 16), (("gpipe", 2), 16)}, "of 2 stages equally fast"
    assert len(fastest_of_kinds(hunt.feasible, 1)) == 1
