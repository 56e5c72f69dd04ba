"""Timelines as files."""

from __future__ import annotations

import json

import pytest

from penstock.errors import FileError
from penstock.event import Event, Timeline
from penstock.report.timeline_file import load_timeline, save_timeline
from penstock.schedule.catalogue import schedule
from penstock.schedule.op import Kind, Op
from penstock.simulate.costs import Costs
from penstock.simulate.simulate import simulate_schedule


def saved(tmp_path, timeline):
    path = tmp_path / "timeline.json"
    save_timeline(timeline, path)
    return path


@pytest.mark.parametrize("name", ["1f1b", "seq1f1b", "bpipe"])
def test_a_timeline_is_read_back_equal(tmp_path, name):
    """With transfers, slices, and activations that move between ranks."""
    timeline = simulate_schedule(schedule(name, 4, 8), Costs(latency=0.1))
    loaded = load_timeline(saved(tmp_path, timeline))
    # Events at the same moment have no order.
    assert sorted(loaded.events, key=repr) == sorted(timeline.events, key=repr)
    assert loaded.makespan == timeline.makespan
    assert (loaded.title, loaded.source, loaded.stages) == (name, "simulated", timeline.stages)
    assert loaded.slicing == timeline.slicing


def test_peak_memory_is_kept(tmp_path):
    """It is measured, and cannot be computed again."""
    event = Event(0, Op(Kind.F, 0, 0), 0.0, 1.0)
    timeline = Timeline.of([event], 1, 1, (123,), "measured", "x")
    assert load_timeline(saved(tmp_path, timeline)).peak_memory == (123,)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("programs", ["0F0 0B0", "nonsense"], "is not an op"),
        ("programs", ["0F0"], "no valid timeline"),
        ("start", [[0, 1], [0, -1]], "lasts from"),
        ("end", [[0.5, 1], [0.1]], "no valid timeline"),
        ("stages", 1, "outside of"),
        ("peak_memory", [1], "peak memory of 1 ranks"),
        ("schema", 7, "schema"),
        ("title", 3, "title"),
        ("programs", ["9999999F9999999 0B0", "1F0 1B0"], "no valid timeline"),
    ],
)
def test_a_damaged_file_is_one_message(tmp_path, key, value, message):
    """Nothing in a file may end in a traceback."""
    events = [
        Event(rank, Op(kind, rank, 0), start, start + 1.0)
        for rank in range(2)
        for kind, start in ((Kind.F, 0.0), (Kind.B, 2.0))
    ]
    path = saved(tmp_path, Timeline.of(events, 2, 2, (1, 2)))
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, key: value}))
    with pytest.raises(FileError, match=message) as caught:
        load_timeline(path)
    assert "\n" not in str(caught.value)
