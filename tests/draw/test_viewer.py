"""Data of the figure that zooms, where a page fetches it."""

from __future__ import annotations

import json

import pytest

from penstock.draw.draw import unit_timeline
from penstock.draw.palette import FILLS, FILLS_ON_DARK
from penstock.draw.viewer import viewer_data, viewer_frame, viewer_legend, viewer_script
from penstock.schedule.catalogue import schedule
from penstock.schedule.op import Kind
from penstock.simulate.costs import Costs
from penstock.simulate.simulate import simulate_schedule


@pytest.fixture(scope="module")
def timeline():
    """1F1B with memory."""
    return simulate_schedule(schedule("1f1b", 4, 8), Costs(activation_bytes=1024, update=1))


def test_data_of_boxes_has_every_op(timeline):
    """The script draws what is here."""
    data = viewer_data([timeline])
    ranks = data["panels"][0]["ranks"]
    assert sum(len(rank["t"]) for rank in ranks) == len(timeline.log.start)
    assert data["most"] == 4096
    assert json.loads(json.dumps(data)) == json.loads(json.dumps(viewer_data([timeline], 10**9)))


def test_above_the_limit_there_are_shares_of_time(timeline):
    """Summed over the columns, each kind takes the time that its ops take."""
    data = viewer_data([timeline], max_ops=10)
    for rank, rank_data in enumerate(data["panels"][0]["ranks"]):
        assert rank_data["t"] == []
        columns = len(rank_data["share"]["F"])
        for kind, seconds in (("F", 8.0), ("B", 16.0), ("U", 1.0)):
            levels = [int(digit, 36) / 35 for digit in rank_data["share"][kind]]
            total = sum(levels) * timeline.makespan / columns
            assert total == pytest.approx(seconds, rel=0.02)
        assert rank_data["memory"]["peak"] == timeline.peak_memory[rank]


def test_the_limit_counts_the_ops_of_all_timelines(timeline):
    """They share a page."""
    count = len(timeline.log.start)
    both = viewer_data([timeline, timeline], max_ops=2 * count - 1)
    assert all("share" in panel["ranks"][0] for panel in both["panels"])
    assert "share" not in viewer_data([timeline], max_ops=count)["panels"][0]["ranks"][0]


def test_shares_of_pairs_and_of_no_time():
    """Paired ops take half of their span each; a timeline may take no time at all."""
    paired = viewer_data([unit_timeline(schedule("dualpipe", 4, 16))], max_ops=1)
    for rank in paired["panels"][0]["ranks"]:
        columns = zip(*rank["share"].values(), strict=True)
        assert all(sum(int(digit, 36) for digit in column) <= 36 for column in columns)
    empty = simulate_schedule(schedule("1f1b", 2, 2), Costs(forward=0))
    assert set(viewer_data([empty], max_ops=1)["panels"][0]["ranks"][0]["share"]["F"]) == {"0"}


def test_the_legend_of_shares_has_no_numbers(timeline):
    """There are none in the lanes."""
    assert "numbers: micro-batch" in viewer_legend([timeline])
    assert "numbers" not in viewer_legend([timeline], max_ops=1)


def test_the_legend_says_what_the_numbers_of_updates_are(timeline):
    """A box of an update has its weight version where the update takes time."""
    assert "micro-batch, of U the weight version" in viewer_legend([timeline])
    quick = simulate_schedule(schedule("1f1b", 4, 8), Costs())
    assert "weight version" not in viewer_legend([quick])


def test_the_frame_has_no_data_and_the_script_no_page():
    """A page that changes puts the two together itself."""
    frame = viewer_frame("a &lt;b&gt;")
    assert "<script" not in frame
    assert 'aria-label="a &lt;b&gt;"' in frame
    assert "function penstockViewer(figure, data)" in viewer_script()


def test_the_legend_has_the_colours_of_the_boxes_on_a_dark_page_too(timeline):
    """Updates are drawn lighter there, and the legend would show a colour that no box has."""
    legend = viewer_legend([timeline])
    colours = f"light-dark({FILLS[Kind.U][0]},{FILLS_ON_DARK[Kind.U]})"
    assert legend.count("light-dark(") == legend.count(colours) == 1
    assert all(len(set(FILLS[kind])) == 1 for kind in FILLS_ON_DARK), "one colour for both shades"


def test_the_legend_explains_the_arrows_that_are_drawn(timeline):
    """Arrows have a colour for activations and one for gradients; without transfers that take time,
    and above the limit, there are none.
    """
    sent = simulate_schedule(schedule("1f1b", 4, 8), Costs(transfer=0.5))
    names = ("activation sent", "gradient sent")
    assert all(name in viewer_legend([timeline, sent]) for name in names)
    assert not any(name in viewer_legend([timeline]) for name in names)
    assert not any(name in viewer_legend([sent], max_ops=1) for name in names)
