"""The work of a rank's host: gradient accumulation and messages."""

from __future__ import annotations

import pytest

from penstock.cluster.cluster import Cluster, Device, Link
from penstock.profile.profile import LayerProfile, Profile, Timing
from penstock.schedule.catalogue import schedule
from penstock.simulate.host_costs import RECEIVE_S, SEND_S
from penstock.simulate.plan_costs import schedule_costs
from penstock.simulate.simulate import simulate_schedule
from penstock.simulate.stage_seconds import stage_seconds, update_seconds
from penstock.weights.catalogue import weight_rule

LINK = Link(0.5, 1000.0)
MESSAGE_S = 0.5 + 2 * 100 / 1000  # 2 samples


def timing(seconds: float) -> Timing:
    """Return a timing with this many seconds per sample."""
    return Timing((1, 8), (seconds, 8 * seconds))


def a_profile(**more: float) -> Profile:
    """Four layers alike: 1 s forward, 3 s backward of which 1 for the input, 10 bytes of weights,
    100 bytes out.
    """
    layers = [
        LayerProfile(
            f"l{i}",
            "Linear",
            timing(1),
            timing(3),
            timing(1),
            timing(2),
            parameters=1,
            parameter_bytes=10,
            buffer_bytes=0,
            activation_bytes_per_sample=1,
            output_bytes_per_sample=100,
        )
        for i in range(4)
    ]
    return Profile(tuple(layers), "f", 7.0, 8, **more)  # type: ignore[arg-type]


def costs(
    profile: Profile,
    kind: str,
    name: str = "1f1b",
    stages: int = 2,
    micro_batches: int = 4,
    **options: object,
):
    """Of a schedule on as many devices of a kind as it needs."""
    case_schedule = schedule(name, stages, micro_batches, **options)
    on = Cluster(
        "c", (Device("d", 10**9, kind),) * case_schedule.ranks, case_schedule.ranks, LINK, LINK
    )  # type: ignore[arg-type]
    lengths = [4 // stages] * stages
    return case_schedule, schedule_costs(
        case_schedule,
        [profile] * case_schedule.ranks,
        lengths,
        on,
        2 * micro_batches,
        weight_rule("flush"),
    )


def test_the_first_stage_leaves_all_of_its_backward_to_w():
    """Data needs no gradient. I took 0.3 ms where 33 were predicted, and W 63 where 36 were."""
    seconds = stage_seconds(a_profile(), [1, 3], 2)
    assert seconds["input_grad"] == [0, 6]
    assert seconds["weight_grad"] == [6, 12]
    assert seconds["backward"] == [6, 18]


def test_a_rank_of_a_cpu_hands_messages_over_itself():
    """gloo writes them from the thread that sends: the next op waits for that."""
    stage_costs, found = costs(a_profile(), "cpu")
    assert found.forward == pytest.approx((4 + SEND_S + MESSAGE_S, 4 + RECEIVE_S))
    assert found.backward == pytest.approx((12 + RECEIVE_S, 12 + SEND_S + MESSAGE_S))
    assert found.transfer == (0.5,), "then there is only the latency to wait for"
    assert simulate_schedule(stage_costs, found).makespan > 4 * 16


def test_a_gpu_sends_while_it_computes():
    """Its copies have engines of their own."""
    _, stage_costs = costs(a_profile(), "gpu")
    assert (stage_costs.forward, stage_costs.backward, stage_costs.transfer) == (
        (4, 4),
        (12, 12),
        (MESSAGE_S,),
    )


def test_stages_on_one_rank_send_each_other_nothing():
    """A V has its middle on one rank."""
    _, stage_costs = costs(a_profile(), "cpu", "zb-v", 4)
    assert stage_costs.forward == pytest.approx(
        (2 + SEND_S + MESSAGE_S, 2 + RECEIVE_S, 2 + SEND_S + MESSAGE_S, 2 + RECEIVE_S)
    )
    assert stage_costs.transfer == (0.5, 0.0, 0.5)


@pytest.mark.parametrize(("micro_batches", "share"), [(1, 0.0), (2, 0.5), (4, 0.75)])
def test_all_micro_batches_but_the_first_add_up_their_gradients(micro_batches, share):
    """A batch of one micro-batch has nothing to add to."""
    _, stage_costs = costs(a_profile(accumulate_s_per_byte=0.1), "gpu", micro_batches=micro_batches)
    assert stage_costs.backward == pytest.approx((12 + share * 20 * 0.1,) * 2)
    assert stage_costs.weight_grad == pytest.approx((12 + share * 20 * 0.1, 8 + share * 20 * 0.1))


def test_every_copy_has_a_first_micro_batch_of_its_own():
    """Two copies with two micro-batches each: half of them add."""
    _, stage_costs = costs(a_profile(accumulate_s_per_byte=0.1), "gpu", "gpipe", 1, 4, replicas=2)
    assert stage_costs.backward == pytest.approx((24 + 0.5 * 40 * 0.1,))


def test_an_update_has_a_cost_of_its_own_where_there_is_something_to_update():
    """0.26 ms a step here, whatever the size."""
    profile = a_profile(update_fixed_s=5.0, update_s_per_byte=1.0)
    assert update_seconds(profile, [1, 3]) == [15, 35]
    bare = Profile(
        tuple(
            LayerProfile(
                layer.name,
                layer.kind,
                layer.forward,
                layer.backward,
                layer.input_grad,
                layer.weight_grad,
                0,
                0,
                0,
                1,
                100,
            )
            for layer in profile
        ),
        "f",
        7.0,
        8,
        update_fixed_s=5.0,
    )
    assert update_seconds(bare, [1, 3]) == [0, 0]
