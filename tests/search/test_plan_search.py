"""What a search has found, and what it leaves out."""

from dataclasses import replace

import pytest

from penstock.cluster.cluster import Cluster, Device, Link
from penstock.schedule.catalogue import schedule
from penstock.search import plan_search
from penstock.search.plan_search import (
    FEW_RANKS,
    LEAST_SHARE,
    UNFIT,
    PlanSearch,
    fastest_of_kinds,
    max_in_flight,
)
from penstock.search.proposal import Proposal
from penstock.search.request import PlanRequest
from penstock.search.search_space import SearchSpace
from penstock.search.shapes import shapes
from penstock.synthesis.deadline import Deadline


def on(ranks: int, memory: int = 10**12) -> Cluster:
    """Free links."""
    link = Link(0.0, 1e12)
    return Cluster("c", (Device("d", memory),) * ranks, 1, link, link)


def way_of(request, **numbers):
    """The one way with these numbers."""
    (configuration,) = (
        way
        for way in SearchSpace(request, shapes(request)).configurations
        if all(getattr(way, name, None) == value for name, value in numbers.items())
        and way.shape.pipelines == 1
    )
    return configuration


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
    candidate = hunt.evaluate(both)
    assert (
        len(hunt.representatives),
        hunt.representatives[0].placed.pipelines,
        hunt.representatives[0].placed.schedule.ranks,
    ) == (1, 2, 2)
    assert hunt.feasible == [candidate]
    assert candidate.placed.schedule.ranks == 4
    assert candidate.step_s == pytest.approx(hunt.representatives[0].step_s)
    hunt.best_s = candidate.step_s / 1.1
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
    candidate = hunt.evaluate(Proposal((1,), "gpipe", 4, (("replicas", 2),)))
    assert hunt.representatives[0].recompute == candidate.recompute != "never"
    assert max(candidate.memory) <= 3000


def test_a_way_that_does_not_fit_is_cut_again_within_memory(profile_of):
    """Even times are uneven bytes here: 1 + 3 layers hold 9,000 bytes of weights on one rank, 2 + 2
    no more than 6,000.
    """
    profile = profile_of([8.0, 1.0, 1.0, 1.0], activation=1.0, parameters=[10, 1000, 1000, 1000])
    request = PlanRequest(profile, on(2, memory=6100), 4, ("gpipe",), recompute="never")
    hunt = PlanSearch(request)
    candidate = hunt.evaluate_configuration(way_of(request, stages=2, micro_batches=2))
    assert candidate.placed.proposal.lengths in ((2, 2), (3, 1))
    assert [candidate.placed.proposal.lengths for candidate in hunt.infeasible] == [(1, 3)]
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
    evaluated = PlanSearch(request).evaluate_configuration(way)
    assert evaluated.placed.schedule.ranks == 4
    assert evaluated.placed.proposal.lengths in ((2, 2), (3, 1))


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
    ("example", "expected"),
    [
        (schedule("1f1b", 4, 8), (4, 3, 2, 1)),
        (schedule("gpipe", 2, 8), (8, 8)),
        (schedule("1f1b", 2, 8, replicas=2), (2, 1)),
        (schedule("zb-h1", 2, 8), (2, 2)),
        (schedule("autopipe", 2, 4, sliced=1), (2, 1)),
    ],
    ids=["1f1b", "gpipe", "copies", "split backwards", "slices"],
)
def test_micro_batches_in_flight_are_counted_per_stage_and_rank(example, expected):
    """What memory has to hold at once, until the last part of a backward; slices count by their
    share.
    """
    assert max_in_flight(example) == expected


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
        (candidate.kind[:2], candidate.placed.proposal.micro_batches)
        for candidate in fastest_of_kinds(hunt.feasible, 3)
    ]
    assert kinds[0] == (("1f1b", 4), 16)
    assert set(kinds[1:]) == {(("1f1b", 2), 16), (("gpipe", 2), 16)}, "of 2 stages equally fast"
    assert len(fastest_of_kinds(hunt.feasible, 1)) == 1


