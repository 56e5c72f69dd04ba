"""The papers' planners on whatever they may be asked: a sound plan that keeps to it, or a refusal
with words.
"""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.cluster.cluster import Cluster
from penstock.cluster.device import Device, Link
from penstock.errors import PlanError
from penstock.search.catalogue import PLANNERS
from penstock.search.request import PlanRequest
from penstock.verify.verify import verify

NAMES = ("pipedream", "dapple", "bapipe", "hetpipe", "data-parallel", "2bw")

amounts = st.sampled_from((0.0, 1e-4, 3e-3))
sizes = st.sampled_from((0, 1000, 10**6))


@st.composite
def clusters(draw):
    """Up to six devices of one or two kinds on nodes of several sizes."""
    ranks = draw(st.integers(1, 6))
    kinds = [
        Device(f"k{i}", memory, flops=(("float32", 1e12 * (i + 1)),))
        for i, memory in enumerate(
            draw(st.lists(st.sampled_from((10**7, 10**10)), min_size=1, max_size=2))
        )
    ]
    devices = tuple(kinds[i * len(kinds) // ranks] for i in range(ranks))
    link = draw(st.sampled_from((1e7, 1e9)))
    return Cluster("c", devices, draw(st.integers(1, 3)), Link(1e-5, 1e10), Link(1e-4, link))


asked = st.fixed_dictionaries(
    {},
    optional={
        "stages": st.integers(1, 3),
        "micro_batches": st.integers(1, 6),
        "max_replicas": st.integers(1, 3),
        "asynchronous": st.booleans(),
        "recompute": st.sampled_from(("never", "except_last", "always")),
    },
)


@pytest.mark.parametrize("name", NAMES)
@settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    st.lists(st.tuples(amounts, sizes, sizes, sizes), min_size=1, max_size=6),
    clusters(),
    st.integers(1, 12),
    asked,
)
def test_a_planner_keeps_to_what_is_asked_or_says_why_not(
    profile_of, name, rows, cluster, batch, asked
):
    """The plan is sound, fits, uses no device twice, has its paper's objective, and the numbers
    that were asked for.
    """
    seconds, activation, output, parameters = (list(column) for column in zip(*rows, strict=True))
    profile = profile_of(seconds, activation=activation, output=output, parameters=parameters)
    try:
        request = PlanRequest(profile, cluster, batch, **asked)
        chosen_plan = PLANNERS.find(name).make(request)
    except PlanError:
        return
    chosen_plan.check()
    verify(chosen_plan.schedule)
    devices = chosen_plan.devices or tuple(range(chosen_plan.ranks))
    assert len(set(devices)) == chosen_plan.ranks
    assert all(
        peak <= request.memory_bytes(device)
        for peak, device in zip(chosen_plan.predicted.peak_memory, devices, strict=True)
    )
    assert chosen_plan.objective is not None
    assert chosen_plan.objective.value >= 0
    assert chosen_plan.stages == asked.get("stages", chosen_plan.stages)
    assert chosen_plan.micro_batches == asked.get("micro_batches", chosen_plan.micro_batches)
    assert max(map(len, chosen_plan.schedule.ranks_of_stage)) <= asked.get(
        "max_replicas", cluster.ranks
    )
    assert chosen_plan.synchronous or asked.get("asynchronous")
