"""What is tried, and the bounds that spare trying."""

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.search.random_requests import FAST, SLOW, clusters, cuts, profiles, unlike

from penstock.cluster.cluster import Cluster, Device, Link, cluster
from penstock.errors import PlanError, ScheduleError
from penstock.schedule.catalogue import schedules
from penstock.search.cuts import cut
from penstock.search.evaluate import evaluate
from penstock.search.instantiate import instantiate
from penstock.search.proposal import Proposal
from penstock.search.request import PlanRequest
from penstock.search.schedule_bound import schedule_bound_s
from penstock.search.search_space import SearchSpace, layouts
from penstock.search.shapes import Shape, shapes
from penstock.simulate.gradient_sync import all_reduce_seconds
from penstock.simulate.steady_state import steady


def ways(request):
    """All of a request."""
    return SearchSpace(request, shapes(request)).configurations


@settings(
    max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.lists(st.floats(1e-3, 1), min_size=2, max_size=5), st.integers(1, 3), st.integers(1, 9))
def test_no_way_is_shorter_than_the_bound_from_its_numbers_alone(profile_of, seconds, ranks, batch):
    """The first sieve knows only the schedule's name and the sums."""
    request = PlanRequest(profile_of(seconds), cluster(ranks), batch, asynchronous=True)
    for way in ways(request):
        lengths = cut(
            request.on(way.shape.first),
            [s % way.shape.ranks for s in range(way.stages)],
            way.micro_batches,
            "time",
        )
        try:
            placed = instantiate(
                request,
                Proposal(
                    lengths,
                    way.schedule,
                    way.micro_batches,
                    way.all_options,
                    devices=way.shape.devices,
                ),
            )
        except (ScheduleError, PlanError):
            continue
        assert way.bound_s <= steady(placed.schedule, placed.costs).seconds_per_batch * (1 + 1e-9)


def test_the_best_estimates_come_first(profile_of):
    """A search that is stopped has then seen the promising ones."""
    listed = ways(PlanRequest(profile_of([1.0] * 4), cluster(4), 16, ("gpipe",), max_replicas=1))
    assert (listed[0].stages, listed[0].micro_batches) == (4, 16)
    assert [way.estimate_s for way in listed] == sorted(way.estimate_s for way in listed)
    assert all(way.bound_s <= way.estimate_s * (1 + 1e-9) for way in listed)


def test_given_numbers_are_the_only_ones(profile_of):
    """The planner fills in what was left open, and nothing else."""
    listed = ways(
        PlanRequest(
            profile_of([1.0] * 4),
            cluster(4),
            16,
            ("gpipe", "1f1b"),
            stages=3,
            micro_batches=5,
            max_replicas=1,
        )
    )
    assert [(way.schedule, way.stages, way.micro_batches) for way in listed] == [
        ("1f1b", 3, 5),
        ("gpipe", 3, 5),
    ]


def test_no_more_stages_than_layers_and_no_more_micro_batches_than_samples(profile_of):
    """Either would be empty."""
    listed = ways(PlanRequest(profile_of([1.0] * 2), cluster(4), 3, ("gpipe",)))
    assert {way.stages for way in listed} == {1, 2}
    assert {way.micro_batches for way in listed} == {1, 2, 3}


@settings(max_examples=25, deadline=None)
@given(st.data(), profiles(2, 6, simple=False), clusters(4), st.integers(1, 17), st.booleans())
def test_no_cut_of_a_way_is_faster_than_its_bound(data, profile, on, batch, asynchronous):
    """Whatever is faster at which layer, on which device, split or whole."""
    kind_profiles = data.draw(unlike(profile)) if len(on.kinds) > 1 else profile
    request = PlanRequest(kind_profiles, on, batch, asynchronous=asynchronous)
    space = SearchSpace(request, shapes(request))
    for way in data.draw(st.lists(st.sampled_from(space.configurations), max_size=6)):
        lengths = data.draw(cuts(len(profile), way.stages))
        proposal = Proposal(
            lengths, way.schedule, way.micro_batches, way.all_options, devices=way.shape.devices
        )
        try:
            placed = instantiate(request, proposal)
        except (ScheduleError, PlanError):
            continue
        step_s = steady(placed.schedule, placed.costs).seconds_per_batch
        assert max(way.bound_s, space.least_s) <= step_s * (1 + 1e-9)
        assert schedule_bound_s(placed.schedule, placed.costs) <= step_s * (1 + 1e-9)


