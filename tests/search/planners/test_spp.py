"""SPP's partition and plan against all stages and copies."""

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.search.planners.cutters import ask, bounds, profile, shared

from penstock.cluster.cluster import cluster
from penstock.errors import PlanError
from penstock.search.planners.layer_costs import LayerCosts
from penstock.search.planners.spp import execution_s, spp
from penstock.search.planners.spp_cut import Loads, least_load
from penstock.search.planners.spp_execution import makespan
from penstock.simulate.gradient_sync import all_reduce_seconds


def parts(request, count, order, lengths, copies):
    """Forward, backward and sync of every stage, and one way of every channel, from the profile and
    the cluster alone.
    """
    costs, samples, target = request.profile, request.batch / count, request.cluster
    forward, backward, sync, groups = [], [], [], []
    for (a, b), r in zip(bounds(lengths), copies, strict=True):
        groups.append(order[sum(map(len, groups)) :][:r])
        forward.append(sum(costs.seconds("forward", samples)[a:b]) / r)
        backward.append(sum(costs.seconds("backward", samples)[a:b]) / r)
        weights = sum(layer.parameter_bytes for layer in costs.layers[a:b])
        sync.append(all_reduce_seconds(groups[-1], weights, target) if weights else 0.0)
    channel = []
    for one, other, (_, end) in zip(groups, groups[1:], bounds(lengths), strict=False):
        links = [target.link(x, y) for x in one for y in other]
        crossing = samples * costs.layers[end - 1].output_bytes_per_sample
        lanes = min(len(one), len(other))
        channel.append(
            max(link.latency_s for link in links)
            + crossing / lanes / min(link.bandwidth_bytes_per_s for link in links)
        )
    return forward, backward, channel, sync


def load(request, count, order, lengths, copies):
    """What PRM makes least."""
    forward, backward, channel, sync = parts(request, count, order, lengths, copies)
    stages = [f + b + s / count for f, b, s in zip(forward, backward, sync, strict=True)]
    return max([*stages, *(2 * hop for hop in channel)])


@settings(max_examples=20, deadline=None)
@given(
    blocks=st.lists(
        st.tuples(st.floats(0.001, 0.02), st.integers(0, 40_000_000), st.floats(1e4, 1e7)),
        min_size=1,
        max_size=5,
    ),
    where=st.sampled_from(["1xV100-NVLink", "3xV100-10GbE", "2x2xV100-NVLink-10GbE"]),
)
def test_no_stages_have_less_load_for_their_number(blocks, where):
    """Against all of them, on all devices, for every number of stages."""
    costs = profile(
        [(f, 2 * f) for f, _, _ in blocks],
        parameter_bytes=[bytes_ for _, bytes_, _ in blocks],
        output=[out for *_, out in blocks],
        batch=8,
    )
    request = ask(costs, where, batch=8)
    order = tuple(range(request.cluster.ranks))
    loads = Loads(LayerCosts.of(costs, 1.0), request.cluster, order, 8, len(order))
    by_count = least_load(loads, min(len(order), len(blocks)))
    for stages in range(1, min(len(order), len(blocks)) + 1):
        ways = [
            way
            for way in shared(len(blocks), len(order))
            if len(way[0]) == stages and sum(way[1]) == len(order)
        ]
        best = min(load(request, 8, order, *way) for way in ways)
        value, way = by_count[stages]
        assert value == pytest.approx(best)
        assert load(request, 8, order, *zip(*way, strict=True)) == pytest.approx(best)


@pytest.mark.parametrize("where", ["4xV100-NVLink", "4xV100-10GbE", "2x2xV100-NVLink-10GbE"])
def test_the_objective_is_the_list_schedules_makespan(where):
    """Of the plan's own stages, copies and devices; and no number of stages has less."""
    costs = profile(
        [(0.01 * (1 + i % 3), 0.03) for i in range(7)],
        parameter_bytes=[10**7] * 7,
        output=[1e5] * 7,
    )
    request = ask(costs, where, micro_batches=16)
    chosen_plan = spp(request)
    order = chosen_plan.devices or tuple(range(4))
    copies = tuple(len(ranks) for ranks in chosen_plan.schedule.ranks_of_stage)
    expected = makespan(*parts(request, 16, order, chosen_plan.lengths, copies), 16)
    assert chosen_plan.objective.value == pytest.approx(expected)
    loads = Loads(LayerCosts.of(costs, 2.0), request.cluster, order, 16, 4)
    assert chosen_plan.objective.value == pytest.approx(
        min(execution_s(loads, way) for _, way in least_load(loads, 4).values())
    )


def test_all_devices_are_used_and_neighbours_share_stages():
    """Devices dealt out over nodes in turn are put back together."""
    target = replace(cluster("2x2xV100-NVLink-10GbE"), node_of=(0, 1, 0, 1))
    chosen_plan = spp(
        ask(
            profile([(0.01, 0.02)] * 4, parameter_bytes=[10**8] * 4, output=[1e4] * 4),
            target,
            micro_batches=8,
        )
    )
    assert chosen_plan.devices == (0, 2, 1, 3)
    assert chosen_plan.ranks == 4


def test_too_many_devices_or_layers_are_refused():
    """The partition is for tens of both."""
    with pytest.raises(PlanError, match="spp's search is for devices up to 32, and here are 64"):
        spp(ask(profile([(0.1, 0.2)] * 4), "8x8xV100-NVLink-25GbE"))
    with pytest.raises(PlanError, match="spp's search is for layers up to 256, and here are 300"):
        spp(ask(profile([(0.1, 0.2)] * 300), "2xV100-NVLink"))


def test_one_device_is_one_stage():
    """Nothing to order, cut or send."""
    chosen_plan = spp(ask(profile([(0.1, 0.2)] * 3), "1xV100-NVLink", micro_batches=4))
    assert chosen_plan.lengths == (3,)
    assert chosen_plan.objective.value == pytest.approx(32 * 0.9)
    assert math.isclose(chosen_plan.objective.value, chosen_plan.predicted.step_s)


def test_devices_that_have_no_layer_and_no_micro_batch_are_left_over():
    """Two layers and two micro-batches can use four devices of six."""
    chosen_plan = spp(ask(profile([(0.1, 0.2)] * 2), "6xV100-NVLink", micro_batches=2))
    assert chosen_plan.ranks <= 4
    assert spp(ask(profile([(0.1, 0.2)] * 3), "6xV100-NVLink", max_replicas=1)).ranks == 3
