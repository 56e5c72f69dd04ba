"""draw: timelines and schedules in every format."""

from __future__ import annotations

import json
from xml.etree import ElementTree as ET

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.draw.draw import draw, notebook_svg, unit_timeline
from penstock.errors import ScheduleError, SettingError
from penstock.schedule.catalogue import schedule
from penstock.schedule.op import Schedule
from penstock.simulate.costs import Costs
from penstock.simulate.simulate import simulate_schedule


@given(
    st.sampled_from(["gpipe", "1f1b", "naive", "fbp-as", "seq1f1b", "autopipe", "bpipe"]),
    st.integers(2, 6),
    st.integers(1, 12),
)
@settings(deadline=None, max_examples=30)
def test_every_schedule_is_drawn_in_every_format(name, stages, micro_batches):
    """Drawing knows no schedule by name, so it may fail on none."""
    example = schedule(name, stages=stages, micro_batches=micro_batches)
    rows = [line for line in draw(example).splitlines() if line.startswith("rank ")]
    assert len(rows) == stages
    assert len({len(row) for row in rows}) == 1
    ET.fromstring(draw(example, format="svg"))
    assert draw(example, format="html").endswith("</html>\n")
    slices = [
        entry
        for entry in json.loads(draw(example, format="json"))["traceEvents"]
        if entry["ph"] == "X"
    ]
    assert sum(entry["cat"] != "transfer" for entry in slices) == len(example.ops)


def test_a_schedule_is_drawn_as_its_simulation_with_the_papers_units():
    """Drawing may not call the simulator, and must not differ from it either."""
    example = schedule("1f1b", stages=4, micro_batches=8)
    assert draw(example) == draw(simulate_schedule(example, Costs(forward=1, backward=2, update=0)))


def test_split_backwards_take_one_unit_each():
    """I and W are the two halves of B."""
    split = Schedule.parse("rank 0 | 0F0 0I0 0W0 0U1\nrank 1 | 1F0 1I0 1W0 1U1")
    # 0F0 1F0 1I0 0I0 0W0 one after the other, 1W0 beside 0I0.
    assert unit_timeline(split).makespan == 5


def test_a_schedule_that_never_finishes_is_refused_with_the_op_that_never_starts():
    """A drawing of the ops that do start would look sound."""
    stuck = Schedule.parse(
        "rank 0 | 0F0 0B0 0F1 0B1 0U1\nrank 1 | 1F0 1F1 1B0 1B1 1U1", name="mine"
    )
    with pytest.raises(
        ScheduleError,
        match=r"mine cannot be drawn: 8 of 10 ops never start, the first is 0B0 on rank 0",
    ):
        draw(stuck)


def test_an_object_that_is_neither_timeline_nor_schedule_is_refused():
    """A list of ops is an easy mistake; its attribute errors from within would not say so."""
    with pytest.raises(
        SettingError, match="draw takes a Timeline or a Schedule, or a list of them, not a str"
    ):
        draw("0F0")  # type: ignore[arg-type]
    with pytest.raises(SettingError, match="or a list of them, not a str"):
        draw(["0F0"])  # type: ignore[arg-type]
    with pytest.raises(SettingError, match="draw got an empty list"):
        draw([])


@pytest.mark.parametrize(
    "name", ["1f1b", "chimera", "dualpipe-v", "fbp-as", "bpipe", "autopipe", "seq1f1b", "terapipe"]
)
def test_unit_lengths_are_those_of_the_simulator_for_pairs_slices_and_evictions_too(name):
    """Two rules for the length of an op would be one too many."""
    example = schedule(name, stages=4, micro_batches=8)
    drawn, simulated = (
        unit_timeline(example),
        simulate_schedule(example, Costs(forward=1, backward=2, update=0)),
    )
    assert drawn.slicing == simulated.slicing
    assert drawn.compute == simulated.compute


def test_several_are_drawn_one_above_the_other_with_their_difference():
    """A comparison must show which schedule is faster, and by how much."""
    both = [schedule(name, stages=3, micro_batches=4) for name in ("1f1b", "zb-h1")]
    drawing = draw(both)
    assert sum(line.startswith("rank ") for line in drawing.splitlines()) == 6
    assert "zb-h1 takes 14, 22.2 % less than 1f1b (18)" in " ".join(drawing.split())
    assert draw(both[:1]) == draw(both[0])


def test_a_notebook_shows_the_svg_or_else_the_text():
    """A display that raises hides the value; one of a million boxes stops the browser."""
    example = schedule("1f1b", stages=3, micro_batches=4)
    assert notebook_svg(example) == draw(example, format="svg")
    assert notebook_svg(unit_timeline(example)) == draw(example, format="svg")
    assert notebook_svg(Schedule.parse("0B0 0F0 0U1")) is None
    assert notebook_svg(schedule("1f1b", stages=10, micro_batches=6000)) is None
