"""All planners, one simulator."""

from dataclasses import replace

import pytest
from tests.search.random_requests import FAST, SLOW

from penstock.cluster.cluster import Cluster, Device, Link, cluster
from penstock.errors import PlanError, SettingError, UnknownName
from penstock.search import compare as module
from penstock.search.catalogue import PLANNERS, plan
from penstock.search.compare import compare
from penstock.simulate.plan_costs import simulate_plan

FEW = ("gpipe", "auto", "torchgpipe")


def test_every_planner_is_asked_the_same_and_the_fastest_comes_first(profile_of):
    """Each plan is its own, scored by what simulating it gives."""
    profile, on = profile_of([1.0, 2.0, 3.0, 1.0], output=1e3), cluster("2xV100-10GbE")
    results = compare(profile, on, 8, stages=2)
    assert {result.planner for result in results} == set(PLANNERS.entries())
    steps = [result.step_s for result in results]
    assert steps == sorted(steps)
    for result in results:
        assert (result.plan is None) == bool(result.refusal)
        assert result.seconds >= 0
        if result.plan is not None:
            assert result.plan.planner == result.planner
            assert result.plan.stages == 2
            if result.plan.synchronous:
                assert simulate_plan(result.plan, profile, on).makespan == result.step_s


def test_some_planners_may_be_named(profile_of):
    """In any order; each gives what `plan` gives."""
    profile, on = profile_of([1.0, 2.0]), cluster("2xV100-10GbE")
    plan_of = {
        result.planner: result.plan
        for result in compare(profile, on, 8, planners=FEW, budget_s=1000, max_replicas=1)
    }
    assert plan_of.keys() == set(FEW)
    for name in FEW:
        assert plan_of[name] == plan(profile, on, 8, planner=name, budget_s=1000, max_replicas=1)


def test_a_planner_that_has_no_plan_says_why_and_comes_last(profile_of, monkeypatch):
    """Whatever it raises on purpose: the others are compared all the same."""

    def refusing(request):
        raise SettingError("not on this one")

    entry = replace(PLANNERS.find("gpipe"), make=refusing)
    other = {**PLANNERS.entries(), "gpipe": entry}
    monkeypatch.setattr(
        module,
        "PLANNERS",
        type(
            "Fake",
            (),
            {"entries": staticmethod(lambda: other), "find": staticmethod(other.__getitem__)},
        ),
    )
    results = compare(
        profile_of([1.0, 2.0]), cluster("2xV100-10GbE"), 8, planners=("gpipe", "torchgpipe")
    )
    assert [result.planner for result in results] == ["torchgpipe", "gpipe"]
    assert (results[1].plan, results[1].refusal, results[1].step_s) == (
        None,
        "not on this one",
        float("inf"),
    )


def test_nothing_fits_is_told_by_each(profile_of):
    """And is no error of comparing."""
    results = compare(
        profile_of([1.0, 2.0]), cluster("2xV100-10GbE"), 8, planners=FEW, memory_limit=10
    )
    assert all(result.plan is None and "nothing fits" in result.refusal for result in results)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (
            {"planners": ("gpipe", "torchpipe")},
            UnknownName,
            "no planner called 'torchpipe'. Did you mean 'torchgpipe'",
        ),
        ({"batch": 0}, PlanError, "batch is 0"),
        ({"max_replicas": 0}, PlanError, "max_replicas is 0"),
        ({"memory_limit": "much"}, SettingError, "much"),
        ({"schedules": "1f2b"}, UnknownName, "no schedule called '1f2b'"),
    ],
)
def test_what_no_planner_could_answer_is_refused_at_once(profile_of, options, error, message):
    """Not by every planner in turn."""
    numbers = {"batch": 8, **options}
    with pytest.raises(error, match=message):
        compare(profile_of([1.0, 2.0]), cluster("2xV100-10GbE"), numbers.pop("batch"), **numbers)


def test_on_mixed_devices_auto_is_no_slower_than_any(profile_of):
    """Or the comparison would be its disgrace."""
    link = Link(1e-3, 1e6)
    on = Cluster(
        "c",
        (Device("fast", 10**9, flops=FAST),) * 2 + (Device("slow", 10**9, flops=SLOW),) * 2,
        2,
        link,
        link,
    )
    results = compare(profile_of([1.0, 2.0, 1.0, 1.0, 3.0], output=1e3), on, 16, budget_s=1000)
    (auto,) = (result for result in results if result.planner == "auto")
    assert auto.step_s <= results[0].step_s * 1.001
