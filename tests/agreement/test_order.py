"""Simulation and run agree: the same ops in the same order on every rank, with the same
micro-batches in flight.
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.conformance.catalogue import EVERY
from tests.conformance.models import CASES, lengths_of, made
from tests.conformance.random_programs import random_schedules
from tests.conformance.reference import layers_of

import penstock as ps


def orders(timeline):
    """Every rank's ops in the order of their times."""
    return [
        [str(event.op) for event in timeline.compute if event.rank == rank]
        for rank in range(timeline.ranks)
    ]


def check_agreement(schedule, recompute="never"):
    """Run the schedule, simulate it, and hold the two timelines against each other."""
    case = CASES["mlp"]
    model, x, y = made(case)
    pipe = ps.Pipeline(
        model,
        loss=case.loss,
        balance=lengths_of(len(layers_of(model)), schedule.stages),
        schedule=schedule,
        recompute=recompute,
        executor="threads",
    )
    try:
        pipe.train_batch(x, y)
        measured = pipe.timeline()
    finally:
        pipe.close()
    simulated = ps.simulate(schedule, ps.Costs(forward=1.0, backward=2.0, update=0.1))
    assert orders(measured) == orders(simulated)
    assert measured.peak_in_flight == simulated.peak_in_flight
    assert (measured.ranks, measured.stages) == (simulated.ranks, simulated.stages)
    assert (measured.source, simulated.source) == ("measured", "simulated")


@pytest.mark.parametrize("name", EVERY)
def test_measured_order_equals_simulated_order(name):
    """The runtime executes the program op by op, so the order in a simulation is that of the run."""
    check_agreement(EVERY[name])


@given(random_schedules(), st.sampled_from(["never", "always"]))
@settings(deadline=None, max_examples=30)
def test_measured_order_equals_simulated_order_for_any_schedule(schedule, recompute):
    """This holds also for schedules that are not in the catalogue."""
    check_agreement(schedule, recompute)
