"""The plan of every planner, also a contributed one, must be as requested."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.cluster.cluster import Cluster, Device, Link
from penstock.errors import PlanError
from penstock.schedule.catalogue import schedule
from penstock.search import check_plan
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
    ("asked", "message"),
    [
        ({"stages": 1}, "stages: 2 in the plan, 1 requested"),
        ({"micro_batches": 8}, "micro_batches: 4 in the plan, 8 requested"),
        ({"by": (1, 3)}, r"partition: \(2, 2\) in the plan, \(1, 3\) requested"),
        ({"recompute": "always"}, "recompute: 'never' in the plan, 'always' requested"),
        ({"schedules": ("gpipe", "zb-h1")}, "schedules: 1f1b in the plan, gpipe, zb-h1 requested"),
        ({"memory_limit": 10}, "memory: rank 0 needs .*, and may hold 10 B on device 0"),
    ],
)
def test_a_plan_that_is_not_what_was_asked_is_refused(request_of, asked, message):
    """Each field by itself, with the planner's name and both values."""
    chosen_plan = a_plan(request_of())
    with pytest.raises(PlanError, match=rf"planner 'mine' returned a plan.*:\n  .*{message}"):
        checked_plan(chosen_plan, request_of(**asked), "mine")


def test_everything_that_differs_is_told_at_once(request_of):
    """Who mends a planner wants to see all of it."""
    chosen_plan = a_plan(request_of())
    with pytest.raises(PlanError, match="stages: 2 in the plan") as caught:
        checked_plan(
            replace(chosen_plan, batch=8),
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
            chosen_plan = plan(single, cluster_of(4), 16, planner=planner, budget_s=1)
        except PlanError:
            continue
        assert all(len(ranks) == 1 for ranks in chosen_plan.schedule.ranks_of_stage), planner
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
    chosen_plan = a_plan(request_of())
    with pytest.raises(
        PlanError, match="planner 'mine' returned a plan that cannot run: stage lengths"
    ):
        checked_plan(replace(chosen_plan, lengths=(1, 2)), request_of(), "mine")
    waiting = tuple(line.replace("0F0 ", "", 1) + " 0F0" for line in chosen_plan.programs[:1])
    with pytest.raises(PlanError, match="planner 'mine' returned a plan that cannot run"):
        checked_plan(
            replace(chosen_plan, programs=waiting + chosen_plan.programs[1:]), request_of(), "mine"
        )
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


def findings(plan, request):
    """The differences that the check lists, one per line."""
    try:
        checked_plan(plan, request, "mine")
    except PlanError as error:
        return [line.strip() for line in str(error).splitlines()[1:-1]]
    return []


@pytest.mark.parametrize(
    ("change", "finding"),
    [
        (
            {"fingerprint": "other"},
            "model: the plan is for 4 layers with fingerprint other, the profile has 4 with abc",
        ),
        ({"batch": 32}, "batch: 32 in the plan, 16 requested"),
        ({"cluster_ranks": 3}, "devices: the plan is 2 ranks of 3, and c has 2"),
    ],
)
def test_a_plan_for_another_model_batch_or_cluster_is_refused(request_of, change, finding):
    """Each would train to other numbers, or not at all."""
    result = a_plan(request_of())
    assert findings(result, request_of()) == []
    assert findings(replace(result, **change), request_of()) == [finding]


def test_a_plan_of_more_ranks_than_devices_is_refused(profile_of):
    """Whatever it says about its cluster."""
    wide = a_plan(PlanRequest(profile_of([1.0] * 4), cluster_of(4), 16), lengths=(1,) * 4)
    narrow = PlanRequest(profile_of([1.0] * 4), cluster_of(2), 16)
    assert findings(wide, narrow) == ["devices: the plan is 4 ranks of 4, and c has 2"]
    assert findings(replace(wide, cluster_ranks=2), narrow) == [
        "devices: the plan is 4 ranks of 2, and c has 2"
    ]


@pytest.mark.parametrize(
    ("asked", "finding"),
    [
        ({"tensor_parallel": 2}, "tensor_parallel: 1 in the plan, 2 requested"),
        ({"sequence_parallel": True}, "sequence_parallel: False in the plan, True requested"),
        ({"zero": 1}, "zero: 0 in the plan, 1 requested"),
        ({"tensor_parallel": 1, "sequence_parallel": False, "zero": 0}, None),
        ({"zero": None}, None),
    ],
)
def test_sharding_is_what_was_requested_or_left_open(request_of, asked, finding):
    """None leaves it to the planner."""
    request = request_of()
    options = replace(request.sharding_options, **asked)
    result = a_plan(request)
    assert findings(result, replace(request, sharding_options=options)) == (
        [finding] if finding else []
    )


def test_memory_is_that_of_the_device_on_which_a_rank_is(profile_of):
    """Rank 0 may be on device 1; all ranks that exceed their memory are listed."""
    profile = profile_of([1.0] * 4)
    devices = (Device("small", 5000), Device("large", 10**9))
    cluster = Cluster("c", devices, 2, LINK, LINK)
    roomy = PlanRequest(profile, cluster_of(2), 16)
    request = PlanRequest({"small": profile, "large": profile}, cluster, 16)
    result = a_plan(roomy, devices=(1, 0), recompute="never")
    first, second = result.predicted.peak_memory
    assert second > 5000
    (finding,) = findings(result, request)
    assert finding.startswith("memory: rank 1 needs ")
    assert finding.endswith(" on device 0")
    in_order = replace(result, devices=())
    (finding,) = findings(in_order, request)
    assert finding.startswith("memory: rank 0 needs ")
    exact = replace(cluster, devices=(Device("small", second), Device("large", first)))
    assert findings(result, replace(request, cluster=exact)) == []
    tight = replace(cluster, devices=(Device("small", second - 1), Device("large", first - 1)))
    assert len(findings(result, replace(request, cluster=tight))) == 2


def test_an_asynchronous_or_sliced_schedule_must_be_requested(request_of):
    """Slices of sequences are right only for causal models: the schedule must be named."""
    stream = a_plan(request_of(asynchronous=True), schedule="pipedream", micro_batches=1)
    assert findings(stream, request_of(asynchronous=True)) == []
    assert findings(stream, request_of()) == [
        "asynchronous: pipedream is asynchronous, and synchronous schedules were requested"
    ]
    named = request_of(schedules=("seq1f1b",))
    sliced = a_plan(named, schedule="seq1f1b")
    assert findings(sliced, named) == []
    assert findings(sliced, request_of()) == [
        "schedules: seq1f1b cuts sequences, which only causal models allow: it must be named"
    ]
    halves = a_plan(request_of(), schedule="autopipe")
    assert findings(halves, request_of()) == []


def test_in_one_stage_any_schedule_is_the_one_that_was_named(request_of):
    """All of them run one op after the other there. A synchronous plan is right for any request."""
    single = a_plan(request_of(), lengths=(4,))
    assert findings(single, request_of(schedules=("gpipe",))) == []
    assert findings(a_plan(request_of()), request_of(asynchronous=True)) == []


def test_plans_of_very_many_ops_are_not_verified(request_of, monkeypatch):
    """Verification would take as long as planning; one op less is verified."""
    verified = []
    monkeypatch.setattr(check_plan, "verify", lambda *_, **options: verified.append(options))
    result = a_plan(request_of())
    ops = sum(map(len, result.programs))
    for most, count in ((ops, 1), (ops - 1, 0)):
        verified.clear()
        monkeypatch.setattr(check_plan, "MOST_OPS", most)
        checked_plan(result, request_of(), "mine")
        assert len(verified) == count
    monkeypatch.setattr(check_plan, "MOST_OPS", 10**6)
    stream = a_plan(request_of(asynchronous=True), schedule="pipedream", micro_batches=1)
    checked_plan(stream, request_of(asynchronous=True), "mine")
    # A stream is verified with the weight rule that it runs with.
    assert verified == [{"weights": stream.weights}]


def test_options_of_the_weight_rule_are_those_requested_in_any_order(request_of):
    """A rule with another decay trains to other numbers."""
    options = (("decay", 0.25), ("warm_up", 3.0))
    request = request_of(
        asynchronous=True, weights="pipemare", weights_options=options, schedules=("pipedream",)
    )
    result = a_plan(request, schedule="pipedream", micro_batches=1)
    assert findings(result, request) == []
    assert findings(replace(result, weights_options=options[::-1]), request) == []
    assert findings(replace(result, weights_options=(("decay", 0.5),)), request) == [
        "weights_options: {'decay': 0.5} in the plan, {'decay': 0.25, 'warm_up': 3.0} requested"
    ]