@pytest.mark.parametrize(
    ("layers", "ranks", "budget_s", "work", "unfit"),
    [
        # As stated for the usual budget of 10 s; four times as much while nothing fits.
        (4, 2, 10, 1000, 4000),
        (4, 2, 5, 500, 4000),
        (4, 2, 20, 2000, 8000),
        (4, 2, 0, 0, 4000),
        # 1,000 pairs of a layer and a rank are twice as many as a large request has.
        (100, 10, 10, 500, 2000),
        (100, 10, 20, 1000, 4000),
        (50, 10, 10, 1000, 4000),
        # No less than the least share.
        (1000, 100, 10, 1000 * LEAST_SHARE, 4000 * LEAST_SHARE),
    ],
)
def test_the_work_allowed_follows_from_the_budget_and_the_size_of_the_request(
    profile_of, layers, ranks, budget_s, work, unfit
):
    """It counts from now: each step of a search has its own."""
    request = PlanRequest(profile_of([1.0] * layers), on(ranks), 16, budget_s=budget_s)
    search = PlanSearch(request)
    search.work = 77.0
    search.allow(1000)
    for fits, most in ((False, unfit), (True, work)):
        if fits:
            search.feasible.append(None)
        search.work = 77.0 + most - 1
        assert not search.is_over
        search.work += 1
        assert search.is_over
        assert search.stopped_by == "work"


def test_the_clock_ends_a_search_at_85_percent_of_its_limit(profile_of):
    """The rest is for the plan's table and suggestions. Without a limit it never ends by time."""
    request = PlanRequest(profile_of([1.0] * 4), on(2), 16, deadline=Deadline(1000.0))
    search = PlanSearch(request)
    assert search.deadline.budget_s == pytest.approx(850, abs=1)
    assert search.deadline is not request.deadline
    free = PlanSearch(replace(request, deadline=None))
    assert not free.is_over
    assert free.deadline.budget_s == float("inf")


def test_the_note_says_what_ended_the_search(profile_of):
    """Another run may find another plan only if the clock did; a larger budget helps otherwise."""
    request = PlanRequest(profile_of([1.0] * 4), on(2), 16, budget_s=2.5)
    search = PlanSearch(request)
    search.evaluated = 1234
    assert search.note == ""
    search.stopped_by = "work"
    assert search.note == (
        "search cut short after 1,234 evaluations, which is the work of budget_s=2.5 s: a larger "
        "budget may find a faster plan"
    )
    search.stopped_by = "time"
    assert search.note.startswith("search cut short by the clock after 0.0 s and 1,234 evaluations")
    assert search.note.endswith("allow more than this time_limit_s")
    # The clock counts, once it has stopped anything.
    late = PlanSearch(replace(request, deadline=Deadline(0)))
    assert late.is_over
    late.work = late._most_work
    assert late.is_over
    assert late.stopped_by == "time"


def test_what_explains_a_plan_is_simulated_with_a_budget_and_time(profile_of):
    """A budget of 0 asks for the first plan that fits, and nothing else."""
    request = PlanRequest(profile_of([1.0] * 4), on(2), 16, budget_s=1)
    assert PlanSearch(request).may_explain
    assert not PlanSearch(replace(request, budget_s=0)).may_explain
    assert not PlanSearch(replace(request, deadline=Deadline(0))).may_explain


def test_several_stages_per_rank_are_cut_again_for_even_ranks_if_they_are_near_the_best(
    profile_of, monkeypatch
):
    """Stages of at most 4 s leave rank 0 with 8 s of 12; with a stage of 5 s both ranks have 6.
    What is far from the best, or has too many ranks, is not worth a second simulation.
    """
    profile = profile_of([4.0, 1.0, 4.0, 1.0, 1.0, 1.0])
    request = PlanRequest(
        profile, on(2), 8, ("interleaved",), stages=4, micro_batches=8, max_replicas=1
    )
    configuration = way_of(request, stages=4, micro_batches=8)
    search = PlanSearch(request)
    search.evaluate_configuration(configuration)
    cuts = [candidate.placed.proposal.lengths for candidate in search.feasible]
    schedule_made = search.schedule_of(configuration)
    assert cuts == [
        search.lengths_of(configuration, schedule_made, "time"),
        search.lengths_of(configuration, schedule_made, "ranks"),
    ]
    assert search.tried == {(configuration, "time")}
    far = PlanSearch(request)
    far.best_s = search.best_s / 1.2
    far.evaluate_configuration(configuration, force=True)
    assert len(far.feasible) == 1
    monkeypatch.setattr(plan_search, "FEW_RANKS", 1)
    large = PlanSearch(request)
    large.evaluate_configuration(configuration)
    assert len(large.feasible) == 1
    assert FEW_RANKS > 1


