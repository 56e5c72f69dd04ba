"""Piper's search against all stages, copies and recomputations."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.search.planners.cutters import ask, bounds, profile, shared

from penstock.errors import PlanError
from penstock.search.planners.piper import piper


def tps(request, micro_batches, lengths, copies, recompute):
    """The slowest stage's time per micro-batch, by the formula of the docstring; infinite where
    memory does not suffice.
    """
    costs, samples = request.profile, request.batch / micro_batches
    bandwidth = request.cluster.link(0, request.cluster.ranks - 1).bandwidth_bytes_per_s
    room = request.memory_bytes(0)
    forward, total = costs.seconds("forward", samples), costs.step_seconds(samples)
    into = [0.0, *(samples * layer.output_bytes_per_sample for layer in costs)]
    into[-1] = 0.0
    slowest = 0.0
    for stage, ((a, b), d) in enumerate(zip(bounds(lengths), copies, strict=True)):
        if micro_batches % d:
            return math.inf
        weights = sum(layer.parameter_bytes for layer in costs.layers[a:b])
        activations = samples * sum(
            layer.activation_bytes_per_sample for layer in costs.layers[a:b]
        )
        stage_bytes = 3 * weights
        in_flight = math.ceil((len(lengths) - stage) / d)
        first = samples * (
            costs.input_bytes_per_sample if a == 0 else costs.layers[a - 1].output_bytes_per_sample
        )
        stage_bytes += activations + in_flight * first if recompute else in_flight * activations
        if stage_bytes > room:
            return math.inf
        work = sum(total[a:b]) + (sum(forward[a:b]) if recompute else 0.0)
        slowest = max(
            slowest,
            (work + (2 * (into[a] + into[b]) + 4 * (d - 1) * weights / micro_batches) / bandwidth)
            / d,
        )
    return slowest


@settings(max_examples=25, deadline=None)
@given(
    blocks=st.lists(
        st.tuples(st.floats(0.001, 0.02), st.integers(0, 40_000_000)), min_size=1, max_size=5
    ),
    devices=st.integers(1, 4),
    room=st.sampled_from([2**40, 150_000_000, 90_000_000]),
    recompute=st.sampled_from(["never", "always"]),
)
def test_no_stages_have_a_faster_slowest_one(blocks, devices, room, recompute):
    """Against all of them: cuts, devices, and what memory allows."""
    costs = profile(
        [(f, 2 * f) for f, _ in blocks],
        parameter_bytes=[bytes_ for _, bytes_ in blocks],
        output=[1e5] * len(blocks),
        activation=[5e6] * len(blocks),
        batch=8,
    )
    request = ask(
        costs,
        f"{devices}xV100-10GbE",
        batch=8,
        micro_batches=4,
        recompute=recompute,
        memory_limit=room,
    )
    best = min(tps(request, 4, *way, recompute == "always") for way in shared(len(blocks), devices))
    try:
        chosen_plan, refusal = piper(request), ""
    except PlanError as error:
        chosen_plan, refusal = None, str(error)
    if chosen_plan is None:
        # What fits by Piper's count may lack a byte by the simulator's: then it says what is
        # needed.
        assert best == math.inf or "nothing fits the memory" in refusal
        return
    copies = tuple(len(ranks) for ranks in chosen_plan.schedule.ranks_of_stage)
    assert chosen_plan.objective.value == pytest.approx(best)
    assert tps(request, 4, chosen_plan.lengths, copies, recompute == "always") == pytest.approx(
        best
    )


def test_a_heavy_front_gets_more_devices_and_a_heavy_back_one():
    """VGG's shape on a slow link: all convolutions replicated, the fully connected layers on one
    device.
    """
    costs = profile(
        [(0.03, 0.06)] * 6 + [(0.05, 0.1)],
        parameter_bytes=[1000] * 6 + [500_000_000],
        output=[1000.0] * 7,
    )
    chosen_plan = piper(ask(costs, "4xV100-10GbE", micro_batches=12))
    assert chosen_plan.lengths == (6, 1)
    assert [len(ranks) for ranks in chosen_plan.schedule.ranks_of_stage] == [3, 1]


def test_recomputation_is_chosen_where_memory_asks_for_it():
    """Both plans are searched; only the one with recomputation fits."""
    costs = profile([(0.01, 0.02)] * 4, activation=[100e6] * 4, output=[1e3] * 4)
    roomy, tight = (
        piper(ask(costs, "2xV100-10GbE", micro_batches=8, max_replicas=1, memory_limit=limit))
        for limit in (16 * 10**9, 10**9)
    )
    assert (roomy.recompute, tight.recompute) == ("never", "always")


def test_too_large_a_search_is_refused():
    """With what would make it small enough."""
    with pytest.raises(PlanError, match=r"piper's search is for layers\^2 x devices up to 5e\+06"):
        piper(ask(profile([(0.1, 0.2)] * 100, batch=2048), "128x8xV100-NVLink-25GbE", batch=2048))
