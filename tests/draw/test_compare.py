"""A prediction above its measurement."""

from __future__ import annotations

import json
from dataclasses import replace
from xml.etree import ElementTree as ET

import pytest

from penstock.draw.compare import difference, differences
from penstock.draw.draw import draw
from penstock.errors import SettingError
from penstock.event import Timeline
from penstock.schedule.catalogue import schedule
from penstock.simulate.costs import Costs
from penstock.simulate.simulate import simulate_schedule


def timeline(name="1f1b", forward=0.010, source="simulated"):
    simulated = simulate_schedule(schedule(name, stages=3, micro_batches=4), Costs(forward=forward))
    return replace(simulated, source=source)


def test_both_rows_of_a_rank_share_one_time_scale():
    """A slower step must look longer, not equally long on another axis."""
    drawing = draw([timeline(), timeline(forward=0.020, source="measured")], width=100)
    rows = [line for line in drawing.splitlines() if line.startswith("rank ")]
    assert len(rows) == 6
    assert len({len(row) for row in rows}) == 1
    assert rows[0] == "rank 0 |F0F1F2········B0▓▓F3B1▓▓··B2▓▓··B3▓▓" + "·" * 36 + "|"
    assert rows[3].startswith("rank 0 |F0░░F1░░F2░░················B0▓▓▓▓▓▓F3░░")
    assert "measured takes 360.0 ms, 100.0 % more than simulated (180.0 ms)" in drawing


def test_the_svg_has_the_boxes_of_both_on_one_axis():
    """Ticks go through both, so that the eye can compare."""
    first, second = timeline(), timeline(forward=0.011, source="measured")
    root = ET.fromstring(draw([first, second], format="svg"))
    space = "{http://www.w3.org/2000/svg}"
    boxes = [group for group in root.iter(f"{space}g") if "box" in group.get("class", "")]
    titles = [title.text for group in boxes for title in group.iter(f"{space}title")]
    assert len(titles) == len(first.compute) + len(second.compute)
    assert {"0F0: 10.0 ms at 0 s", "0F0: 11.0 ms at 0 s"} <= set(titles)
    assert "1f1b, measured" in {text.text for text in root.iter(f"{space}text")}


def test_every_format_that_draws_one_draws_two(tmp_path):
    """The same call, the same suffixes."""
    pair = timeline(), timeline(forward=0.011, source="measured")
    page = draw(pair, tmp_path / "pair.html")
    assert page.count("<svg") == 1
    assert "measured takes 198.0 ms, 10.0 % more than simulated" in page
    assert (tmp_path / "pair.html").read_text() == page
    assert (
        ET.fromstring(draw(pair, format="svg")).get("aria-label")
        == "1f1b, simulated; 1f1b, measured"
    )
    trace = json.loads(draw(pair, format="json"))
    assert [panel["source"] for panel in trace["otherData"]["penstock"]] == [
        "simulated",
        "measured",
    ]
    with pytest.raises(SettingError, match="no drawing format"):
        draw(pair, tmp_path / "pair.pdf")


def test_timelines_of_different_shapes_can_be_compared():
    """Two plans for one model seldom have the same number of ranks."""
    drawing = draw([timeline(), Timeline((), 1, 1)])
    assert sum(line.startswith("rank ") for line in drawing.splitlines()) == 4
    ET.fromstring(draw([timeline(), Timeline((), 1, 1)], format="svg"))


def test_two_of_one_source_are_named_by_title():
    """'simulated is longer than simulated' would have no meaning."""
    words = difference(timeline("gpipe"), timeline("naive"))
    assert words.startswith("naive takes 360.0 ms, 100.0 % more than gpipe (180.0 ms)")


def test_three_are_compared_with_the_first():
    """The first timeline is the reference."""
    words = differences([timeline("gpipe"), timeline("naive"), timeline("1f1b")])
    assert [part.partition(" takes")[0] for part in words.split("; ") if " takes" in part] == [
        "naive",
        "1f1b",
    ]
    assert differences([timeline()]) == ""
