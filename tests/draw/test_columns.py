"""Time shares of kinds per column."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.draw.columns import Spans, column_shares
from penstock.draw.draw import unit_timeline
from penstock.draw.facts import kinds_in
from penstock.schedule.catalogue import schedule
from penstock.schedule.op import Kind
from penstock.simulate.costs import Costs
from penstock.simulate.simulate import simulate_schedule


@given(st.sampled_from(["1f1b", "zb-h1", "dualpipe"]), st.integers(1, 97))
@settings(deadline=None, max_examples=30)
def test_all_the_work_of_a_rank_is_in_its_columns_once(name, count):
    """A sum that lost time would show idle ranks that are busy."""
    timeline = simulate_schedule(schedule(name, stages=4, micro_batches=8), Costs(forward=0.7))
    for rank in range(4):
        work, longest = column_shares(
            Spans.of(timeline, rank), kinds_in([timeline]), count, timeline.makespan / count
        )
        assert sum(map(np.sum, work.values())) * timeline.makespan / count == pytest.approx(
            timeline.busy[rank]
        )
        assert max(map(np.max, work.values())) < 1 + 1e-9
        assert (longest <= sum(work.values()) + 1e-9).all()


def test_an_op_over_many_columns_fills_them():
    """The op takes all of the time between its first and last column."""
    timeline = unit_timeline(schedule("naive", stages=2, micro_batches=1))
    work, longest = column_shares(Spans.of(timeline, 0), [Kind.B], 12, 0.5)
    assert work[Kind.B].tolist() == [0] * 8 + [1] * 4
    assert longest.tolist() == [1, 1] + [0] * 6 + [1] * 4
