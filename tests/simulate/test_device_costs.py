"""Costs on unequal devices against a slow reference: op by op, layer by layer."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.search.random_requests import profiles, unlike

from penstock.cluster.cluster import Cluster, Device, Link
from penstock.errors import ScheduleError
from penstock.profile.device_profiles import scale_profile
from penstock.schedule.catalogue import schedule
from penstock.schedule.op import Kind, Schedule
from penstock.simulate.costs import Costs
from penstock.simulate.device_costs import on_devices
from penstock.simulate.plan_costs import schedule_costs, stage_costs
from penstock.simulate.simulate import simulate_schedule
from penstock.weights.catalogue import weight_rule

FREE = Link(0.0, 1e15)
PHASE_OF = {Kind.F: "forward", Kind.B: "backward", Kind.I: "input_grad", Kind.W: "weight_grad"}


def cluster(ranks: int) -> Cluster:
    """With links that cost nothing to speak of."""
    return Cluster("c", (Device("d", 10**12),) * ranks, ranks, FREE, FREE)


def of_op(costs: Costs, phase: str, stage: int, micro_batch: int) -> float:
    """What stands there for one op."""
    entry = getattr(costs, phase)[stage]
    return entry[micro_batch] if isinstance(entry, tuple) else entry


def slow_seconds(profile, phase: str, lengths, stage: int, samples: float) -> float:
    """Layer by layer; the first stage has no gradient of its input to work out, and does all of its
    backward in one.
    """
    if stage == 0 and phase == "input_grad":
        return 0.0
    start = sum(lengths[:stage])
    measured_phase = "backward" if stage == 0 and phase == "weight_grad" else phase
    return sum(
        layer.seconds(measured_phase, samples)
        for layer in profile.layers[start : start + lengths[stage]]
    )


NAMES = ("1f1b", "gpipe", "zb-h1", "chimera", "pipedream")


@settings(max_examples=60, deadline=None)
@given(
    st.data(),
    profiles(4, 6, simple=False),
    st.sampled_from(NAMES),
    st.integers(1, 4),
    st.sampled_from([1, 2, (2, 1), (1, 3)]),
)
def test_every_op_takes_what_its_own_device_takes_for_its_layers(
    data, profile, name, micro_batches, replicas
):
    """Stages on unlike devices, and copies of one stage on unlike devices."""
    kinds = list(data.draw(unlike(profile)).values())
    try:
        case_schedule = schedule(name, 2, 2 * micro_batches, replicas=replicas)
    except ScheduleError:
        return
    devices = [
        kinds[i]
        for i in data.draw(
            st.lists(st.integers(0, 1), min_size=case_schedule.ranks, max_size=case_schedule.ranks)
        )
    ]
    lengths = (1, len(profile) - 1)
    costs = stage_costs(
        devices[0],
        lengths,
        1.5,
        cluster(case_schedule.ranks),
        micro_batches=case_schedule.micro_batches,
    )
    placed = on_devices(costs, case_schedule, devices, lengths, 1.5)
    for rank, program in enumerate(case_schedule.programs):
        for op in program:
            if op.kind in PHASE_OF:
                expected = slow_seconds(devices[rank], PHASE_OF[op.kind], lengths, op.stage, 1.5)
                assert of_op(placed, PHASE_OF[op.kind], op.stage, op.micro_batch) == pytest.approx(
                    expected
                )
    assert (
        replace(
            placed, **{phase: getattr(costs, phase) for phase in (*PHASE_OF.values(), "update")}
        )
        == costs
    ), "bytes are the model's"


def test_ranks_alike_leave_the_costs_as_they_are(profile_of):
    """The common case costs nothing."""
    profile = profile_of([1.0, 2.0])
    costs = stage_costs(profile, [1, 1], 1, cluster(2), micro_batches=2)
    assert on_devices(costs, schedule("1f1b", 2, 2), [profile] * 2, [1, 1], 1) is costs


def test_a_stage_on_a_device_twice_as_fast_takes_half(profile_of):
    """By hand: F 1 and 1 s, B 2 and 2 s, for layers of 1 and 2 s."""
    profile = profile_of([1.0, 2.0])
    costs = schedule_costs(
        schedule("gpipe", 2, 2),
        [profile, scale_profile(profile, 0.5)],
        [1, 1],
        cluster(2),
        2,
        weight_rule("flush"),
    )
    assert (costs.forward, costs.backward) == ((1, 1), (2, 2))
    assert simulate_schedule(schedule("gpipe", 2, 2), costs).makespan == pytest.approx(9)


def test_copies_on_unlike_devices_have_seconds_by_micro_batch_and_the_slowest_s_update(profile_of):
    """Micro-batch n is on copy n mod 2; they update together."""
    profile = replace(profile_of([1.0], parameters=100), update_s_per_byte=0.01)
    case_schedule = Schedule.parse("rank 0 | 0F0 0B0 0F2 0B2 0U1\nrank 1 | 0F1 0B1 0U1")
    costs = stage_costs(profile, [1], 1, cluster(2), micro_batches=3)
    placed = on_devices(costs, case_schedule, [profile, scale_profile(profile, 3.0)], [1], 1)
    assert placed.forward == ((1.0, 3.0, 1.0),)
    assert placed.update == (3.0,)
    # Rank 0: two micro-batches of 3 s; rank 1: one of 9 s; and an update of 3 s.
    assert simulate_schedule(case_schedule, placed).makespan == pytest.approx(12)


@pytest.mark.parametrize("paces", [(1.0, 3.0), (3.0, 1.0)])
def test_slices_take_what_their_own_device_takes(profile_of, paces):
    """Each half of a micro-batch costs what a micro-batch of half the size does, on the device of
    its stage.
    """
    profile = profile_of([1.0, 2.0], fixed=0.5)
    devices = [scale_profile(profile, pace) for pace in paces]
    halves = schedule("autopipe", 2, 2, sliced=2)
    costs = schedule_costs(halves, devices, [1, 1], cluster(2), 4, weight_rule("flush"))
    for stage, device in enumerate(devices):
        assert costs.forward[stage] == pytest.approx(
            (2 * device.layers[stage].seconds("forward", 1),) * 2
        )


def test_slices_of_several_pipelines_take_what_each_one_s_device_takes(profile_of):
    """Micro-batch n is in pipeline n mod 2."""
    profile = profile_of([1.0, 2.0], fixed=0.5)
    slow = scale_profile(profile, 4.0)
    case_schedule = schedule("autopipe", 2, 2, sliced=1, replicas=2)
    costs = schedule_costs(
        case_schedule, [profile, profile, slow, slow], [1, 1], cluster(4), 4, weight_rule("flush")
    )
    assert costs.forward[1] == pytest.approx(
        tuple(
            2 * device_profile.layers[1].seconds("forward", 1) for device_profile in (profile, slow)
        )
    )


@pytest.fixture
def profile_of():
    """Seconds per sample and layer, backward twice forward."""
    from penstock.profile.profile import LayerProfile, Profile, Timing

    def make(seconds, fixed=0.0, parameters=0):
        def line(per_sample):
            return Timing((1, 16), (fixed + per_sample, fixed + 16 * per_sample))

        layers = (
            LayerProfile(
                f"l{i}", "L", line(s), line(2 * s), line(s), line(s), 1, parameters, 0, 1.0, 1.0
            )
            for i, s in enumerate(seconds)
        )
        return Profile(tuple(layers), "abc", 1.0, 16)

    return make


@pytest.mark.parametrize(("order", "entries"), [((0, 0, 1), (1.0, 6.0)), ((1, 1, 0), (3.0, 2.0))])
def test_replicas_on_equal_devices_have_one_number(profile_of, order, entries):
    """Only stages whose own replicas differ have seconds by micro-batch."""
    profile = profile_of([1.0, 2.0])
    kinds = [profile, scale_profile(profile, 3.0)]
    case_schedule = schedule("1f1b", 2, 4, replicas=(2, 1))
    costs = stage_costs(profile, [1, 1], 1, cluster(3), micro_batches=4)
    placed = on_devices(costs, case_schedule, [kinds[kind] for kind in order], [1, 1], 1)
    assert placed.forward == entries
