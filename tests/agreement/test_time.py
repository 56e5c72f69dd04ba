"""Simulated time against the clock, with layers that take a known time. This is the one place where
layers sleep.
"""

from __future__ import annotations

import pytest
import torch
from tests.agreement.sleeping import Sleepy
from torch import nn

import penstock as ps
from penstock.schedule.op import Schedule

#: Measured seconds / simulated seconds. A sleep is never too short, so below 1 is only the clocks'
#: rounding; above 1 are threads,
#: queues and whatever else the machine does: 1.05 when it is idle, 2.1 beside 8 busy processes on 2
#: cores. Tighten it, never widen.
BAND = (0.99, 2.0)
#: On a busy machine the next batch may be the quiet one: the best of at most so many counts.
BATCHES = 25

SPLIT = """
rank 0 | 0F0 0F1 0I0 0F2 0I1 0F3 0I2 0I3 0W0 0W1 0W2 0W3 0U1
rank 1 | 1F0 1I0 1F1 1I1 1F2 1I2 1F3 1I3 1W0 1W1 1W2 1W3 1U1
"""


def measured_and_simulated(schedule, forward, input_grad, weight_grad, recompute, monkeypatch):
    """Timelines of a batch that nothing disturbed, if there is one, and of the simulation with the
    same seconds.
    """
    # Layers that may draw random numbers have the generators to themselves, one thread at a time;
    # these draw none.
    monkeypatch.setattr("penstock.stage.stage_random.may_draw", lambda module: False)
    monkeypatch.setattr("penstock.stage.stage_random.runs_user_code", lambda module: False)
    layers = [Sleepy(*seconds) for seconds in zip(forward, input_grad, weight_grad, strict=True)]
    pipe = ps.Pipeline(
        nn.Sequential(*layers),
        loss=lambda out, _: out.mean(),
        balance=[1] * len(layers),
        schedule=schedule,
        recompute=recompute,
        executor="threads",
    )
    x = torch.ones(schedule.micro_batches, 1)
    # The first stage has no input gradient to make.
    costs = ps.Costs(forward=forward, input_grad=[0.0, *input_grad[1:]], weight_grad=weight_grad)
    simulated = ps.simulate(schedule, costs, recompute=recompute)
    for _ in range(BATCHES):
        pipe.train_batch(x, x)
        measured = pipe.timeline()
        if max(ratios(measured, simulated)) <= BAND[1]:
            break
    pipe.close()
    return measured, simulated


def ratios(measured, simulated):
    """Measured / simulated: the makespan, and every rank's time at work."""
    pairs = zip(
        (measured.makespan, *measured.busy), (simulated.makespan, *simulated.busy), strict=True
    )
    return [seconds / predicted for seconds, predicted in pairs]


@pytest.mark.parametrize(
    ("schedule", "forward", "input_grad", "weight_grad", "recompute"),
    [
        (ps.schedule("gpipe", 3, 4), [0.008] * 3, [0.008] * 3, [0.008] * 3, "never"),
        (ps.schedule("1f1b", 3, 4), [0.008] * 3, [0.008] * 3, [0.008] * 3, "never"),
        (
            ps.schedule("1f1b", 3, 4),
            [0.006, 0.010, 0.006],
            [0.008] * 3,
            [0.006, 0.008, 0.008],
            "always",
        ),
        (ps.schedule("naive", 2, 3), [0.008, 0.010], [0.008] * 2, [0.008] * 2, "never"),
        (Schedule.parse(SPLIT, "split"), [0.008] * 2, [0.008] * 2, [0.008] * 2, "never"),
    ],
    ids=["gpipe", "1f1b", "1f1b uneven, recomputed", "naive", "I and W"],
)
def test_measured_makespan_is_within_the_band_of_the_simulated_one(
    schedule, forward, input_grad, weight_grad, recompute, monkeypatch
):
    """A prediction needs a comparison with a measurement."""
    measured, expected = measured_and_simulated(
        schedule, forward, input_grad, weight_grad, recompute, monkeypatch
    )
    low, high = BAND
    assert all(low <= ratio <= high for ratio in ratios(measured, expected)), ratios(
        measured, expected
    )
    assert (measured.ranks, measured.stages) == (expected.ranks, expected.stages)
