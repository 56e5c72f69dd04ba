"""The default planner with asynchronous schedules and weight rules."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.search.random_requests import cluster_of, plan

from penstock.errors import ScheduleError
from penstock.partition.catalogue import partition
from penstock.schedule.catalogue import schedule
from penstock.search.instantiate import CLOSE
from penstock.search.request import MICRO_BATCHES
from penstock.simulate.plan_costs import place_costs, simulate_plan, stage_costs
from penstock.simulate.steady_state import steady

layers = st.lists(st.floats(1e-5, 1e-2), min_size=1, max_size=6)
links = st.tuples(st.floats(0, 1e-2), st.floats(1e2, 1e6))
STREAMS = ("pipedream", "2bw", "wpipe", "1f1b")


@settings(
    max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.tuples(layers, st.floats(0, 1e-2)), st.integers(1, 3), st.integers(1, 16), links)
def test_auto_finds_the_best_stream_by_its_steady_state(profile_of, model, ranks, batch, link):
    """Bounds may skip only what cannot win: streams among each other, and beside schedules that
    drain.
    """
    profile, cluster = profile_of(*model), cluster_of(ranks, *link)
    chosen_plan = plan(profile, cluster, batch, schedules=STREAMS, budget_s=1000)
    seconds = []
    for stages in range(1, len(profile) + 1):
        for m in (m for m in MICRO_BATCHES if m <= batch):
            lengths = partition(
                profile,
                stages,
                by="bottleneck",
                micro_batch=batch / m,
                latency_s=cluster.between.latency_s,
                bandwidth_bytes_per_s=cluster.between.bandwidth_bytes_per_s,
            )
            for name in STREAMS:
                try:
                    example = schedule(name, stages, m)
                except ScheduleError:
                    continue
                if example.ranks <= ranks and (example.ranks > 1 or stages == 1):
                    costs = stage_costs(profile, lengths, batch / m, cluster, micro_batches=m)
                    seconds.append(
                        steady(example, place_costs(costs, example, cluster)).seconds_per_batch
                    )
    assert chosen_plan.predicted.step_s <= min(seconds) * (1 + CLOSE)


def test_an_asynchronous_plan_says_what_a_batch_takes_once_full_and_what_that_costs(
    profile_of, tmp_path
):
    """4 stages of 3 s: no bubble, four versions of the weights on the first."""
    profile, cluster = profile_of([1.0] * 4, parameters=1000, activation=1.0), cluster_of(4)
    chosen_plan = plan(profile, cluster, 4, schedules="pipedream", stages=4, micro_batches=1)
    assert chosen_plan.predicted.step_s == pytest.approx(4 * 3)
    assert chosen_plan.predicted.bubble_ratio == pytest.approx(0, abs=1e-9)
    # 1000 bytes of weights are with gradients and momentum 3000; every version more is 1000.
    assert chosen_plan.predicted.peak_memory == tuple(
        3000 + 1000 * (3 - stage) + 4 * (4 - stage) for stage in range(4)
    )
    assert (
        simulate_plan(chosen_plan, profile, cluster).peak_memory
        == chosen_plan.predicted.peak_memory
    )
    assert (chosen_plan.synchronous, chosen_plan.weights, chosen_plan.stream.weights) == (
        False,
        "stash",
        "stash",
    )
    assert "asynchronous: weights stash, staleness at most 3, up to 4 versions" in str(chosen_plan)
    chosen_plan.save(tmp_path / "plan.json")
    assert type(chosen_plan).load(tmp_path / "plan.json") == chosen_plan


def test_asynchronous_schedules_are_weighed_when_they_are_asked_for(profile_of):
    """They train by other rules, so they are only used on request; the table says which they are."""
    profile = profile_of([1.0] * 4)
    kinds = {row.weights for row in plan(profile, cluster_of(4), 4).candidates}
    assert kinds == {"flush"}
    both = plan(profile, cluster_of(4), 4, asynchronous=True, budget_s=1000)
    assert not both.synchronous
    assert {"stash", "avgpipe"} <= {row.weights for row in both.candidates}
    assert "schedule" in str(both)
    assert "weights" in next(line for line in str(both).splitlines() if "recompute  step" in line)


def test_of_equals_the_synchronous_one_is_taken(profile_of):
    """On one device nothing is won by stale gradients."""
    assert plan(profile_of([1.0]), cluster_of(1), 4, asynchronous=True).synchronous


@pytest.mark.parametrize(
    ("options", "schedule_name", "weights"),
    [
        ({"weights": "stash"}, "pipedream", "stash"),
        ({"weights": "double-buffer"}, "2bw", "double-buffer"),
        ({"weights": "none"}, "pipedream", "none"),
        ({"weights": "vertical-sync", "schedules": ["pipedream"]}, "pipedream", "vertical-sync"),
        ({"weights": "flush"}, "1f1b", "flush"),
    ],
)
def test_a_weight_rule_brings_the_schedule_that_is_made_for_it(
    profile_of, options, schedule_name, weights
):
    """The name of the rule suffices: the schedule that it was published with is chosen."""
    chosen_plan = plan(
        profile_of([1.0] * 2), cluster_of(2), 8, stages=2, micro_batches=4, **options
    )
    assert chosen_plan.weights == weights
    assert weights == "flush" or chosen_plan.schedule_name == schedule_name


def test_options_of_the_weight_rule_are_kept(profile_of):
    """A run takes them from the plan."""
    chosen_plan = plan(
        profile_of([1.0] * 2), cluster_of(2), 8, weights="pipemare", weights_options={"decay": 0.5}
    )
    assert chosen_plan.weights_options == (("decay", 0.5),)
    assert "weights pipemare, decay 0.5, staleness" in str(chosen_plan)


def test_a_rule_without_a_formula_for_the_optimizer_is_not_weighed(profile_of):
    """XPipe predicts by Adam's moments; the planner must not choose it for SGD."""
    names = {}
    for optimizer in ("SGD", "Adam"):
        chosen_plan = plan(
            profile_of([1.0] * 2),
            cluster_of(2),
            8,
            asynchronous=True,
            optimizer=optimizer,
            budget_s=1000,
            stages=2,
        )
        names[optimizer] = {row.schedule for row in chosen_plan.candidates}
    assert "xpipe" in names["Adam"]
    assert "xpipe" not in names["SGD"]
