"""Costs of a plan: its own optimizer, sharding, devices and selective recompute count."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.simulate.test_plan_costs import FOUR, PROFILE, a_plan

from penstock.cluster.cluster import Device
from penstock.errors import PlanError
from penstock.plan.plan import Plan
from penstock.plan.prediction import Prediction
from penstock.schedule.catalogue import schedule
from penstock.simulate.gradient_sync import SUM_S_PER_BYTE, all_reduce_seconds
from penstock.simulate.plan_costs import costs_of_plan, simulate_plan


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
