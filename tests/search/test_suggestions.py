"""Suggestions, each change applied by hand."""

from dataclasses import replace

import pytest
from tests.search.random_requests import FAST, SLOW

from penstock.cluster.cluster import Cluster, Device, Link
from penstock.profile.device_profiles import scale_profile
from penstock.search import suggestions as module
from penstock.search.best_plan import plan_proposal
from penstock.search.catalogue import plan
from penstock.search.evaluate import evaluate
from penstock.search.instantiate import instantiate
from penstock.search.proposal import Proposal
from penstock.search.request import PlanRequest
from penstock.search.suggestions import MOST, WORTH, suggestions
from penstock.simulate.plan_costs import simulate_plan

INSIDE, BETWEEN = Link(1e-2, 1e3), Link(5e-2, 3e2)
TWO_NODES = Cluster("c", (Device("d", 10**9, flops=FAST),) * 4, 2, INSIDE, BETWEEN)


def suggested(request, proposal):
    """The changes for one way, and that way."""
    chosen = evaluate(instantiate(request, proposal))[-1]
    return {
        suggestion.change: suggestion.step_s for suggestion in suggestions(request, chosen)
    }, chosen


def by_hand(request, proposal, profiles=None, cluster=None, batch=None):
    """Its step with other profiles or another cluster, by way of a plan and its simulation."""
    profiles, cluster = profiles or request.profiles, cluster or request.cluster
    chosen_plan = plan_proposal(
        replace(request, profiles=profiles, cluster=cluster, batch=batch or request.batch), proposal
    )
    return simulate_plan(chosen_plan, profiles, cluster).makespan


def test_each_told_change_gives_the_step_that_it_says(profile_of):
    """Sensitivity is simulated, never estimated."""
    request = PlanRequest(
        profile_of([1.0, 3.0, 1.0, 1.0], output=300.0), TWO_NODES, 8, recompute="never"
    )
    proposal = Proposal((1, 1, 2), "1f1b", 4, recompute="never")
    changes, chosen = suggested(request, proposal)
    wide = replace(INSIDE, bandwidth_bytes_per_s=2e3), replace(BETWEEN, bandwidth_bytes_per_s=6e2)
    expected = {
        "twice the bandwidth inside a node": by_hand(
            request, proposal, cluster=replace(TWO_NODES, inside=wide[0])
        ),
        "twice the bandwidth between nodes": by_hand(
            request, proposal, cluster=replace(TWO_NODES, between=wide[1])
        ),
        "no latency inside a node": by_hand(
            request, proposal, cluster=replace(TWO_NODES, inside=replace(INSIDE, latency_s=0.0))
        ),
        "no latency between nodes": by_hand(
            request, proposal, cluster=replace(TWO_NODES, between=replace(BETWEEN, latency_s=0.0))
        ),
        "devices twice as fast": by_hand(
            request, proposal, profiles=scale_profile(request.profile, 0.5)
        ),
        "twice the batch (time for as many samples)": by_hand(
            request, replace(proposal, micro_batches=8), batch=16
        )
        / 2,
    }
    for change, seconds in changes.items():
        if change in expected:
            assert seconds == pytest.approx(expected[change]), change
    best = sorted(seconds for seconds in expected.values() if seconds < chosen.step_s * (1 - WORTH))
    assert {"devices twice as fast", "twice the bandwidth between nodes"} <= changes.keys()
    assert list(changes.values()) == sorted(changes.values())
    assert len(changes) <= MOST
    assert len(changes) == MOST or len(changes) >= len(best), (
        "nothing that is worth it is left out but for want of room"
    )


def test_the_busiest_rank_s_device_is_the_one_that_is_made_faster(profile_of):
    """Where the plan stands on other devices than the first, its own numbering is told, and the
    right device is changed.
    """
    fast = tuple(Device("d", 10**9, flops=FAST) for _ in range(3))
    on = Cluster("c", fast, 3, Link(0.0, 1e12), Link(0.0, 1e12))
    request = PlanRequest(profile_of([1.0, 9.0]), on, 8)
    changes, _ = suggested(request, Proposal((1, 1), "1f1b", 8, devices=(0, 2)))
    slow_profile = profile_of([1.0, 9.0])
    devices = (fast[0], fast[1], Device("quick", 10**9))
    expected = by_hand(
        request,
        Proposal((1, 1), "1f1b", 8, devices=(0, 2)),
        {"d": slow_profile, "quick": scale_profile(slow_profile, 0.5)},
        replace(on, devices=devices),
    )
    assert changes["the device of rank 1 twice as fast"] == pytest.approx(expected)


