"""HetPipe's planner: virtual workers, their orders, and the cut."""

from dataclasses import replace
from itertools import accumulate, permutations
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.search.planners.cutters import cuts
from tests.search.planners.cutters import profile as random_profile

from penstock.cluster.cluster import Cluster
from penstock.cluster.device import Device, Link
from penstock.errors import PlanError
from penstock.search.catalogue import plan
from penstock.search.planners.hetpipe_allocation import allocations, orders

#: The paper's four kinds: TITAN V, TITAN RTX, RTX 2060, Quadro P4000; memory and speed.
KINDS = {"V": (12, 15e12), "R": (24, 16e12), "G": (6, 6.5e12), "Q": (8, 5.3e12)}


def cluster_of(names, per_node=4, unit=10**9, bandwidth=1e9):
    """Devices of these kinds in this order."""
    devices = tuple(
        Device(name, KINDS[name][0] * unit, flops=(("float32", KINDS[name][1]),)) for name in names
    )
    return Cluster("c", devices, per_node, Link(1e-5, bandwidth), Link(3e-5, bandwidth / 2))


def kinds(cluster, allocation):
    """The kinds in each virtual worker, as text."""
    return [
        "".join(sorted(cluster.devices[rank].name for rank in worker_devices))
        for worker_devices in allocation
    ]


PAPER = cluster_of("VVVVRRRRGGGGQQQQ")
SPEEDS = [1 / KINDS[device.name][1] for device in PAPER.devices]


def test_the_papers_policies_make_its_virtual_workers():
    """NP: a node each. ED: one of each kind. HD: the fast with the slow, VVQQ and RRGG."""
    kinds_of_policy = {}
    for policy, allocation in allocations(PAPER, SPEEDS, 40):
        kinds_of_policy.setdefault(policy, kinds(PAPER, allocation))
    assert kinds_of_policy["node partition"] == ["VVVV", "RRRR", "GGGG", "QQQQ"]
    assert kinds_of_policy["equal distribution"] == ["GQRV"] * 4
    assert sorted(kinds_of_policy["hybrid distribution"]) == ["GGVV", "GGVV", "QQRR", "QQRR"]


def test_every_allocation_uses_every_device_once_in_virtual_workers_of_equal_size():
    """Whatever the policy: the schedule has copies of equal length."""
    for _, allocation in allocations(PAPER, SPEEDS, 40):
        assert sorted(rank for worker_devices in allocation for rank in worker_devices) == list(
            range(16)
        )
        assert len({len(worker_devices) for worker_devices in allocation}) == 1


def test_no_virtual_worker_has_more_devices_than_there_are_layers():
    """Each of them needs a stage."""
    assert {len(allocation[0]) for _, allocation in allocations(PAPER, SPEEDS, 4)} == {4}


def test_virtual_workers_with_equal_devices_are_tried_in_every_order_alike():
    """4! orders of four kinds, the same for all, since they share one cut."""
    allocation = next(
        workers
        for policy, workers in allocations(PAPER, SPEEDS, 4)
        if policy == "equal distribution"
    )
    all_orders = orders(PAPER, allocation, SPEEDS)
    names = {
        tuple(PAPER.devices[rank].name for rank in worker_devices)
        for order in all_orders
        for worker_devices in order
    }
    assert names == set(permutations("VRGQ"))
    assert all(
        len(
            {tuple(PAPER.devices[rank].name for rank in worker_devices) for worker_devices in order}
        )
        == 1
        for order in all_orders
    )


def test_with_too_many_orders_those_by_memory_and_speed_are_tried():
    """Sixteen devices in one virtual worker have 63 million orders."""
    all_orders = orders(PAPER, (tuple(range(16)),), SPEEDS)
    assert 2 <= len(all_orders) <= 4


