"""What a planner returns is what was asked for, whoever wrote the planner."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.cluster.cluster import Cluster, Device, Link
from penstock.errors import PlanError
from penstock.schedule.catalogue import schedule
from penstock.search.best_plan import plan_proposal
from penstock.search.catalogue import PLANNERS, plan
from penstock.search.check_plan import checked_plan
from penstock.search.proposal import Proposal
from penstock.search.request import PlanRequest

LINK = Link(0.0, 1e12)


def cluster_of(ranks, memory=10**9):
    return Cluster("c", (Device("d", memory),) * ranks, 1, LINK, LINK)


@pytest.fixture
def request_of(profile_of):
    def make(**options):
        return PlanRequest(profile_of([1.0, 1.0, 1.0, 1.0]), cluster_of(2), 16, **options)

    return make


def a_plan(request, **options):
    return plan_proposal(
        request, Proposal(**{"lengths": (2, 2), "schedule": "1f1b", "micro_batches": 4, **options})
    )


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ({"stages": 1}, "stages: 2 in the plan, 1 requested"),
        ({"micro_batches": 8}, "micro_batches: 4 in the plan, 8 requested"),
        ({"by": (1, 3)}, r"partition: \(2, 2\) in the plan, \(1, 3\) requested"),
        ({"recompute": "always"}, "recompute: 'never' in the plan, 'always' requested"),
        ({"schedules": ("gpipe", "zb-h1")}, "schedules: 1f1b in the plan, gpipe, zb-h1 requested"),
        ({"memory_limit": 10}, "memory: rank 0 needs .*, and may hold 10 B on device 0"),
    ],
)
def test_a_plan_that_is_not_what_was_asked_is_refused(request_of, asked, told):
    """Each field by itself, with the planner's name and both values."""
    made = a_plan(request_of())
    with pytest.raises(PlanError, match=rf"planner 'mine' returned a plan.*:\n  .*{told}"):
        checked_plan(made, request_of(**asked), "mine")


def test_everything_that_differs_is_told_at_once(request_of):
    """Who mends a planner wants to see all of it."""
    made = a_plan(request_of())
    with pytest.raises(PlanError, match="stages: 2 in the plan") as caught:
        checked_plan(
            replace(made, batch=8),
            request_of(stages=1, micro_batches=8, schedules=("gpipe",)),
            "mine",
        )
    for field in ("batch: 8", "stages: 2", "micro_batches: 4", "schedules: 1f1b"):
        assert field in str(caught.value)


def test_copies_beyond_what_was_asked_are_refused(profile_of):
    """A hybrid's copies count; those of a schedule that was named and is made of copies do not."""
    profile = profile_of([1.0, 1.0])
    free = PlanRequest(profile, cluster_of(2), 16)
    one = replace(free, max_replicas=1)
    copied = a_plan(free, lengths=(2,), options=(("replicas", 2),))
    with pytest.raises(
        PlanError, match="max_replicas: a stage has 2 copies in the plan, 1 requested"
    ):
        checked_plan(copied, one, "mine")
    chimera = a_plan(free, lengths=(1, 1), schedule="chimera")
    assert checked_plan(chimera, replace(one, schedules=("chimera",)), "mine").planner == "mine"


def test_layers_that_cannot_have_copies_have_none(profile_of):
    """Neither in the default planner's plans, nor by asking another one, nor by naming a schedule."""
    profile = profile_of([1.0, 5.0, 1.0, 1.0])
    layers = list(profile.layers)
    layers[1] = replace(layers[1], single_copy_reason="it counts its calls")
    single = replace(profile, layers=tuple(layers))
    assert max(map(len, plan(profile, cluster_of(4), 16).schedule.ranks_of_stage)) > 1
    for planner in PLANNERS.entries():
        try:
            made = plan(single, cluster_of(4), 16, planner=planner, budget_s=1)
        except PlanError:
            continue
        assert all(len(ranks) == 1 for ranks in made.schedule.ranks_of_stage), planner
    with pytest.raises(
        PlanError, match=r"copies of that layer would train .*: it counts its calls"
    ):
        plan(single, cluster_of(2), 16, schedules="chimera", stages=2)
    copied = a_plan(
        PlanRequest(profile, cluster_of(2), 16), lengths=(4,), options=(("replicas", 2),)
    )
    with pytest.raises(
        PlanError, match="copies: layer l1 is on ranks 0, 1, and cannot have copies"
    ):
        checked_plan(copied, PlanRequest(single, cluster_of(2), 16), "mine")


def test_a_plan_that_cannot_run_is_refused(request_of):
    """Its parts do not fit each other, or its programs wait for each other for ever."""
    made = a_plan(request_of())
    with pytest.raises(
        PlanError, match="planner 'mine' returned a plan that cannot run: stage lengths"
    ):
        checked_plan(replace(made, lengths=(1, 2)), request_of(), "mine")
    waiting = tuple(line.replace("0F0 ", "", 1) + " 0F0" for line in made.programs[:1])
    with pytest.raises(PlanError, match="planner 'mine' returned a plan that cannot run"):
        checked_plan(replace(made, programs=waiting + made.programs[1:]), request_of(), "mine")
    with pytest.raises(PlanError, match="planner 'mine' returned Schedule and not a Plan"):
        checked_plan(schedule("1f1b", 2, 4), request_of(), "mine")


def test_plan_asks_the_check_of_a_contributed_planner(profile_of, request):
    """It stands between every planner and the caller."""
    entries = PLANNERS.entries()

    def careless(asked):
        return a_plan(replace(asked, micro_batches=None))

    PLANNERS.register("careless", source="a test")(careless)
    request.addfinalizer(lambda: PLANNERS._entries.pop("careless"))
    assert "careless" not in entries
    with pytest.raises(PlanError, match=r"micro_batches: 4 in the plan, 2 requested") as caught:
        plan(profile_of([1.0] * 4), cluster_of(2), 16, planner="careless", micro_batches=2)
    assert "planner 'careless' returned a plan" in str(caught.value)