def test_on_mixed_devices_all_get_twice_as_fast(profile_of):
    """Each by its own pace."""
    on = Cluster(
        "c",
        (Device("fast", 10**9, flops=FAST), Device("slow", 10**9, flops=SLOW)),
        2,
        Link(0.0, 1e12),
        Link(0.0, 1e12),
    )
    changes, chosen = suggested(
        PlanRequest(profile_of([1.0, 1.0]), on, 8), Proposal((1, 1), "1f1b", 8)
    )
    assert changes["devices twice as fast"] == pytest.approx(chosen.step_s / 2)


def test_memory_for_all_activations_is_told_where_something_is_recomputed(profile_of):
    """What a larger memory would bring, without cutting anew."""
    request = PlanRequest(profile_of([1.0] * 4), TWO_NODES, 8)
    again, chosen = suggested(request, Proposal((2, 2), "1f1b", 4, recompute="always"))
    without, plain = suggested(request, Proposal((2, 2), "1f1b", 4, recompute="never"))
    change = "memory for all activations, so that nothing is recomputed"
    assert again[change] == pytest.approx(plain.step_s)
    assert again[change] < chosen.step_s
    assert change not in without


def test_links_that_do_not_exist_are_not_told(profile_of):
    """One node has none between, and nodes of one device none inside."""
    link = Link(1e-2, 1e2)
    for per_node, absent in ((2, "between nodes"), (1, "inside a node")):
        on = Cluster("c", (Device("d", 10**9),) * 2, per_node, link, link)
        changes, _ = suggested(
            PlanRequest(profile_of([1.0] * 4), on, 8), Proposal((2, 2), "1f1b", 4)
        )
        assert changes
        assert not any(absent in change for change in changes)


def test_one_rank_more_is_planned_anew_with_the_same_schedule(profile_of):
    """No slower than what the planner finds there, and found by it."""
    link = Link(0.0, 1e12)
    two, three = (Cluster("c", (Device("d", 10**9),) * ranks, 4, link, link) for ranks in (2, 3))
    profile = profile_of([1.0] * 6)
    request = PlanRequest(profile, two, 12, ("1f1b",), max_replicas=1, budget_s=1000)
    changes, _ = suggested(request, Proposal((3, 3), "1f1b", 8))
    better = plan(
        profile, three, 12, schedules="1f1b", max_replicas=1, budget_s=1000
    ).predicted.step_s
    assert better * (1 - 1e-9) <= changes["one rank more (with 1f1b)"] <= better * 1.1


def test_what_does_not_help_by_half_a_percent_is_not_told(profile_of):
    """Changes without an effect would only hide those that help."""
    on = Cluster("c", (Device("d", 10**9),) * 2, 2, Link(1e-9, 1e15), Link(0.0, 1e15))
    changes, chosen = suggested(
        PlanRequest(profile_of([1.0] * 4), on, 8, stages=2), Proposal((2, 2), "1f1b", 8)
    )
    assert not any("bandwidth" in change or "latency" in change for change in changes)
    assert all(seconds < chosen.step_s * (1 - WORTH) for seconds in changes.values())


def test_a_plan_carries_its_remedies_best_first(profile_of):
    """And prints them."""
    chosen_plan = plan(profile_of([1.0, 3.0, 1.0, 1.0], output=300.0), TWO_NODES, 8, budget_s=1000)
    assert chosen_plan.remedies
    steps = [remedy.step_s for remedy in chosen_plan.remedies]
    assert steps == sorted(steps)
    assert all(step < chosen_plan.predicted.step_s for step in steps)
    text = str(chosen_plan)
    assert "suggestions:" in text
    assert all(remedy.change in text for remedy in chosen_plan.remedies)


