"""What a plan tells besides what runs."""

from dataclasses import replace

import pytest
from tests.search.random_requests import FAST, SLOW

from penstock.cluster.cluster import Cluster, Device, Link, cluster
from penstock.plan.segments import Selection
from penstock.plan.sharding import Sharding
from penstock.schedule.recompute import Recompute
from penstock.search.best_plan import best_plan, plan_proposal
from penstock.search.build_plan import ROWS, build_plan, data_parallel_s, one_device_s
from penstock.search.evaluate import evaluate
from penstock.search.instantiate import Evaluated, instantiate
from penstock.search.proposal import Proposal
from penstock.search.request import PlanRequest
from penstock.simulate.plan_costs import simulate_plan

LINK = Link(0.5, 1000.0)


def on(*devices: Device) -> Cluster:
    """One node."""
    return Cluster("c", devices, len(devices), LINK, LINK)


FOUR = on(*(Device("d", 10**9),) * 4)
MIXED = on(Device("fast", 10**9, flops=FAST), Device("slow", 10**9, flops=SLOW))


def test_traffic_is_what_each_pair_of_ranks_sends_in_a_step(profile_of):
    """16 samples of 10 bytes forward, as many of gradients back."""
    chosen_plan = plan_proposal(
        PlanRequest(profile_of([1.0] * 4), FOUR, 16), Proposal((2, 1, 1), "1f1b", 4)
    )
    assert [
        (entry.from_rank, entry.to_rank, entry.bytes) for entry in chosen_plan.predicted.traffic
    ] == [
        (0, 1, 160),
        (1, 0, 160),
        (1, 2, 160),
        (2, 1, 160),
    ]


def test_traffic_of_a_stream_is_a_batch_s(profile_of):
    """Not that of all batches that were simulated."""
    chosen_plan = plan_proposal(
        PlanRequest(profile_of([1.0] * 4), FOUR, 4, asynchronous=True),
        Proposal((2, 2), "pipedream", 1),
    )
    assert {
        (entry.from_rank, entry.to_rank): entry.bytes for entry in chosen_plan.predicted.traffic
    } == {
        (0, 1): 40,
        (1, 0): 40,
    }


@pytest.mark.parametrize(
    ("name", "recompute"), [("gpipe", "never"), ("1f1b", "always"), ("1f1b", "never")]
)
def test_memory_parts_add_up_to_what_each_rank_holds(profile_of, name, recompute):
    """By name, so that a reader knows what to save."""
    built = plan_proposal(
        PlanRequest(profile_of([1.0] * 4), FOUR, 16), Proposal((1, 3), name, 4, recompute=recompute)
    ).predicted
    assert len(built.memory_parts) == 2
    for parts, peak in zip(built.memory_parts, built.peak_memory, strict=True):
        assert sum(size for _, size in parts) == pytest.approx(peak, abs=1)
        assert {"weights", "activations"} <= dict(parts).keys()


def test_one_device_is_the_fastest_with_the_whole_batch_at_once_and_an_update(profile_of):
    """What a speed-up is measured by."""
    assert one_device_s(PlanRequest(profile_of([1.0, 2.0], fixed=0.5), FOUR, 8)) == pytest.approx(
        8 * 9 + 4 * 0.5
    )
    profile = {"fast": profile_of([1.0]), "slow": profile_of([2.0])}
    assert one_device_s(PlanRequest(profile, on(*MIXED.devices[::-1]), 8)) == pytest.approx(24)


def test_speed_ups_count_the_update_as_the_simulation_does(profile_of):
    """A fixed cost per call and a cost per byte, on one device and on all of data parallelism."""
    plain = profile_of([1.0, 2.0])
    costly = replace(plain, update_fixed_s=3.0, update_s_per_byte=0.25)
    assert plain.parameter_bytes > 0
    update_s = 3.0 + 0.25 * plain.parameter_bytes
    for seconds in (one_device_s, data_parallel_s):
        without_update_s = seconds(PlanRequest(plain, FOUR, 8))
        assert seconds(PlanRequest(costly, FOUR, 8)) == pytest.approx(without_update_s + update_s)


