"""Numbers of micro-batches that a rank runs of a batch."""

from __future__ import annotations

import pytest

from penstock.schedule.catalogue import schedule
from penstock.schedule.op import Schedule
from penstock.weights.batch_shares import shares_of_batches


@pytest.mark.parametrize(("custom_schedule", "shares"), [
    (schedule("pipedream", 3, 4), (4, 4)),
    (schedule("pipedream", 2, 4, replicas=2), (2, 2)),
    (schedule("pipedream", 2, 4, replicas=[2, 1]), (2, 4)),
    (schedule("hetpipe", 2, 3), (3, 3)),
    (schedule("1f1b", 2, 5), (5, 5)),
    (schedule("wpipe", 4, 3), (3, 3)),  # on each of the two stages of a rank
    (Schedule(()), (0, 0)),
])  # fmt: skip
def test_the_fewest_and_the_most_that_a_rank_runs_of_a_batch_on_a_stage(custom_schedule, shares):
    """Rules count what is in flight on a rank, not in all replicas together."""
    assert shares_of_batches(custom_schedule) == shares
