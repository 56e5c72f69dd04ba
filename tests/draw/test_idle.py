"""What idle ranks wait for, in the drawings of measured timelines."""

from __future__ import annotations

import dataclasses
import json
from itertools import pairwise
from types import SimpleNamespace

import pytest

import penstock as ps
from penstock.draw.facts import idle_item
from penstock.draw.viewer import viewer_data, viewer_legend
from penstock.event import Event, Timeline
from penstock.report.run_results import timeline_section
from penstock.report.timeline_file import load_timeline, save_timeline
from penstock.schedule.op import Op


@pytest.fixture
def timeline():
    """A step in which rank 1 waits for 1 s for rank 0 and for 2 s for the link, twice."""
    forwards = [Op.parse(text) for text in ("0F0", "0F1", "1F0", "1F1")]
    events = [
        Event(0, forwards[0], 0.0, 1.0),
        Event(0, forwards[1], 1.0, 2.0),
        Event(0, forwards[0], 1.0, 3.0, 2**20, 1),
        Event(0, forwards[1], 2.0, 5.0, 2**20, 1),
        Event(1, forwards[2], 3.0, 4.0, wait_s=3.0),
        Event(1, forwards[3], 5.0, 6.0, wait_s=1.0),
    ]
    measured = Timeline.of(events, 2, 2, source="measured", title="gpipe")
    return dataclasses.replace(measured, hosts=("left", "right"))


def test_the_text_sums_up_what_ranks_wait_for(timeline):
    """In percent of the makespan, 6 s."""
    item = idle_item(timeline)
    assert item == "idle per rank for neighbour 0 17 %; link 0 50 %; rest 67 0 %"
    assert item in ps.draw(timeline, width=200)
    assert item in ps.draw(timeline, format="svg")


def test_a_simulated_timeline_is_drawn_as_before():
    """Its idle times are all explained by its schedule."""
    drawing = ps.draw(ps.simulate(ps.schedule("1f1b", 2, 2), ps.Costs(transfer=1)), format="svg")
    assert "link" not in drawing
    assert "idle per rank" not in drawing


def test_waiting_for_the_link_has_a_colour_and_a_tooltip(timeline):
    """In SVG; waiting for the neighbour has the colour of idle time."""
    drawing = ps.draw(timeline, format="svg")
    assert drawing.count('<rect class="link" x=') == 2
    assert "<title>0F0 is on its way from rank 0: 2.0 s</title>" in drawing
    assert "<title>rank 0 still computes 0F0: 1.0 s</title>" in drawing
    assert "waits for the link" in drawing


def test_the_page_tells_the_cause_under_the_pointer_and_lists_messages(timeline):
    """By rank, and by host where there are several."""
    panel = viewer_data([timeline])["panels"][0]
    assert [rank["idle"] for rank in panel["ranks"]] == [
        [(2, 6, "r", "", -1, 0)],
        [(0, 1, "n", "0F0", 0, 2**20), (1, 3, "l", "0F0", 0, 2**20), (4, 5, "l", "0F1", 0, 2**20)],
    ]
    assert "waits for the link" in viewer_legend([timeline])
    page = ps.draw(timeline, format="html")
    for text in ("messages by rank", "0 → 1", "messages by host", "left → right", "2.0 MiB"):
        assert text in page


def test_the_trace_has_idle_slices_and_no_overlap_on_a_thread(timeline):
    """Perfetto drops slices that overlap others of their thread without lying inside them."""
    entries = json.loads(ps.draw(timeline, format="json"))["traceEvents"]
    slices = [entry for entry in entries if entry["ph"] == "X"]
    idle = [entry for entry in slices if entry["cat"].startswith("idle")]
    assert [(entry["name"], entry["ts"], entry["dur"]) for entry in idle] == [
        ("neither neighbour nor link", 2e6, 4e6),
        ("waits for the neighbour: 0F0", 0, 1e6),
        ("waits for the link: 0F0", 1e6, 2e6),
        ("waits for the link: 0F1", 4e6, 1e6),
    ]
    threads = {}
    for entry in slices:
        threads.setdefault((entry["pid"], entry["tid"]), []).append(entry)
    for row in threads.values():
        row.sort(key=lambda entry: entry["ts"])
        for before, after in pairwise(row):
            assert before["ts"] + before["dur"] <= after["ts"]
    names = [entry["args"]["name"] for entry in entries if entry["name"] == "thread_name"]
    assert {"to rank 1", "to rank 1, 2", "idle"} <= set(names)


def test_the_report_of_a_run_has_tables_of_idle_time_and_messages(timeline):
    """Next to the timelines."""
    run = SimpleNamespace(
        predicted=None, measured=timeline, plan=SimpleNamespace(synchronous=False)
    )
    tables = {getattr(block, "name", ""): block for block in timeline_section(run).blocks}
    assert tables["idle"].rows == ((0, 0.0, 0.0, 4.0), (1, 1.0, 3.0, 0.0))
    assert tables["messages-by-rank"].rows == (("0", "1", 2, 2**21, 4.0, 3.0),)
    assert tables["messages-by-host"].rows == (("left", "right", 2, 2**21, 4.0, 3.0),)


def test_waits_and_hosts_are_read_back_from_a_file(timeline, tmp_path):
    """A report is made after the run."""
    save_timeline(timeline, tmp_path / "timeline.json")
    loaded = load_timeline(tmp_path / "timeline.json")
    assert loaded.hosts == timeline.hosts
    assert sorted(loaded.events, key=repr) == sorted(timeline.events, key=repr)
