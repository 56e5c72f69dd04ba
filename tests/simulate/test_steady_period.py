"""The steady state is a period of the stream, not a mean that its end affects."""

from __future__ import annotations

import pytest

from penstock.schedule.catalogue import schedule
from penstock.simulate.costs import Costs
from penstock.simulate.steady_state import steady


@pytest.mark.parametrize("slow", [0, 1, 2])
def test_the_period_is_one_batch_whichever_stage_is_slowest(slow):
    """Where the stream drains, a slow first stage runs backwards without forwards between them:
    its last batches end faster than any in the steady state.
    """
    seconds = [2.0 if stage == slow else 1.0 for stage in range(3)]
    costs = Costs(forward=seconds, backward=[2 * s for s in seconds])
    state = steady(schedule("pipedream", 3, 2), costs)
    assert (state.seconds_per_batch, state.batches) == (12.0, 1)