def objective(profile, cluster, chosen_plan, lengths=None):
    """The slowest stage of any virtual worker, computing and receiving, shared by them all; no
    memory asked. With `lengths` for the stages in place of the plan's.
    """
    stages, samples = chosen_plan.stages, chosen_plan.batch / chosen_plan.micro_batches
    devices = chosen_plan.devices or tuple(range(chosen_plan.ranks))
    ends = list(accumulate(lengths or chosen_plan.lengths, initial=0))
    slowest = 0.0
    for first in range(0, len(devices), stages):
        worker_devices = devices[first : first + stages]
        for stage, rank in enumerate(worker_devices):
            factor = KINDS[cluster.devices[0].name][1] / KINDS[cluster.devices[rank].name][1]
            layers = profile.layers[ends[stage] : ends[stage + 1]]
            stage_s = factor * sum(
                layer.seconds("forward", samples) + layer.seconds("backward", samples)
                for layer in layers
            )
            if stage:
                crossing = samples * profile.layers[ends[stage] - 1].output_bytes_per_sample
                stage_s += cluster.transfer_seconds(crossing, worker_devices[stage - 1], rank)
            if stage + 1 < stages:
                crossing = samples * layers[-1].output_bytes_per_sample
                stage_s += cluster.transfer_seconds(crossing, rank, worker_devices[stage + 1])
            slowest = max(slowest, stage_s)
    return chosen_plan.micro_batches * slowest / (len(devices) // stages)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_the_objective_is_the_slowest_stage_shared_by_the_virtual_workers(profile_of, asynchronous):
    """Computing on the very device and receiving, from the plan alone."""
    profile, cluster = (
        profile_of([1e-3, 2e-3, 1e-3, 3e-3, 1e-3, 1e-3]),
        cluster_of("VVGG", 2, 10**12),
    )
    chosen_plan = plan(profile, cluster, 64, planner="hetpipe", asynchronous=asynchronous)
    assert chosen_plan.objective.value == pytest.approx(objective(profile, cluster, chosen_plan))
    assert chosen_plan.schedule_name == ("hetpipe" if asynchronous else "1f1b")


def fits(profile, cluster, chosen_plan, lengths):
    """Whether the stages fit in every virtual worker: stage s of S holds weights, gradients and
    momenta, and the activations of S - s micro-batches.
    """
    samples, ends = -(-chosen_plan.batch // chosen_plan.micro_batches), [0, *accumulate(lengths)]
    for place, rank in enumerate(chosen_plan.devices or range(chosen_plan.ranks)):
        stage = place % chosen_plan.stages
        layers = profile.layers[ends[stage] : ends[stage + 1]]
        held = 3 * sum(layer.parameter_bytes for layer in layers)
        saved = samples * sum(layer.activation_bytes_per_sample for layer in layers)
        if held + (chosen_plan.stages - stage) * saved > cluster.devices[rank].memory_bytes:
            return False
    return True


@settings(max_examples=25, deadline=None)
@given(
    blocks=st.lists(
        st.tuples(
            st.floats(0.001, 0.02),  # seconds of a forward
            st.floats(1.0, 100_000.0),  # bytes of the output
            st.sampled_from([100.0, 2_000.0]),  # of the activations
            st.sampled_from([100, 20_000]),  # of the weights
        ),
        min_size=2,
        max_size=7,
    ),
    names=st.sampled_from(["VG", "GVQ", "VVGG", "VQRG"]),
    unit=st.sampled_from([10**9, 12_000]),
)
def test_no_cut_that_fits_has_a_faster_slowest_stage(blocks, names, unit):
    """Against all cuts, for the virtual workers and the order of devices of the plan."""
    seconds, output, activation, parameters = map(list, zip(*blocks, strict=True))
    costs = random_profile(
        [(f, 2 * f) for f in seconds],
        output=output,
        activation=activation,
        parameter_bytes=parameters,
        batch=8,
    )
    costs = replace(costs, device=names[0])
    cluster = cluster_of(names, per_node=len(names), unit=unit, bandwidth=1e7)
    try:
        chosen_plan = plan(costs, cluster, 8, planner="hetpipe", micro_batches=8, recompute="never")
    except PlanError:
        chosen_plan = None
    if chosen_plan is None:  # not with one virtual worker of all devices either, in any order
        whole = SimpleNamespace(batch=8, micro_batches=8, stages=len(names), ranks=len(names))
        for whole.devices in permutations(range(len(names))):
            everywhere = cuts(len(blocks), len(names))
            assert not any(fits(costs, cluster, whole, lengths) for lengths in everywhere)
        return
    values = [
        objective(costs, cluster, chosen_plan, lengths)
        for lengths in cuts(len(blocks), chosen_plan.stages)
        if fits(costs, cluster, chosen_plan, lengths)
    ]
    assert fits(costs, cluster, chosen_plan, chosen_plan.lengths)
    assert chosen_plan.objective.value == pytest.approx(min(values))


def test_the_slow_device_gets_the_shorter_stage(profile_of):
    """Equal distribution of two kinds: each virtual worker has one of both."""
    chosen_plan = plan(
        profile_of([1e-3] * 12, output=1.0),
        cluster_of("VVGG", 2, 10**12),
        64,
        planner="hetpipe",
        stages=2,
    )
    names = [cluster_of("VVGG", 2).devices[rank].name for rank in chosen_plan.devices[:2]]
    lengths = dict(zip(names, chosen_plan.lengths, strict=True))
    assert lengths["V"] > lengths["G"]


def test_early_stages_stand_where_the_memory_is(profile_of):
    """More micro-batches are in flight on them: with activations that fill it, the device with more
    memory comes first.
    """
    profile = profile_of([1e-3] * 8, activation=1000.0, parameters=1, output=1.0)
    chosen_plan = plan(
        profile,
        cluster_of("RG", 1, unit=2_100),
        16,
        planner="hetpipe",
        stages=2,
        micro_batches=4,
        recompute="never",
    )
    assert [cluster_of("RG", 1).devices[rank].name for rank in (chosen_plan.devices or (0, 1))] == [
        "R",
        "G",
    ]


def test_as_many_are_in_flight_as_fit(profile_of):
    """N_m falls where memory does not hold p of them."""
    profile = profile_of([1e-3] * 4, activation=1000.0, parameters=1, output=1.0)
    options = {
        "planner": "hetpipe",
        "stages": 4,
        "micro_batches": 1,
        "asynchronous": True,
        "recompute": "never",
    }
    roomy = plan(profile, cluster_of("VVVV", 4, unit=10**6), 4, **options)
    tight = plan(profile, cluster_of("VVVV", 4, unit=1_000), 4, **options)
    assert dict(roomy.schedule_options)["in_flight"] == 4
    assert dict(tight.schedule_options)["in_flight"] < 4


def test_stages_that_no_allocation_has_are_refused(profile_of):
    """Four nodes of four make virtual workers of 4, 8 or 16."""
    with pytest.raises(PlanError, match="hetpipe finds no virtual workers of 5 devices on c"):
        plan(profile_of([1e-3] * 8), PAPER, 16, planner="hetpipe", stages=5)