def test_data_parallelism_is_the_slowest_device_s_share_and_what_gradients_take(profile_of):
    """Of 4 ranks: 6 messages of a quarter of 2,000 bytes each."""
    assert data_parallel_s(PlanRequest(profile_of([1.0, 2.0]), FOUR, 8)) == pytest.approx(
        2 * 9 + 6 * (0.5 + 0.5)
    )
    profile = {"fast": profile_of([1.0]), "slow": profile_of([2.0])}
    assert data_parallel_s(PlanRequest(profile, MIXED, 8)) == pytest.approx(4 * 6 + 1.5)


def test_there_is_no_data_parallelism_of_one_device_or_with_fewer_samples_than_devices(profile_of):
    """A number would be of no use to the user."""
    assert data_parallel_s(PlanRequest(profile_of([1.0]), cluster("local:1"), 8)) is None
    assert data_parallel_s(PlanRequest(profile_of([1.0]), FOUR, 3)) is None


def test_the_table_begins_with_the_plan_and_is_no_longer_than_a_screen(profile_of):
    """All others once, best first."""
    request = PlanRequest(profile_of([1.0] * 4), FOUR, 16)
    proposals = [
        Proposal(cut, name, 8)
        for name in ("gpipe", "1f1b", "naive", "zb-h1")
        for cut in ((4,), (2, 2), (2, 1, 1), (1,) * 4)
    ]
    chosen_plan = best_plan(request, proposals)
    assert len(chosen_plan.candidates) == ROWS
    first = chosen_plan.candidates[0]
    assert (first.schedule, first.lengths, first.step_s) == (
        chosen_plan.schedule_name,
        chosen_plan.lengths,
        chosen_plan.predicted.step_s,
    )


def test_devices_are_told_where_they_are_not_simply_the_first(profile_of):
    """Empty means rank r on device r."""
    request = PlanRequest(profile_of([1.0] * 4), FOUR, 16)
    for devices, expected in (
        ((), ()),
        ((0, 1), ()),
        ((0, 1, 2, 3), ()),
        ((2, 3), (2, 3)),
        ((1, 0, 2), (1, 0)),
    ):
        chosen_plan = plan_proposal(request, Proposal((2, 2), "1f1b", 4, devices=devices))
        assert chosen_plan.devices == expected
        chosen_plan.check()


def test_ranks_compute_as_long_as_the_simulation_says(profile_of):
    """The first stage's I does nothing, and its W all that a B does: its rank used to be planned with
    I and W of its layers, here 96 s instead of 48.
    """
    profile = profile_of([1.0, 2.0, 1.0])
    first, *others = profile.layers
    slow = replace(first.input_grad, median_s=tuple(4 * s for s in first.input_grad.median_s))
    profile = replace(profile, layers=(replace(first, input_grad=slow), *others))
    plan = plan_proposal(PlanRequest(profile, FOUR, 16), Proposal((1, 2), "zb-h1", 4))
    busy_s = simulate_plan(plan, profile, FOUR).busy
    assert plan.predicted.busy_s == pytest.approx(busy_s)
    assert busy_s[0] == pytest.approx(16 * (1 + 2))


@pytest.mark.parametrize(
    ("recompute", "more_work", "less_kept"),
    [
        ("never", 0.0, 0.0),
        # Forwards of 4 layers again: 4 of 12 s; instead of 100 bytes per layer the input of each
        # stage, 10 bytes of 200.
        ("always", 4 / 12, 1 - 10 / 200),
        # All micro-batches but the last.
        ("except_last", 3 / 4 * 4 / 12, 3 / 4 * (1 - 10 / 200)),
    ],
)
def test_a_plan_tells_what_recompute_adds_and_saves(profile_of, recompute, more_work, less_kept):
    """As shares of the work and the activations without it."""
    request = PlanRequest(profile_of([1.0] * 4), FOUR, 16)
    result = plan_proposal(request, Proposal((2, 2), "gpipe", 4, recompute=recompute)).predicted
    assert result.more_work == pytest.approx(more_work)
    assert result.less_kept == pytest.approx(less_kept)
    assert bool(result.busy_s) == (recompute == "never")


def test_a_prediction_has_the_rate_and_a_bound_that_is_not_above_the_step(profile_of):
    """Rounding may put a bound above the step, and a plan may be better than the space it is of."""
    request = PlanRequest(profile_of([1.0] * 4), FOUR, 16)
    chosen = evaluate(instantiate(request, Proposal((2, 2), "1f1b", 4)))[-1]
    for bound_s, expected in ((0.0, 0.0), (3.0, 3.0), (1e9, chosen.step_s)):
        predicted = build_plan(request, chosen, lower_bound_s=bound_s).predicted
        assert predicted.lower_bound_s == expected
    assert predicted.samples_per_s == pytest.approx(16 / chosen.step_s)
    assert predicted.bubble_ratio == chosen.steady_state.bubble_ratio
    assert predicted.peak_memory == chosen.memory
    assert predicted.one_device_s == one_device_s(request)
    assert predicted.data_parallel_s == data_parallel_s(request)


