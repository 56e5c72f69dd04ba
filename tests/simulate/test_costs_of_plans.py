"""Costs of a plan: its own optimizer, sharding, devices and selective recompute count."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.simulate.four_layers import FOUR, PROFILE, a_plan

from penstock.cluster.cluster import Device, cluster
from penstock.errors import PlanError
from penstock.plan.plan import Plan
from penstock.plan.prediction import Prediction
from penstock.profile.device_profiles import scale_profile
from penstock.schedule.catalogue import schedule
from penstock.schedule.op import Kind
from penstock.schedule.slicing import Slicing
from penstock.simulate.gradient_sync import SUM_S_PER_BYTE, all_reduce_seconds
from penstock.simulate.plan_costs import costs_of_plan, simulate_plan
from penstock.simulate.steady_state import steady


def replicated_plan(**changes) -> Plan:
    """Two replicas of the whole model, each with one micro-batch of 1 sample."""
    copies = schedule("gpipe", 1, 2, replicas=2)
    plan = replace(a_plan(), lengths=(4,), programs=copies.lines)
    return replace(plan, predicted=Prediction(1.0, 0.0, (0, 0), 1.0, 1.0), **changes)


def test_a_plan_has_the_states_of_its_optimizer():
    """Not those of the profile, which was measured with another one; and the seconds of its step,
    which may be one kernel.
    """
    one, three = (
        costs_of_plan(replace(a_plan(), optimizer_states=states), PROFILE, FOUR)
        for states in (1.0, 3.0)
    )
    assert one.optimizer_bytes == (300, 700)
    assert three.optimizer_bytes == (900, 2100)
    fused = replace(PROFILE, update_s_per_byte=0.25, step_ratios={"Adam, 2 states, fused": 3.0})
    plan = replace(a_plan(), optimizer="Adam", optimizer_states=2.0, optimizer_fused=True)
    assert costs_of_plan(plan, fused, FOUR).update == (3 * 0.25 * 300, 3 * 0.25 * 700)
    assert three.weight_bytes == tuple(size + 2 * more for size, more in ((901, 300), (2105, 700)))


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_a_plan_has_the_updates_and_bytes_of_its_level_of_zero(zero):
    """Two GPUs on one node: each stores half of the states from level 1 on, of gradients from
    level 2 on, and of weights at level 3; and up to two of four layers of what it shares.
    """
    profile = replace(PROFILE, update_s_per_byte=0.25)
    costs = costs_of_plan(replicated_plan(zero=zero), profile, FOUR)
    sum_s = all_reduce_seconds((0, 1), 1000.0, FOUR)
    steps_s = (250.0, 125.0, 125.0, 125.0)
    at_update = (1.0, 1.0, 0.5, 0.0)
    assert costs.update == pytest.approx((steps_s[zero] + at_update[zero] * sum_s,))
    assert costs.optimizer_bytes == pytest.approx((1000 if zero == 0 else 500,))
    assert costs.gradient_bytes == pytest.approx((1000,)), "half, and two of four layers"
    assert (costs.forward > (10,)) == (zero == 3)


@pytest.mark.parametrize("zero", [1, 2])
def test_replicas_sum_over_the_link_between_the_devices_of_the_plan(zero):
    """Devices 0 and 2 are on different nodes."""
    costs = costs_of_plan(replicated_plan(zero=zero, devices=(0, 2)), PROFILE, FOUR)
    at_update = {1: 1.0, 2: 0.5}[zero]
    assert costs.update == pytest.approx((at_update * all_reduce_seconds((0, 2), 1000.0, FOUR),))


def test_sums_of_gradients_beside_the_backward_are_no_part_of_a_plan_s_updates():
    """Between CPU hosts buckets leave during the backward; with ZeRO 1 they do not."""
    layers = tuple(
        replace(layer, parameter_bytes=5 * 10**6, backward=layer.forward) for layer in PROFILE
    )
    profile = replace(PROFILE, layers=layers)
    hosts = replace(
        FOUR, devices=(Device("d", 10**12, "cpu"),) * 4, devices_per_node=1, between=FOUR.inside
    )
    plan = replicated_plan()
    whole_s = all_reduce_seconds((0, 1), 20e6, hosts)
    costs = costs_of_plan(plan, profile, hosts)
    # The backward of the last layer ends after 4 s, and the other three take 6 s more.
    assert costs.update == pytest.approx((whole_s - 6.0,))
    assert whole_s > 20e6 * SUM_S_PER_BYTE
    assert costs_of_plan(replace(plan, zero=1), profile, hosts).update == pytest.approx((whole_s,))


def test_what_sums_hide_is_by_the_devices_of_the_plan_and_the_samples_of_its_slices():
    """Devices 2 and 3 are on two hosts, 0 and 1 on one, and take half of the time of these."""
    layers = tuple(
        replace(layer, parameter_bytes=5 * 10**6, backward=layer.forward) for layer in PROFILE
    )
    profile = replace(PROFILE, layers=layers)
    devices = (Device("d", 10**12, "cpu"),) * 2 + (Device("e", 10**12, "cpu"),) * 2
    hosts = replace(FOUR, devices=devices, node_of=(0, 0, 1, 2), between=FOUR.inside)
    whole_s = all_reduce_seconds((2, 3), 20e6, hosts)
    by_kind = {"d": profile, "e": scale_profile(profile, 0.5)}
    plan = replace(replicated_plan(), devices=(2, 3))
    assert costs_of_plan(plan, by_kind, hosts).update == pytest.approx((whole_s - 3.0,))
    programs = tuple(f"0F{n} 0B{n} 0F{n + 1} 0B{n + 1} 0U1" for n in (0, 2))
    halves = Slicing("samples", ((0.5, 0.5), (0.5, 0.5)))
    sliced = replace(plan, programs=programs, slicing=halves, batch=8)
    by_kind["e"] = profile
    # Slices of 2 of the 4 samples of a micro-batch: the other three layers take 2 x 6 s.
    assert costs_of_plan(sliced, by_kind, hosts).update == pytest.approx((whole_s - 12.0,))


def test_selected_layers_run_again_at_the_pace_of_the_plan_s_devices():
    """Two on one node slow each other down, and those that the plan leaves idle do not."""
    shared = replace(FOUR, devices=(Device("d", 10**9, together=2.0),) * 4)
    plan = replace(a_plan(), recompute="selective", recomputed=(0, 3))
    for devices, pace in (((2, 3), 2.0), ((3, 0), 1.0)):
        costs = costs_of_plan(replace(plan, devices=devices), PROFILE, shared)
        assert costs.recompute == (1.0 * pace, 4.0 * pace)
    alone = costs_of_plan(a_plan(), PROFILE, replace(shared, devices_per_node=1))
    assert alone.forward == (3.0, 7.0)
    roomy = replace(shared, devices_per_node=4)
    by_name = costs_of_plan(replace(a_plan(), devices=(0, 1)), PROFILE, roomy)
    assert costs_of_plan(a_plan(), PROFILE, roomy) == by_name


def test_a_plan_runs_its_selected_layers_again():
    """By micro-batch: 3 samples in two micro-batches are 2 and 1. Bytes are those of the largest."""
    plan = replace(a_plan(), batch=3, recompute="selective", recomputed=(0, 3))
    costs = costs_of_plan(plan, PROFILE, FOUR)
    assert costs.recompute == ((2.0, 1.0), (8.0, 4.0))
    # Stage 0 saves its input and layer 1 in whole, stage 1 layer 2 and the input of layer 3.
    assert costs.saved_bytes == (2 * (7 + 20), 2 * (30 + 3000))
    assert costs.recompute_peak_bytes == (2 * (10 - 7), 0.0)
    for recompute in ("never", "always"):
        assert (
            costs_of_plan(replace(a_plan(), recompute=recompute), PROFILE, FOUR).recompute is None
        )


def test_a_rank_of_a_tensor_parallel_plan_is_a_group_of_devices():
    """Its seconds are those of the profile of that width, and its links those between groups."""
    quick = tuple(replace(layer, forward=layer.input_grad) for layer in PROFILE)
    profile = replace(PROFILE, widths=(replace(PROFILE, layers=quick, tensor_parallel=2),))
    plan = replace(a_plan(), tensor_parallel=2)
    costs = costs_of_plan(plan, profile, FOUR)
    assert costs.forward == (1.5, 3.5)
    assert costs.transfer == (FOUR.transfer_seconds(2000, 0, 2),)
    with pytest.raises(PlanError, match="has no costs for tensor parallel 4"):
        costs_of_plan(replace(a_plan(), tensor_parallel=4), profile, FOUR)
    with pytest.raises(PlanError, match="gpipe runs on 2 ranks, but cluster four has 1"):
        simulate_plan(plan, profile, FOUR.on((0, 1)))


def test_ranks_of_a_plan_that_share_a_node_slow_each_other_down():
    """Only those that the plan uses count: two on one node, or one on each of two nodes."""
    shared = replace(FOUR, devices=(Device("d", 10**9, together=2.0),) * 4)
    near = costs_of_plan(replace(a_plan(), devices=(2, 3)), PROFILE, shared)
    far = costs_of_plan(replace(a_plan(), devices=(3, 0)), PROFILE, shared)
    assert (near.forward, far.forward) == ((6.0, 14.0), (3.0, 7.0))
    assert near.transfer == (FOUR.transfer_seconds(2000, 0, 1),)
    assert far.transfer == (FOUR.transfer_seconds(2000, 0, 2),)


def test_a_plan_stands_on_the_devices_that_it_names():
    """Ranks 0 and 2 are on different nodes: two messages of 22 s each way, one after the other,
    then cost more than the stages.
    """
    near, far = (
        simulate_plan(replace(a_plan(), devices=devices), PROFILE, FOUR).makespan
        for devices in ((1, 0), (0, 2))
    )
    assert near == simulate_plan(a_plan(), PROFILE, FOUR).makespan
    assert far == pytest.approx(3 + 22 + 22 + 7 + 14 + 22 + 22 + 6)
    with pytest.raises(
        PlanError, match="uses device 3 of its cluster, but four has devices 0 to 1"
    ):
        simulate_plan(replace(a_plan(), devices=(0, 3)), PROFILE, FOUR.on((0, 1)))
    with pytest.raises(PlanError, match="uses device 4 of its cluster, but four has devices 0 to"):
        simulate_plan(replace(a_plan(), devices=(4, 0)), PROFILE, FOUR)


def test_each_micro_batch_takes_the_link_between_its_own_replicas():
    """Micro-batch 0 is on ranks of different nodes, micro-batch 1 on those of one."""
    programs = ("0F1 0B1 0U1", "1F1 1B1 1U1", "0F0 0B0 0U1", "1F0 1B0 1U1")
    apart = replace(FOUR, devices_per_node=1, node_of=(0, 0, 1, 2))
    costs = costs_of_plan(replace(a_plan(), programs=programs), PROFILE, apart)
    far_s, near_s = FOUR.between.transfer_seconds(2000), FOUR.inside.transfer_seconds(2000)
    assert costs.transfer == ((far_s, near_s),)


def test_a_plan_s_stages_take_what_their_devices_take():
    """By name, by peak, or all alike: stage 1 on a device three times as slow."""
    mixed = replace(
        FOUR,
        devices=(
            Device("d", 10**9, flops=(("float32", 3e12),)),
            Device("e", 10**9, flops=(("float32", 1e12),)),
        )
        * 2,
    )
    expected = 3 + 2.5 + 21 + 21 + 42 + 42 + 2.5 + 6
    assert simulate_plan(a_plan(), PROFILE, mixed).makespan == pytest.approx(expected)
    assert simulate_plan(
        a_plan(), {"d": PROFILE, "e": scale_profile(PROFILE, 3.0)}, mixed
    ).makespan == pytest.approx(expected)
    assert simulate_plan(a_plan(), {"d": PROFILE, "e": PROFILE}, mixed).makespan == pytest.approx(
        3 + 2.5 + 7 + 7 + 14 + 14 + 2.5 + 6
    )


def test_simulating_a_plan_gives_the_time_worked_out_by_hand():
    """F 3 and 7 s, B 6 and 14 s, 0.5 + 2 s a hop: 3, hop, 7, 7, 14, 14, hop, 6."""
    timeline = simulate_plan(a_plan(), PROFILE, FOUR)
    assert timeline.makespan == pytest.approx(3 + 2.5 + 7 + 7 + 14 + 14 + 2.5 + 6)
    # Weights with gradients and momentum, buffers, and two micro-batches' activations.
    assert timeline.peak_memory == (901 + 2 * 30, 2105 + 2 * 70)


def test_a_plan_simulates_with_its_own_recompute():
    """`always` adds a forward to every backward."""
    recomputed = simulate_plan(replace(a_plan(), recompute="always"), PROFILE, FOUR)
    assert recomputed.makespan == pytest.approx(
        simulate_plan(a_plan(), PROFILE, FOUR).makespan + 7 + 7 + 3
    )


def test_an_asynchronous_plan_simulates_with_its_own_weight_rule():
    """All of its batches, and the memory that the rule takes."""
    case_schedule = schedule("pipedream", 2, 1)
    plan = replace(
        a_plan(),
        schedule_name="pipedream",
        programs=case_schedule.lines,
        micro_batches=1,
        batch=1,
        synchronous=False,
        stream=case_schedule.stream,
        weights="stash",
    )
    stash, none = (
        simulate_plan(replace(plan, weights=name), PROFILE, FOUR) for name in ("stash", "none")
    )
    assert (
        len([event for event in stash.compute if event.op.kind is Kind.U])
        == 2 * case_schedule.batches
    )
    assert stash.peak_memory[0] - none.peak_memory[0] == 300
    steady_state = steady(plan.schedule, costs_of_plan(plan, PROFILE, FOUR))
    assert steady_state.seconds_per_batch == pytest.approx(
        max(7 + 14, (3 + 6 + 7 + 14 + 2 * 2.5) / 2)
    )


def test_a_stream_takes_the_seconds_of_its_mean_micro_batch_and_the_bytes_of_its_largest():
    """Five samples in four micro-batches: one of them has two."""
    stream = schedule("pipedream", 2, 4)
    plan = replace(
        a_plan(),
        programs=stream.lines,
        micro_batches=4,
        batch=5,
        synchronous=False,
        stream=stream.stream,
        weights="stash",
    )
    costs = costs_of_plan(plan, PROFILE, FOUR)
    assert costs.forward == (1.25 * 3, 1.25 * 7)
    assert costs.activation_bytes == (2 * 30, 2 * 70)


def test_a_plan_is_refused_with_another_model_s_profile():
    """Its seconds and bytes are those of other layers."""
    with pytest.raises(
        PlanError, match="plan is for a chain with fingerprint f, the profile is of g"
    ):
        simulate_plan(a_plan(), replace(PROFILE, fingerprint="g"), FOUR)
    with pytest.raises(PlanError, match="runs on 2 ranks, but cluster local:1 has 1"):
        simulate_plan(a_plan(), PROFILE, cluster("local:1"))