def test_devices_that_are_each_faster_at_some_layers_are_bound_by_the_faster_of_each(profile_of):
    """1 s a layer where each stands on its own device, 10 on the other: the sums alone would say
    11.
    """
    kind_profiles = {"a": profile_of([1.0, 10.0]), "b": profile_of([10.0, 1.0])}
    link = Link(0.0, 1e12)
    on = Cluster("c", (Device("a", 10**9), Device("b", 10**9)), 2, link, link)
    request = PlanRequest(kind_profiles, on, 16, ("gpipe",), max_replicas=1)
    (way,) = (
        way for way in ways(request) if way.micro_batches == 16 and way.shape.devices == (0, 1)
    )
    placed = instantiate(request, Proposal((1, 1), "gpipe", 16))
    assert (
        way.bound_s
        <= steady(placed.schedule, placed.costs).seconds_per_batch
        == pytest.approx(17 * 3)
    )


def test_the_bound_of_even_stages_is_sharp(profile_of):
    """Otherwise nothing would be pruned: 4 stages of 3 s and 16 micro-batches take 57; shares of
    the work that no layers allow, 51.1.
    """
    (way,) = (
        way
        for way in ways(
            PlanRequest(
                profile_of([1.0] * 4),
                cluster(4),
                16,
                ("gpipe",),
                stages=4,
                micro_batches=16,
                max_replicas=1,
            )
        )
    )
    assert way.bound_s == pytest.approx(51.1, abs=0.1)
    assert way.estimate_s == pytest.approx(57)


def test_the_leading_schedules_are_1f1b_and_pipedream_where_they_are_weighed(profile_of):
    """A first look with one of each kind; else with the best estimate's."""
    profile = profile_of([1.0] * 4)

    def leading(**options):
        request = PlanRequest(profile, cluster(4), 16, **options)
        return SearchSpace(request, shapes(request)).leading

    assert leading() == {"1f1b"}
    assert leading(asynchronous=True) == {"1f1b", "pipedream"}
    assert leading(schedules=("gpipe",)) == {"gpipe"}


def test_no_plan_is_below_the_least_time_where_a_fast_rank_alone_is_fastest(profile_of):
    """Two devices that slow each other down twofold: the bound used to assume both busy, and was 1.2
    times the step of the fast one alone.
    """
    link = Link(0.0, 1e12)
    kinds = (
        Device("fast", 10**12, flops=FAST, together=2.0),
        Device("slow", 10**12, flops=SLOW, together=2.0),
    )
    request = PlanRequest(profile_of([1.0, 1.0]), Cluster("c", kinds, 2, link, link), 4)
    alone = evaluate(instantiate(request, Proposal((2,), "1f1b", 4)))[-1]
    assert SearchSpace(request, shapes(request)).least_s <= alone.step_s


@pytest.mark.parametrize(
    ("name", "ranks", "expected"),
    [
        ("1f1b", 3, [(3, ())]),
        ("1f1b", 1, [(1, ())]),
        ("interleaved", 3, [(6, (("chunks", 2),)), (9, (("chunks", 3),)), (12, (("chunks", 4),))]),
        ("interleaved", 1, [(1, (("chunks", 1),))]),
        ("hanayo", 2, [(4, (("waves", 1),)), (8, (("waves", 2),))]),
        ("zb-v", 3, [(6, ())]),
        ("chimera", 4, [(4, ()), (8, ())]),
    ],
)
def test_a_schedule_has_the_numbers_of_stages_that_its_ranks_allow(name, ranks, expected):
    """Which of two numbers a family with two stages per rank takes, only the family knows."""
    facts = schedules()[name]
    assert layouts(facts, ranks) == expected


