"""The default planner against full enumeration."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.search.random_requests import cluster_of, plan

from penstock.errors import PlanError, ScheduleError
from penstock.partition.catalogue import partition
from penstock.schedule.catalogue import schedule
from penstock.schedule.recompute import Recompute
from penstock.search.build_plan import ROWS
from penstock.search.instantiate import CLOSE
from penstock.search.request import MICRO_BATCHES
from penstock.search.schedules import schedules
from penstock.simulate.plan_costs import costs_of_plan, simulate_plan, stage_costs
from penstock.simulate.simulate import peak_memory, simulate_schedule

BASIC = ("gpipe", "1f1b", "naive")


def every_way(profile, cluster, batch, names=BASIC, recompute=("never",)):
    """The slow, obvious way: simulate everything. Yields schedule, M, recompute, lengths and
    timeline.
    """
    link = cluster.between
    for stages in range(1, min(cluster.ranks, len(profile)) + 1):
        # With other numbers micro-batches have two sizes, which these costs do not tell apart.
        for m in (m for m in MICRO_BATCHES if batch % m == 0):
            lengths = partition(
                profile,
                stages,
                by="bottleneck",
                micro_batch=batch / m,
                latency_s=link.latency_s,
                bandwidth_bytes_per_s=link.bandwidth_bytes_per_s,
            )
            costs = stage_costs(profile, lengths, batch / m, cluster, micro_batches=m)
            for name in names:
                try:
                    example = schedule(name, stages, m)
                except ScheduleError:
                    continue
                if example.ranks > cluster.ranks:
                    continue
                for again in recompute:
                    yield (
                        name,
                        m,
                        again,
                        tuple(lengths),
                        simulate_schedule(example, costs, recompute=again),
                    )


layers = st.lists(st.floats(1e-5, 1e-2), min_size=1, max_size=6)
links = st.tuples(st.floats(0, 1e-2), st.floats(1e2, 1e6))


@settings(
    max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.tuples(layers, st.floats(0, 1e-2)), st.integers(1, 4), st.integers(1, 16), links)
def test_auto_finds_the_best_of_full_enumeration(profile_of, model, ranks, batch, link):
    """Bounds may skip only what cannot win; cuts that simulation advises may be better than all of
    these.
    """
    profile, cluster = profile_of(*model), cluster_of(ranks, *link)
    chosen_plan = plan(profile, cluster, batch, schedules=BASIC, budget_s=1000)
    ways = list(every_way(profile, cluster, batch))
    best_s = min(timeline.makespan for *_, timeline in ways)
    predicted = chosen_plan.predicted
    assert predicted.step_s <= best_s * (1 + CLOSE)
    assert predicted.lower_bound_s <= min(best_s, predicted.step_s) * (1 + 1e-9)
    assert predicted.step_s == simulate_plan(chosen_plan, profile, cluster).makespan


@settings(
    max_examples=5, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(layers, st.integers(1, 4), st.integers(1, 16), st.integers(3_000, 20_000))
def test_auto_within_a_memory_limit_is_the_best_that_fits(profile_of, seconds, ranks, batch, limit):
    """Recompute counts only for ways that do not fit without."""
    profile, cluster = profile_of(seconds), cluster_of(ranks)
    fits = {}
    for name, m, again, lengths, timeline in every_way(
        profile, cluster, batch, recompute=tuple(Recompute)
    ):
        if max(timeline.peak_memory) <= limit:
            fits.setdefault((name, m, lengths), (timeline.makespan, again))
    try:
        chosen_plan = plan(
            profile, cluster, batch, schedules=BASIC, memory_limit=limit, budget_s=1000
        )
    except PlanError:
        assert not fits
        return
    assert max(chosen_plan.predicted.peak_memory) <= limit
    if fits:  # else it was cut for memory
        assert chosen_plan.predicted.step_s <= min(fits.values())[0] * (1 + CLOSE)
    costs = costs_of_plan(chosen_plan, profile, cluster)
    assert (
        chosen_plan.recompute == "never"
        or max(peak_memory(chosen_plan.schedule, costs, "never")) > limit
    )
    assert simulate_plan(chosen_plan, profile, cluster).makespan == chosen_plan.predicted.step_s
    assert max(peak_memory(chosen_plan.schedule, costs, chosen_plan.recompute)) == max(
        chosen_plan.predicted.peak_memory
    )


@settings(
    max_examples=4, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    st.lists(st.sampled_from([1e-3, 2e-3, 5e-3]), min_size=3, max_size=8),
    st.integers(1, 3),
    st.integers(2_000, 30_000),
)
def test_to_run_some_layers_again_is_never_slower_than_all(profile_of, seconds, ranks, limit):
    """Within the same memory, and it fits wherever all did."""
    profile, cluster = profile_of(seconds, parameters=100, activation=300.0), cluster_of(ranks)

    def step_s(recompute):
        try:
            return plan(
                profile,
                cluster,
                16,
                schedules="1f1b",
                recompute=recompute,
                memory_limit=limit,
                budget_s=1000,
                max_replicas=1,
            ).predicted.step_s
        except PlanError:
            return float("inf")

    assert step_s("auto") <= min(map(step_s, ("never", "except_last", "always"))) * (1 + CLOSE)


def test_where_all_had_to_run_again_only_what_must_does_now(profile_of):
    """A limit that nothing but "always" fitted: the same cut with some of its layers is faster, and
    with none does not fit.
    """
    profile, cluster = (
        profile_of([1.0] * 8, parameters=0, activation=300.0, output=10.0),
        cluster_of(2),
    )
    arguments = {
        "schedules": "1f1b",
        "stages": 2,
        "micro_batches": 8,
        "memory_limit": 2600,
        "budget_s": 1000,
    }
    always = plan(profile, cluster, 16, recompute="always", **arguments)
    some = plan(profile, cluster, 16, **arguments)
    for recompute in ("never", "except_last"):
        with pytest.raises(PlanError, match="nothing fits"):
            plan(profile, cluster, 16, recompute=recompute, **arguments)
    assert (some.recompute, some.lengths) == ("selective", (4, 4))
    assert (
        always.predicted.step_s
        > some.predicted.step_s
        > plan(profile, cluster, 16, **{**arguments, "memory_limit": None}).predicted.step_s
    )
    assert 0 < len(some.recomputed) < 8
    assert some.predicted.more_work == pytest.approx(len(some.recomputed) / 24)
    assert f"recomputes {len(some.recomputed)} of 8 layers in" in str(some)


def test_all_synchronous_schedules_are_weighed_unless_some_are_named(profile_of):
    """A new schedule is one new file: the planner must find it by itself, and no asynchronous one."""
    chosen_plan = plan(profile_of([1.0, 1.0]), cluster_of(2), 4, budget_s=1000)
    known = schedules()
    assert all(known[row.schedule].synchronous for row in chosen_plan.candidates)
    only = plan(profile_of([1.0, 1.0]), cluster_of(2), 4, schedules="gpipe")
    assert {row.schedule for row in only.candidates} == {"gpipe"}


def test_slices_of_sequences_are_weighed_when_they_are_named(profile_of):
    """They need a causal model, which a profile does not tell."""
    profile = profile_of([1.0] * 4)
    free = plan(profile, cluster_of(2), batch=8)
    assert {row.schedule for row in free.candidates}.isdisjoint({"seq1f1b", "terapipe"})
    for name in ("chimera", "seq1f1b"):
        assert (
            plan(profile, cluster_of(2), batch=8, schedules=[name], stages=2).schedule_name == name
        )


def test_free_links_make_it_data_parallel(profile_of):
    """Then copies have no bubble, and nothing to pay for it."""
    chosen_plan = plan(profile_of([1.0] * 4, fixed=0.1), cluster_of(4), 16, max_replicas=None)
    assert (chosen_plan.stages, chosen_plan.ranks, chosen_plan.micro_batches) == (1, 4, 4)
    assert chosen_plan.predicted.step_s == pytest.approx(chosen_plan.predicted.data_parallel_s)
    assert plan(
        profile_of([1.0] * 4, fixed=0.1), cluster_of(4), 16, max_replicas=2
    ).schedule.ranks_of_stage != ((0, 1, 2, 3),)


def test_slow_layers_stand_on_several_ranks_and_heavy_ones_on_one(profile_of):
    """As PipeDream and DAPPLE cut VGG: convolutions in copies, and the layers with all the weights
    once.
    """
    profile = profile_of([1.0] * 6 + [0.1, 0.1], parameters=[10] * 6 + [10**10] * 2)
    chosen_plan = plan(profile, cluster_of(4, 1e-3, 1e8), 48, max_replicas=None)
    assert tuple(map(len, chosen_plan.schedule.ranks_of_stage)) == (3, 1)
    assert chosen_plan.bounds[1][0] <= 6, "both heavy layers stand on one rank"


def test_the_plan_predicts_what_simulating_it_gives(profile_of):
    """The prediction is written into the plan: it must be of the plan, not of a relative."""
    profile, cluster = profile_of([1.0, 2.0, 3.0, 1.0], output=1e3), cluster_of(3, 1e-3, 1e6)
    chosen_plan = plan(profile, cluster, 16, schedules=BASIC)
    timeline = simulate_plan(chosen_plan, profile, cluster)
    predicted = chosen_plan.predicted
    assert predicted.step_s == timeline.makespan
    assert predicted.peak_memory == timeline.peak_memory
    assert predicted.bubble_ratio == pytest.approx(timeline.bubble_ratio)
    assert predicted.samples_per_s == pytest.approx(16 / timeline.makespan)
    assert predicted.one_device_s == pytest.approx(16 * 3 * 7)
    chosen_plan.check()
    chosen_plan.check_fits("abc", chosen_plan.ranks)


def test_equal_times_are_decided_by_memory(profile_of):
    """1F1B and GPipe take the same time on free links; 1F1B holds less."""
    chosen_plan = plan(
        profile_of([1.0, 1.0]), cluster_of(2), 16, schedules=("gpipe", "1f1b"), micro_batches=8
    )
    assert chosen_plan.schedule_name == "1f1b"
    assert chosen_plan.candidates[1].schedule == "gpipe"
    assert chosen_plan.candidates[1].step_s == pytest.approx(chosen_plan.predicted.step_s)


def test_a_slow_link_leaves_everything_on_one_device(profile_of):
    """The best pipeline may be none, and the plan then uses one of the cluster's ranks."""
    chosen_plan = plan(profile_of([1.0, 1.0]), cluster_of(2, latency_s=100.0), 4, schedules=BASIC)
    assert (chosen_plan.stages, chosen_plan.ranks, chosen_plan.cluster_ranks) == (1, 1, 2)
    assert chosen_plan.predicted.speed_up == pytest.approx(1.0)
    assert any(
        "link 0→1" in row.why or "bubble" in row.why
        for row in chosen_plan.candidates
        if row.stages == 2
    )


