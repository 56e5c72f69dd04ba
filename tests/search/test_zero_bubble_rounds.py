"""Round by round: every style makes sound programs, and its own clock is the simulator's."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.schedule.op import Schedule
from penstock.search.stage_seconds import StageSeconds
from penstock.search.zero_bubble_rounds import STYLES, Memory, draft
from penstock.simulate.costs import Costs
from penstock.simulate.simulate import simulate_schedule
from penstock.verify.verify import verify


@pytest.mark.parametrize("style", STYLES, ids=str)
@given(st.integers(1, 6), st.integers(1, 14), st.data())
@settings(deadline=None, max_examples=40)
def test_every_style_makes_sound_programs_and_knows_how_long_they_take(style, p, m, data):
    """The style is chosen by these seconds, so they must be those that the simulator finds.

    Hops take no longer than the shortest op, or messages would queue for a link, which the
    heuristic does not count.
    """

    def row(count, least=1, most=9):
        return data.draw(st.lists(st.integers(least, most), min_size=count, max_size=count))

    costs = Costs(
        forward=row(p), input_grad=row(p), weight_grad=row(p, 0), transfer=row(p - 1, 0, 1)
    )
    limits = row(p, 1, 2 * p)
    made = draft(
        StageSeconds.of(costs, m), m, Memory(limits, fraction_after_input_grad=[1.0] * p), style
    )
    schedule = Schedule(made.programs())
    line = simulate_schedule(schedule, costs)
    assert line.makespan == made.makespan_s
    ranks = [[event for event in line.compute if event.rank == rank] for rank in range(p)]
    assert made.spans_s == tuple(
        max(e.end for e in events) - min(e.start for e in events) for events in ranks
    )
    updated = Schedule.parse(
        "\n".join(f"{' '.join(map(str, ops))} {rank}U1" for rank, ops in enumerate(made.programs()))
    )
    assert all(
        held <= limit for held, limit in zip(verify(updated).peak_on_rank, limits, strict=True)
    )


def test_there_are_eight_styles():
    """Three questions with two answers each."""
    assert len(set(STYLES)) == 8