def test_a_schedule_that_does_not_match_its_shape_is_left_out(profile_of):
    """DualPipe needs twice as many stages as the shape has ranks, Chimera has two copies of each
    stage: they count as replicas unless the schedule is named. Reasons are recorded once.
    """
    profile = profile_of([1.0] * 4)
    request = PlanRequest(profile, on(2), 8, max_replicas=1)
    configurations = {
        (way.schedule, way.stages): way
        for way in SearchSpace(request, shapes(request)).configurations
        if way.micro_batches == 8 and way.shape.ranks == 2
    }
    search = PlanSearch(request)
    assert search.schedule_of(configurations["1f1b", 2]).ranks == 2
    assert search.schedule_of(configurations["chimera", 2]) is None
    assert not search.rejected
    named = PlanSearch(replace(request, schedules=("chimera",)))
    assert named.schedule_of(configurations["chimera", 2]).copies == 2
    # Chimera in 4 stages would have 4 ranks.
    assert search.schedule_of(configurations["chimera", 4]) is None
    assert list(search.rejected) == ["chimera in 4 stages needs 4 ranks, c has 2"]
    refused = replace(configurations["chimera", 2], micro_batches=3)
    assert named.schedule_of(refused) is None
    assert "takes an even number of them and got 3" in next(iter(named.rejected))
    # Of two pipelines each has half of the micro-batches, rounded up.
    (double,) = (
        way
        for way in SearchSpace(request, shapes(replace(request, max_replicas=2))).configurations
        if way.schedule == "1f1b" and way.shape.pipelines == 2 and way.micro_batches == 4
    )
    free = PlanSearch(replace(request, max_replicas=2))
    assert free.schedule_of(replace(double, micro_batches=5)).micro_batches == 3
    assert search.schedule_of(double) is None


def test_proposals_name_devices_only_where_they_are_not_the_first(profile_of):
    """A plan with rank r on device r is the same however it was found."""
    request = PlanRequest(profile_of([1.0] * 4), on(3), 8, ("1f1b",))
    search = PlanSearch(request)
    configuration = way_of(request, stages=2, micro_batches=4)
    result = search.schedule_of(configuration)
    for devices, named in (((0, 1), ()), ((1, 0), (1, 0)), ((1, 2), (1, 2)), ((2,), ())):
        shape = replace(configuration.shape, devices=devices)
        proposal = search.proposal_of(replace(configuration, shape=shape), result, (1, 3))
        assert proposal == Proposal((1, 3), "1f1b", 4, devices=named)


def test_cuts_are_computed_once_for_equal_devices_and_numbers(profile_of, monkeypatch):
    """Not for other micro-batches, another balance, or devices of another kind."""
    calls = []

    def counted(*arguments):
        calls.append(arguments[1:])
        return (2, 2)

    monkeypatch.setattr(plan_search, "cut", counted)
    link = Link(0.0, 1e12)
    devices = (Device("d", 10**12),) * 3 + (Device("e", 10**12),)
    profiles = {"d": profile_of([1.0] * 4), "e": profile_of([2.0] * 4)}
    request = PlanRequest(profiles, Cluster("c", devices, 4, link, link), 8, ("1f1b",))
    search = PlanSearch(request)
    configuration = next(
        way
        for way in SearchSpace(request, shapes(request)).configurations
        if (way.stages, way.micro_batches, way.shape.devices) == (2, 4, (0, 1))
    )
    result = search.schedule_of(configuration)

    def lengths(devices, micro_batches=4, balance="time"):
        shape = replace(configuration.shape, devices=devices)
        other = replace(configuration, shape=shape, micro_batches=micro_batches)
        return search.lengths_of(other, result, balance)

    for arguments in (
        ((0, 1),),
        ((1, 2),),
        ((0, 3),),
        ((3, 0),),
        ((0, 1), 8),
        ((0, 1), 4, "limits"),
    ):
        before = len(calls)
        assert lengths(*arguments) == (2, 2)
        assert len(calls) == before + (arguments != ((1, 2),))
        assert lengths(*arguments) == (2, 2)
        assert len(calls) <= before + 1
    assert calls[0] == ((0, 1), 4, "time", ())
    assert calls[-1] == ((0, 1), 4, "limits", (2.0, 1.0))


def test_activations_that_are_moved_to_another_rank_count_for_their_stage():
    """BPipe's last rank holds some of stage 0: still stage 0 has them in flight."""
    assert max_in_flight(schedule("bpipe", 4, 8)) == (4, 3, 2, 1)