def test_dear_calls_keep_the_number_of_micro_batches_small(profile_of):
    """Every call's fixed cost is paid once per micro-batch."""
    free = plan(profile_of([1.0, 1.0]), cluster_of(2), 16, schedules=BASIC)
    dear = plan(profile_of([1.0, 1.0], fixed=5.0), cluster_of(2), 16, schedules=BASIC)
    assert free.micro_batches == 16
    assert dear.micro_batches < 8


def test_a_memory_limit_forces_recompute(profile_of):
    """Without it 100 bytes for each of 16 samples and 4 layers do not fit beside the weights."""
    profile, cluster = profile_of([1.0] * 4, parameters=100), cluster_of(2)
    numbers = {"schedules": ("gpipe",), "stages": 2, "micro_batches": 8}
    free = plan(profile, cluster, 16, **numbers)
    assert free.recompute == "never"
    assert free.predicted.peak_memory == (600 + 16 * 200,) * 2
    tight = plan(profile, cluster, 16, memory_limit=2000, **numbers)
    assert tight.recompute in ("except_last", "always")
    assert max(tight.predicted.peak_memory) <= 2000
    assert tight.predicted.step_s > free.predicted.step_s
    assert tight.recompute == tight.candidates[0].recompute


def test_what_would_be_faster_with_more_memory_is_told(profile_of):
    """needs and has, side by side: that is what buying memory would bring."""
    profile, cluster = profile_of([1.0] * 4, parameters=100), cluster_of(2)
    tight = plan(profile, cluster, 16, schedules=BASIC, memory_limit=2000)
    missed = [row for row in tight.candidates if row.why.startswith("needs ")]
    assert all(row.step_s < tight.predicted.step_s and row.peak_bytes > 2000 for row in missed)
    tight = plan(
        profile, cluster, 16, schedules="gpipe", memory_limit=2000, stages=2, micro_batches=8
    )
    assert tight.candidates[-1].why == "needs 3.7 KiB, has 2.0 KiB on rank 0"


