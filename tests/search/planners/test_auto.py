"""Steps of planner `auto`: which plans of other planners match, and the rows of its table."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.search.random_requests import cluster_of

from penstock.errors import PlanError
from penstock.search.best_plan import plan_proposal
from penstock.search.catalogue import PLANNERS
from penstock.search.evaluate import evaluate
from penstock.search.instantiate import instantiate
from penstock.search.plan_search import PlanSearch
from penstock.search.planners import auto as module
from penstock.search.planners.auto import _evaluate_other_planners, _matches, _table
from penstock.search.proposal import Proposal
from penstock.search.request import PlanRequest


@pytest.fixture
def request_of(profile_of):
    """Requests for four equal layers on four equal devices."""

    def make(**options) -> PlanRequest:
        return PlanRequest(profile_of([1.0] * 4, parameters=0), cluster_of(4), 16, **options)

    return make


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, True),
        ({"stages": 2}, True),
        ({"stages": 4}, False),
        ({"micro_batches": 4}, True),
        ({"micro_batches": 8}, False),
        ({"max_replicas": 2}, True),
        ({"max_replicas": 1}, False),
        ({"by": (1, 3)}, True),
        ({"by": (2, 2)}, False),
        ({"by": "uniform"}, False),
        ({"weights": "flush"}, True),
        ({"schedules": ("1f1b", "gpipe")}, True),
        ({"schedules": ("dapple",)}, True),
        ({"schedules": ("gpipe",)}, False),
    ],
)
def test_a_plan_of_another_planner_must_be_within_the_request(request_of, options, expected):
    """Planners of one paper ignore what their paper does not have."""
    proposal = Proposal((1, 3), "1f1b", 4, (("replicas", 2),))
    plan = plan_proposal(request_of(), proposal)
    assert _matches(request_of(**options), plan) == expected


def test_an_asynchronous_plan_matches_only_where_that_is_allowed(request_of):
    """Or where its schedule is named."""
    stream = request_of(asynchronous=True)
    plan = plan_proposal(stream, Proposal((2, 2), "pipedream", 1))
    assert _matches(stream, plan)
    assert not _matches(request_of(), plan)
    assert _matches(request_of(schedules=("pipedream",)), plan)
    assert not _matches(replace(stream, weights="flush"), plan)


def test_plans_of_other_planners_are_evaluated_if_they_match_and_may_win(request_of, monkeypatch):
    """Refusals are recorded by planner; the fastest counts, whether it was evaluated or not."""
    request = request_of()
    fast = plan_proposal(request, Proposal((1,) * 4, "1f1b", 16))
    slow = plan_proposal(request, Proposal((4,), "1f1b", 1))
    other = plan_proposal(request, Proposal((2, 2), "1f1b", 8))

    class Entry:
        def __init__(self, name, result):
            self.name, self.result = name, result

        def make(self, _):
            if isinstance(self.result, str):
                raise PlanError(self.result)
            return self.result

    entries = [
        Entry("auto", fast),
        Entry("slow", slow),
        Entry("refusing", "not for me"),
        Entry("other", other),
    ]
    monkeypatch.setattr(
        module.PLANNERS, "entries", lambda: {entry.name: entry for entry in entries}, raising=True
    )
    search = PlanSearch(request)
    search.best_s = other.predicted.step_s
    assert _evaluate_other_planners(search) == other.predicted.step_s
    assert list(search.rejected) == ["refusing: not for me"]
    assert [candidate.placed.proposal.lengths for candidate in search.feasible] == [(2, 2)]
    assert search.feasible[0].placed.proposal.recompute == other.recompute
    fixed = PlanSearch(request_of(stages=1))
    assert _evaluate_other_planners(fixed) == slow.predicted.step_s
    assert PLANNERS is module.PLANNERS


def test_the_table_has_the_best_of_each_kind_and_what_would_be_faster_if_it_fitted(request_of):
    """What does not fit and is slower explains nothing."""
    request = request_of(recompute="never")
    search = PlanSearch(request)
    for lengths, count in (((2, 2), 4), ((2, 2), 16), ((4,), 16)):
        search.evaluate(Proposal(lengths, "gpipe", count), force=True)
    chosen = min(search.feasible, key=lambda candidate: candidate.step_s)
    tight = replace(request, memory_limit=10)
    for lengths, count in (((1,) * 4, 16), ((4,), 1)):
        search.infeasible += evaluate(instantiate(tight, Proposal(lengths, "1f1b", count)))
    rows = _table(search, chosen)
    assert [(row.placed.schedule.name, row.placed.proposal.lengths) for row in rows] == [
        ("gpipe", (2, 2)),
        ("gpipe", (4,)),
        ("1f1b", (1,) * 4),
    ]
    assert rows[0] is chosen
    assert rows[2].memory_shortfall
    assert rows[2].step_s < chosen.step_s
