"""Alpa's search against all stages on all submeshes."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.search.planners.cutters import ask, bounds, profile, shared

from penstock.errors import PlanError
from penstock.search.planners.alpa import alpa, submeshes


def latency(request, micro_batches, lengths, sizes, *, everyone=True):
    """Sum of t + (B - 1) max t, by the formula of the docstring; infinite where it may not be."""
    costs, samples, target = request.profile, request.batch / micro_batches, request.cluster
    if (
        (everyone and sum(sizes) != target.ranks)
        or not set(sizes) <= set(submeshes(target))
        or max(sizes) > micro_batches
    ):
        return math.inf
    total, times = costs.step_seconds(samples), []
    for stage, ((a, b), n) in enumerate(zip(bounds(lengths), sizes, strict=True)):
        weights = sum(layer.parameter_bytes for layer in costs.layers[a:b])
        activations = samples * sum(
            layer.activation_bytes_per_sample for layer in costs.layers[a:b]
        )
        if 3 * weights + (len(lengths) - stage) * activations / n > request.memory_bytes(0):
            return math.inf
        link = target.link(0, n - 1)
        rounds, piece = (1, weights) if n == 2 else (2 * (n - 1), weights / n)
        met = rounds * link.transfer_seconds(piece) if n > 1 and weights else 0.0
        times.append(sum(total[a:b]) / n + met / micro_batches)
    return sum(times) + (micro_batches - 1) * max(times)


@settings(max_examples=25, deadline=None)
@given(
    blocks=st.lists(
        st.tuples(st.floats(0.001, 0.02), st.integers(0, 40_000_000)), min_size=1, max_size=5
    ),
    where=st.sampled_from(
        ["1xV100-NVLink", "2xV100-NVLink", "4xV100-NVLink", "2x2xV100-NVLink-10GbE"]
    ),
    room=st.sampled_from([2**40, 150_000_000]),
    count=st.sampled_from([4, 8]),
)
def test_no_stages_on_submeshes_have_less_latency(blocks, where, room, count):
    """Against all of them."""
    costs = profile(
        [(f, 2 * f) for f, _ in blocks],
        parameter_bytes=[bytes_ for _, bytes_ in blocks],
        activation=[5e6] * len(blocks),
        batch=8,
    )
    request = ask(costs, where, batch=8, micro_batches=count, memory_limit=room)
    ways = list(shared(len(blocks), request.cluster.ranks))
    best = min(latency(request, count, *way) for way in ways)
    everyone = best < math.inf
    if not everyone:  # some devices are left over then
        best = min(latency(request, count, *way, everyone=False) for way in ways)
    try:
        chosen_plan, refusal = alpa(request), ""
    except PlanError as error:
        chosen_plan, refusal = None, str(error)
    if chosen_plan is None:
        assert best == math.inf or "nothing fits the memory" in refusal
        return
    sizes = tuple(len(ranks) for ranks in chosen_plan.schedule.ranks_of_stage)
    assert chosen_plan.objective.value == pytest.approx(best)
    assert latency(request, count, chosen_plan.lengths, sizes, everyone=everyone) == pytest.approx(
        best
    )


def test_submeshes_are_powers_of_two_in_a_node_or_whole_nodes():
    """Section 5.2's shapes: (1, 1), (1, 2), (1, 4), …, (1, M), (2, M), …"""
    assert submeshes(ask(profile([(1, 2)]), "4x8xV100-NVLink-25GbE").cluster) == [
        1,
        2,
        4,
        8,
        16,
        24,
        32,
    ]
    assert submeshes(ask(profile([(1, 2)]), "8xV100-10GbE").cluster) == [1, 2, 3, 4, 5, 6, 7, 8]


def test_a_stage_on_several_devices_has_them_in_one_node():
    """A submesh inside a node uses its links; ranks of the plan are placed so."""
    costs = profile([(0.01, 0.02)] * 3 + [(0.04, 0.08)], parameter_bytes=[10**7] * 4)
    request = ask(costs, "2x4xV100-NVLink-10GbE", micro_batches=16)
    chosen_plan = alpa(request)
    for ranks in chosen_plan.schedule.ranks_of_stage:
        nodes = {
            request.cluster.node(chosen_plan.devices[rank] if chosen_plan.devices else rank)
            for rank in ranks
        }
        assert len(nodes) == max(1, len(ranks) // 4)


def test_devices_that_no_submeshes_make_up_are_left_over():
    """One layer on six devices of a node, and four micro-batches: 1, 2 and 4 are submeshes, and the
    node, which is too many.
    """
    assert [
        len(r) for r in alpa(ask(profile([(0.1, 0.2)]), "6xV100-NVLink")).schedule.ranks_of_stage
    ] == [6]
    chosen_plan = alpa(
        ask(profile([(0.1, 0.2)], parameter_bytes=[0]), "6xV100-NVLink", micro_batches=4)
    )
    assert [len(ranks) for ranks in chosen_plan.schedule.ranks_of_stage] == [4]