def test_the_device_s_memory_counts_as_the_limit_does(profile_of):
    """The smaller of both: a limit cannot add memory to a device."""
    profile = profile_of([1.0] * 4, parameters=100)
    numbers = {"schedules": "gpipe", "stages": 2, "micro_batches": 8}
    small = plan(profile, cluster_of(2, memory=2000), 16, memory_limit="1 GiB", **numbers)
    assert small.lengths == plan(profile, cluster_of(2), 16, memory_limit=2000, **numbers).lengths
    assert small.recompute != "never"


def test_recompute_is_as_it_was_asked(profile_of):
    """An explicit setting takes precedence over what fits."""
    profile, cluster = profile_of([1.0] * 4), cluster_of(2)
    for arguments in tuple(Recompute):
        assert (
            plan(profile, cluster, 16, schedules=BASIC, recompute=arguments).recompute == arguments
        )
    with pytest.raises(
        PlanError, match="or leave recompute, stages and micro_batches to the planner"
    ):
        plan(profile, cluster, 16, schedules=BASIC, recompute="never", memory_limit=5000)


def test_nothing_fits_is_said_with_needs_and_has_nearest_first(profile_of):
    """The reader wants to know how much is lacking, and for what."""
    with pytest.raises(
        PlanError, match="nothing fits the memory of c at batch 16; nearest first"
    ) as caught:
        plan(profile_of([1.0] * 4), cluster_of(2), 16, schedules=BASIC, memory_limit=100)
    lines = str(caught.value).splitlines()
    assert "2 stages of 2, 2 layers" in lines[1]
    assert lines[1].endswith("recompute selective: needs 6.0 KiB, has 100 B on rank 0")
    assert lines[-1] == "  Use more ranks, or ranks with more memory, or a smaller batch"


