"""Plain and compiled kernels agree."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.simulate.slow import rich_schedules
from tests.simulate.test_everything import rich_costs

from penstock import compiled
from penstock.schedule.dependencies import dependencies_of
from penstock.schedule.recompute import Recompute
from penstock.simulate.costs import LINKS
from penstock.simulate.simulate import tables_of, times_of


@pytest.mark.parametrize("links", LINKS)
def test_plain_and_compiled_loops_agree_to_the_bit(links, monkeypatch):
    """They are one source; were one to add in another order, a timeline would depend on what ran
    before it.
    """

    @given(st.data(), st.booleans())
    @settings(deadline=None, max_examples=30)
    def check(data, overlap):
        case_schedule = data.draw(rich_schedules())
        costs = data.draw(rich_costs(case_schedule, links=[links], amounts=st.floats(0, 9)))
        times = []
        for is_worth in (True, False):
            monkeypatch.setattr(compiled, "is_worth_compiling", lambda *_, answer=is_worth: answer)
            case_schedule.__dict__.pop("_dependencies", None)
            tables = tables_of(case_schedule, costs, Recompute.ALWAYS)
            times.append(
                [
                    dependencies_of(case_schedule).graph.order,
                    *times_of(tables, tables.seconds[0], overlap, links, costs.network),
                ]
            )
        assert all(map(np.array_equal, *times))

    check()