def test_a_plan_carries_what_its_request_and_its_devices_are(profile_of):
    """So that a run can compare them with its own: hosts, memory, optimizer and sharding."""
    devices = (Device("a", 10**9), Device("b", 2 * 10**9), Device("a", 3 * 10**9))
    link = Link(0.0, 1e12)
    hosts = Cluster("h", devices, 2, link, link, node_of=(0, 0, 1), hosts=("one", "two"))
    profile = profile_of([1.0] * 4)
    request = PlanRequest(
        {"a": profile, "b": profile}, hosts, 16, optimizer="AdamW", optimizer_fused=True
    )
    result = plan_proposal(request, Proposal((2, 2), "1f1b", 4, devices=(1, 2)))
    assert result.cluster_devices == (("one", "a"), ("one", "b"), ("two", "a"))
    assert result.memory_limits == (2 * 10**9, 3 * 10**9)
    assert (result.cluster, result.cluster_ranks) == ("h", 3)
    assert (result.optimizer, result.optimizer_fused) == ("AdamW", True)
    assert result.optimizer_states == request.profile.optimizer_states
    assert result.layer_names == tuple(layer.name for layer in profile)
    assert (result.recomputed, result.segment_starts) == ((), ())
    plain = plan_proposal(PlanRequest(profile, FOUR, 16), Proposal((2, 2), "1f1b", 4))
    assert (plain.cluster_devices, plain.optimizer, plain.optimizer_fused) == ((), "", False)
    limited = replace(request, memory_limit=2 * 10**9 + 5)
    result = plan_proposal(limited, Proposal((2, 2), "1f1b", 4, devices=(1, 2)))
    assert result.memory_limits == (2 * 10**9, 2 * 10**9 + 5)
    shared = replace(request, sharding=Sharding(2, sequence_parallel=True, zero=1))
    result = plan_proposal(shared, Proposal((2, 2), "1f1b", 4))
    assert (result.tensor_parallel, result.sequence_parallel, result.zero) == (2, True, 1)
    assert result.cluster_ranks == 6


def test_a_selective_plan_lists_its_recomputed_layers(profile_of):
    """And where a segment begins behind another one."""
    request = PlanRequest(profile_of([1.0] * 4, parameters=0), FOUR, 16)
    placed = instantiate(request, Proposal((4,), "gpipe", 4))
    selection = Selection((0, 1, 3), (1,))
    chosen = Evaluated(
        placed.with_selective_recompute(selection), Recompute.SELECTIVE, (1,), 0.5, ""
    ).simulated()
    result = build_plan(request, chosen)
    assert (result.recompute, result.recomputed, result.segment_starts) == (
        "selective",
        (0, 1, 3),
        (1,),
    )
    assert result.predicted.more_work == pytest.approx(3 / 12)


def test_the_chosen_candidate_is_the_first_row_and_no_other_one(profile_of):
    """Also if it is not the first of the candidates."""
    request = PlanRequest(profile_of([1.0] * 4), FOUR, 16)
    rows = [
        evaluate(instantiate(request, Proposal((2, 2), name, 4)))[-1]
        for name in ("gpipe", "1f1b", "zb-h1")
    ]
    result = build_plan(request, rows[1], rows)
    assert [row.schedule for row in result.candidates] == ["1f1b", "gpipe", "zb-h1"]
    assert [row.schedule for row in build_plan(request, rows[1]).candidates] == ["1f1b"]


def test_seconds_of_data_parallelism_leave_out_what_the_slowest_sum_hides(profile_of):
    """Unlike devices: the one that hides least counts."""
    profiles = {"fast": profile_of([1.0, 1.0]), "slow": profile_of([2.0, 2.0])}
    request = PlanRequest(profiles, MIXED, 8)
    whole = data_parallel_s(request)
    sums = 2 * (LINK.latency_s + 2000 / 2 / LINK.bandwidth_bytes_per_s)
    slowest = 4 * 12
    assert slowest < whole <= slowest + sums