def test_a_cut_for_memory_is_tried_when_none_for_time_fits(profile_of):
    """The slow layers are light and the quick ones heavy: the even times are uneven bytes."""
    profile = profile_of([8.0, 1.0, 1.0, 1.0], activation=1.0, parameters=[10, 1000, 1000, 1000])
    by_time = plan(profile, cluster_of(2), 4, schedules=BASIC, stages=2)
    assert by_time.lengths == (1, 3)
    by_memory = plan(profile, cluster_of(2), 4, schedules=BASIC, stages=2, memory_limit=6200)
    assert by_memory.lengths in {(2, 2), (3, 1)}
    assert max(by_memory.predicted.peak_memory) <= 6200


def test_a_spent_budget_ends_the_search_with_a_plan(profile_of):
    """At least one way is always simulated, and the best estimate is the first."""
    chosen_plan = plan(profile_of([1.0] * 4), cluster_of(4), 16, schedules=BASIC, budget_s=0)
    assert len(chosen_plan.candidates) == 1
    assert chosen_plan.stages == 4


def test_a_spent_budget_does_not_end_it_before_something_fits(profile_of):
    """Giving up with a plan just out of sight would be a wrong answer, not a quick one."""
    chosen_plan = plan(
        profile_of([1.0] * 4, parameters=100),
        cluster_of(2),
        16,
        schedules=BASIC,
        memory_limit=1000,
        budget_s=0,
    )
    assert max(chosen_plan.predicted.peak_memory) <= 1000


def test_the_same_question_gets_the_same_plan(profile_of):
    """Ties are broken by rule, not by the order of a dictionary."""
    profile, cluster = profile_of([1.0, 1.0, 2.0, 1.0], output=1e3), cluster_of(4, 1e-3, 1e6)
    first = plan(profile, cluster, 16, schedules=BASIC)
    assert plan(profile, cluster, 16, schedules=BASIC[::-1]) == first


def test_the_table_has_one_row_for_each_schedule_and_number_of_stages(profile_of):
    """And not more than a reader takes in; the chosen one leads, times ascend among those that fit."""
    chosen_plan = plan(profile_of([1.0] * 8, fixed=0.1), cluster_of(8), 16, schedules=BASIC)
    kinds = [(row.schedule, row.stages) for row in chosen_plan.candidates]
    assert len(set(kinds)) == len(kinds) <= ROWS
    times = [row.step_s for row in chosen_plan.candidates]
    assert times[1:] == sorted(times[1:])
    assert times[0] <= min(times) * (1 + CLOSE)
    assert (chosen_plan.schedule_name, chosen_plan.stages) == kinds[0]