def changes_of(request, proposal):
    """The suggested changes."""
    return list(suggested(request, proposal)[0])


def test_one_rank_more_is_not_suggested_where_the_plan_could_not_use_it(profile_of, monkeypatch):
    """With a given number of stages, with a schedule that is built from costs, for a stream, or for
    a large cluster.
    """
    link = Link(0.0, 1e12)
    slow, fast = Device("slow", 10**9, flops=SLOW), Device("fast", 10**9, flops=FAST)
    on = Cluster("c", (slow, fast), 2, link, link)
    profile = replace(profile_of([1.0] * 4), device="slow")
    more = "one rank more (with 1f1b)"
    free = PlanRequest(profile, on, 8, budget_s=1000)
    assert more in changes_of(free, Proposal((2, 2), "1f1b", 8))
    assert more not in changes_of(replace(free, stages=2), Proposal((2, 2), "1f1b", 8))
    cost_schedule = changes_of(free, Proposal((2, 2), "zb-auto", 8))
    assert not any("rank more" in change or "batch" in change for change in cost_schedule)
    stream = changes_of(replace(free, asynchronous=True), Proposal((2, 2), "pipedream", 1))
    assert not any("rank more" in change for change in stream)
    monkeypatch.setattr(module, "FEW_RANKS", 1)
    assert more not in changes_of(free, Proposal((2, 2), "1f1b", 8))


def test_the_additional_rank_is_one_of_the_last_kind_in_the_last_node(profile_of, monkeypatch):
    """It gets a tenth of the budget of the search that it is about."""
    link = Link(0.0, 1e12)
    devices = tuple(Device(name, 10**9, flops=FAST) for name in "aab")
    on = Cluster("c", devices, 1, link, link, node_of=(0, 0, 1))
    searched = []

    class Recorded(module.PlanSearch):
        def __init__(self, request, work):
            searched.append((request, work))
            super().__init__(request, work)

    monkeypatch.setattr(module, "PlanSearch", Recorded)
    request = PlanRequest(replace(profile_of([1.0] * 4), device="a"), on, 8, budget_s=30)
    changes_of(request, Proposal((2, 1, 1), "gpipe", 8))
    ((larger, work),) = searched
    assert [device.name for device in larger.cluster.devices] == ["a", "a", "b", "b"]
    assert [larger.cluster.node(rank) for rank in range(4)] == [0, 0, 1, 1]
    assert (larger.schedules, larger.budget_s, work) == (("gpipe",), 3.0, module.WORK)


def test_twice_the_batch_has_micro_batches_of_the_same_size(profile_of):
    """Also where their number is given; the recompute stays."""
    request = PlanRequest(profile_of([1.0] * 4), TWO_NODES, 8, micro_batches=4)
    proposal = Proposal((2, 2), "1f1b", 4, recompute="always")
    result, _ = suggested(request, proposal)
    doubled = replace(request, batch=16, micro_batches=8)
    expected = evaluate(instantiate(doubled, replace(proposal, micro_batches=8)))[-1].step_s / 2
    change = "twice the batch (time for as many samples)"
    assert result[change] == pytest.approx(expected)


def test_links_inside_single_nodes_are_made_faster_too(profile_of):
    """A node may have a link of its own; the other nodes' is changed as well."""
    inside, special = Link(1e-2, 1e3), Link(2e-2, 5e2)
    on = Cluster(
        "c",
        (Device("d", 10**9, flops=FAST),) * 4,
        2,
        inside,
        Link(0.0, 1e12),
        insides=((1, special),),
    )
    request = PlanRequest(profile_of([1e-3] * 4, output=300.0), on, 8, recompute="never")
    proposal = Proposal((1, 1, 2), "1f1b", 4, devices=(1, 2, 3))
    result, _ = suggested(request, proposal)
    quick = replace(
        on,
        inside=replace(inside, latency_s=0.0),
        insides=((1, replace(special, latency_s=0.0)),),
    )
    assert result["no latency inside a node"] == pytest.approx(
        by_hand(request, proposal, cluster=quick)
    )
