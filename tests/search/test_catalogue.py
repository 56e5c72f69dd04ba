"""plan: the door of all planners."""

import pytest

from penstock.cluster.cluster import cluster
from penstock.errors import PlanError, SettingError, UnknownName
from penstock.plan.plan import Plan
from penstock.plan.sharding import Sharding, ShardingOptions
from penstock.profile.profile import Profile
from penstock.search.catalogue import PLANNERS, TIME_LIMIT_S, make_request, plan


@pytest.mark.parametrize("name", list(PLANNERS.entries()))
def test_every_planner_makes_a_whole_plan_and_names_its_source(profile_of, name):
    """A planner that is not listed with its paper cannot be compared with it."""
    chosen_plan = plan(profile_of([1.0, 2.0, 1.0]), cluster(2), 8, planner=name)
    assert isinstance(chosen_plan, Plan)
    chosen_plan.check()
    assert PLANNERS.find(name).facts.get("source"), (
        f"say where {name} is from: @register(..., source=...)"
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"weights": "flush", "schedules": "pipedream"},
            "weight rule 'flush' does not go with pipedream, which is asynchronous",
        ),
        (
            {"weights": "stash", "schedules": ["pipedream", "1f1b"]},
            "weight rule 'stash' does not go with 1f1b, which is synchronous",
        ),
        (
            {"weights": "double-buffer", "stages": 2, "micro_batches": 1},
            "2bw in 2 stages keeps two versions",
        ),
        (
            {"weights": "spectrain", "stages": 2, "micro_batches": 2},
            "weight rule 'spectrain' has distances for batches of one",
        ),
        ({"max_replicas": 0}, "max_replicas is 0; it must be a whole number of 1 or more"),
        ({"batch": 0}, "batch is 0; it must be a whole number of 1 or more"),
        ({"batch": 2.5}, "batch is 2.5; it must be a whole number"),
        ({"stages": 4}, "stages is 4, but there are only 3 layers"),
        ({"stages": 0}, "stages is 0; it must be a whole number of 1 or more"),
        ({"micro_batches": 9}, "micro_batches is 9, but there are only 8 samples in the batch"),
        ({"memory_limit": 0}, "memory_limit is 0; it must be"),
        ({"tensor_parallel": 0}, "tensor_parallel is 0; it must be 1 or more"),
        ({"budget_s": -1}, "budget_s is -1; it must be 0 s or more"),
        (
            {"recompute": "sometimes"},
            "recompute is 'sometimes'; it must be one of auto, never, except_last, always",
        ),
        ({"schedules": []}, "schedules is empty"),
        (
            {"schedules": "1f1b", "stages": 3},
            "no schedule can be made for these numbers\n  1f1b in 3 stages needs 3 ranks, local:2 has 2",
        ),
    ],
)
def test_what_cannot_be_planned_is_refused_with_the_number(profile_of, options, message):
    """All before the search begins, in words of the arguments."""
    arguments = {"batch": 8, **options}
    with pytest.raises(PlanError, match=message):
        plan(profile_of([1.0, 2.0, 1.0]), cluster(2), **arguments)


def test_one_copy_of_every_stage_can_be_asked_for(profile_of):
    """Copies are weighed unless they are not wanted."""
    assert plan(profile_of([1.0, 1.0]), cluster(2), 8, max_replicas=1).stages == 2


def test_unknown_names_are_refused(profile_of):
    """With the closest that is known."""
    profile = profile_of([1.0])
    with pytest.raises(UnknownName, match=r"no planner called 'aute'\. Did you mean 'auto'\?"):
        plan(profile, cluster(1), 1, planner="aute")
    with pytest.raises(UnknownName, match="no schedule called '1f2b'"):
        plan(profile, cluster(1), 1, schedules=["gpipe", "1f2b"])
    with pytest.raises(UnknownName, match=r"no weight rule called 'stach'\. Did you mean 'stash'"):
        plan(profile, cluster(1), 1, weights="stach")
    with pytest.raises(
        SettingError, match="weight rule 'stash' has no option decay: it takes none"
    ):
        plan(profile, cluster(1), 1, schedules="pipedream", weights_options={"decay": 0.5})
    with pytest.raises(
        SettingError, match=r"'xpipe' has no formula for SGD: .*; it goes with Adam, AdamW"
    ):
        plan(profile, cluster(1), 1, schedules="xpipe", optimizer="SGD")
    with pytest.raises(SettingError, match="'lots' is not a quantity"):
        plan(profile, cluster(1), 1, memory_limit="lots")