def test_on_one_rank_one_schedule_of_each_behaviour_is_left(profile_of):
    """With one stage all others are the same: what differs is the flush, halves and weights."""
    request = PlanRequest(profile_of([1.0]), cluster(1), 4, asynchronous=True)
    names = {way.schedule for way in ways(request)}
    families = schedules()
    behaviours = [
        (families[name].splits_backward, families[name].synchronous, families[name].weights)
        for name in names
    ]
    assert len(set(behaviours)) == len(behaviours)
    assert {"1f1b", "pipedream"} & names or names
    assert all(families[name].stages_per_rank == "1" for name in names)
    every = {
        (facts.splits_backward, facts.synchronous, facts.weights)
        for facts in request.families()
        if facts.stages_per_rank == "1"
    }
    assert set(behaviours) == every
    named = PlanRequest(profile_of([1.0]), cluster(1), 4, ("interleaved",))
    assert {way.schedule for way in ways(named)} == {"interleaved"}


@pytest.mark.parametrize(
    ("batch", "micro_batches", "expected"),
    [
        (64, None, {3, 6, 12, 1, 2, 4, 8, 16, 32, 64}),
        # A multiple may be the batch itself.
        (12, None, {3, 6, 12}),
        (11, None, {3, 6}),
        (64, 5, {5}),
    ],
)
def test_multiples_of_the_ranks_of_a_pipeline_are_tried_too(
    profile_of, batch, micro_batches, expected
):
    """Interleaved schedules need them, whatever the batch."""
    request = PlanRequest(
        profile_of([1.0] * 3),
        cluster(3),
        batch,
        ("1f1b",),
        max_replicas=1,
        micro_batches=micro_batches,
    )
    counts = {way.micro_batches for way in ways(request) if way.shape.ranks == 3}
    assert counts >= expected
    assert counts == expected | set(request.micro_batch_counts())


def test_estimates_count_the_sync_of_replicas_and_the_update(profile_of):
    """(m + p - 1) times an even share, then the sum of gradients over the devices that hold the
    same stage, and the update. Levels 2 and 3 of ZeRO sum beside the ops.
    """
    link = Link(0.5, 1e5)
    profile = replace(profile_of([1.0] * 4, parameters=1000), update_s_per_byte=1e-3)
    parameter_bytes = sum(layer.parameter_bytes for layer in profile)
    on = Cluster("c", (Device("d", 10**9),) * 4, 1, link, link)
    request = PlanRequest(profile, on, 16)
    facts, shape = schedules()["1f1b"], Shape(2, 2, (0, 1, 2, 3))
    even_s = 2 * 12 / 2
    after_s = parameter_bytes / 2 * 1e-3 + all_reduce_seconds((0, 2), parameter_bytes / 2, on)
    estimate_s, bound_s = SearchSpace(request, []).estimate_and_bound(shape, 8, facts, 2)
    assert estimate_s == pytest.approx((4 + 1) * even_s + after_s)
    assert bound_s <= (4 + 1) * even_s
    sharded = replace(request, sharding=replace(request.sharding, zero=2))
    estimate_s, _ = SearchSpace(sharded, []).estimate_and_bound(shape, 8, facts, 2)
    assert estimate_s == pytest.approx((4 + 1) * even_s)
    # Two stages per rank halve the ramp; one pipeline has no sync.
    several = schedules()["interleaved"]
    estimate_s, _ = SearchSpace(request, []).estimate_and_bound(Shape(1, 2, (0, 1)), 8, several, 4)
    assert estimate_s == pytest.approx((8 + 1 / 2) * even_s + parameter_bytes / 2 * 1e-3)
    # A stream has no ramp.
    stream = schedules()["pipedream"]
    estimate_s, bound_s = SearchSpace(request, []).estimate_and_bound(
        Shape(1, 2, (0, 1)), 8, stream, 2
    )
    assert estimate_s == pytest.approx(8 * even_s)
    assert bound_s == pytest.approx(8 * 2 * 12 / 4)


def test_the_least_time_is_all_work_divided_among_all_devices(profile_of):
    """A step cannot be shorter, whatever the cut and the replicas."""
    request = PlanRequest(profile_of([1.0] * 4), cluster(4), 16)
    assert SearchSpace(request, shapes(request)).least_s == pytest.approx(16 * 12 / 4)
    # Fixed costs of a micro-batch count least with one micro-batch.
    fixed = PlanRequest(profile_of([1.0] * 4, fixed=0.25), cluster(4), 16)
    assert SearchSpace(fixed, shapes(fixed)).least_s == pytest.approx((16 * 12 + 8 * 0.25) / 4)
    assert SearchSpace(request, []).least_s == 0