def test_aliases_name_the_same_schedule_once(profile_of):
    """DAPPLE's schedule is 1F1B: weighing it twice would show it twice."""
    chosen_plan = plan(profile_of([1.0, 1.0]), cluster(2), 8, schedules=["dapple", "1f1b"])
    assert {row.schedule for row in chosen_plan.candidates} == {"1f1b"}


def test_a_profile_without_layers_is_refused():
    """Files may hold anything."""
    with pytest.raises(PlanError, match="the profile has no layers"):
        plan(Profile((), "f", 1.0, 1), cluster(1), 1)


def test_memory_limits_are_read_with_their_unit(profile_of):
    """2 KiB and 2048 are the same limit."""
    profile = profile_of([1.0] * 4, parameters=100)
    numbers = {"schedules": "gpipe", "stages": 2, "micro_batches": 8}
    assert plan(profile, cluster(2), 16, memory_limit="2 KiB", **numbers) == plan(
        profile, cluster(2), 16, memory_limit=2048, **numbers
    )


def test_a_request_has_the_arguments_of_plan_in_the_form_that_planners_read(profile_of):
    """Texts are parsed once, lists are tuples, and what is left out has its default."""
    profile = profile_of([1.0] * 3)
    plain = make_request(profile, cluster(2), 8)
    assert (plain.schedules, plain.memory_limit, plain.by) == (None, None, "bottleneck")
    assert (plain.weights_options, plain.optimizer, plain.optimizer_fused) == ((), None, False)
    assert plain.sharding == Sharding()
    assert plain.sharding_options == ShardingOptions(None, None, 0)
    assert plain.deadline.budget_s == TIME_LIMIT_S
    full = make_request(
        profile,
        cluster(2),
        8,
        schedules="dapple",
        memory_limit="2 KiB",
        partition=[1, 2],
        optimizer="adam",
        tensor_parallel=1,
        sequence_parallel=False,
        zero=2,
        time_limit_s=7.0,
        max_replicas=1,
    )
    assert (full.schedules, full.memory_limit, full.by) == (("1f1b",), 2048, (1, 2))
    assert (full.optimizer, full.profile.optimizer_states) == ("Adam", 2.0)
    assert full.sharding == Sharding(zero=2)
    assert full.sharding_options == ShardingOptions(1, False, 2)
    assert (full.deadline.budget_s, full.max_replicas) == (7.0, 1)
    numbered = make_request(profile, cluster(2), 8, optimizer=3)
    assert (numbered.optimizer, numbered.profile.optimizer_states) == (None, 3.0)
    open_level = make_request(profile, cluster(2), 8, zero=None)
    assert (open_level.sharding.zero, open_level.sharding_options.zero) == (0, None)
    rule = make_request(
        profile,
        cluster(2),
        8,
        asynchronous=True,
        weights="pipemare",
        weights_options={"decay": "0.5", "warm_up": 3},
    )
    assert rule.weights_options == (("decay", 0.5), ("warm_up", 3.0))
    endless = make_request(profile, cluster(2), 8, time_limit_s=float("inf"))
    assert endless.deadline.budget_s == float("inf")


@pytest.mark.parametrize("limit", [-1, float("nan")])
def test_a_time_limit_is_0_or_more(profile_of, limit):
    """A search without time still returns the first plan that fits."""
    with pytest.raises(PlanError, match=f"time_limit_s is {limit!r}; it must be 0 s or more"):
        make_request(profile_of([1.0]), cluster(1), 1, time_limit_s=limit)
    assert make_request(profile_of([1.0]), cluster(1), 1, time_limit_s=0).deadline.budget_s == 0


def test_a_width_needs_a_profile_with_costs_of_it(profile_of):
    """One device per layer is what every profile has."""
    profile = profile_of([1.0])
    make_request(profile, cluster(1), 1, tensor_parallel=1)
    with pytest.raises(PlanError, match="tensor_parallel is 2, and the profile has no costs"):
        make_request(profile, cluster(1), 1, tensor_parallel=2)
    with pytest.raises(PlanError, match="tensor_parallel is 2, and the profile has no costs"):
        make_request({"cpu": profile}, cluster(1), 1, tensor_parallel=2)
