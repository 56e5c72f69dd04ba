"""The page."""

from __future__ import annotations

import importlib
import json
import re
from dataclasses import replace
from html.parser import HTMLParser

from penstock.draw.draw import unit_timeline
from penstock.draw.html import html
from penstock.event import Timeline
from penstock.schedule.catalogue import schedule
from penstock.schedule.op import Schedule
from penstock.simulate.costs import Costs
from penstock.simulate.simulate import simulate_schedule

VOID = {"meta"}
DATA = re.compile(r'<script type="application/json">(.*?)</script>', re.DOTALL)


class Reader(HTMLParser):
    """Cells of all tables, and a check that tags close in order."""

    def __init__(self, page):
        super().__init__()
        self.open, self.cells = [], []
        self.feed(page)
        assert not self.open

    def handle_starttag(self, tag, attrs):
        if tag not in VOID:
            self.open.append(tag)
        if tag == "td":
            self.cells.append("")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "td" in self.open:
            self.cells[-1] += data


def timeline():
    return simulate_schedule(
        schedule("1f1b", stages=3, micro_batches=4), Costs(activation_bytes=1024)
    )


def test_the_page_lists_every_rank_and_stage():
    """The drawing shows where time is spent; the tables have the numbers."""
    cells = Reader(html([timeline()])).cells
    assert cells[:8] == ["0", "0", "12", "66.7 %", "33.3 %", "3.0 KiB", "2", "activations 3.0 KiB"]
    assert cells[-3:] == ["2", "2", "1"]
    assert len(cells) == 3 * 8 + 3 * 3


def test_memory_has_no_column_if_it_is_unknown():
    """An empty column would read as zero bytes."""
    page = html([simulate_schedule(schedule("1f1b", stages=3, micro_batches=4), Costs())])
    assert "peak memory" not in page
    assert json.loads(DATA.search(page)[1])["panels"][0]["ranks"][0]["memory"] is None
    assert len(Reader(page).cells) == 3 * 5 + 3 * 3


def test_the_page_needs_no_network_and_has_a_dark_side():
    """It is mailed, archived and opened behind firewalls."""
    page = html([timeline()])
    assert not re.search(
        r"<link|src=|href=|@import|url\((?!#)|fetch\(|XMLHttpRequest|import\(", page
    )
    assert "prefers-color-scheme:dark" in page
    assert page.count("<svg") == 1


def test_title_and_note_are_escaped():
    """A title is text, even if it contains markup."""
    page = html([replace(timeline(), title='</title><script>&"')], note="<b>&")
    assert page.count("<script") == page.count("</script") == 2
    assert "&lt;b&gt;&amp;" in page
    assert "&lt;/title&gt;&lt;script&gt;&amp;&quot;, simulated" in page


def test_an_empty_timeline_has_a_page():
    """Before the first step there is nothing to show, and that is no error."""
    assert Reader(html([Timeline((), 2, 1)])).cells[:5] == ["0", "none", "0", "0.0 %", "100.0 %"]


def test_the_data_of_the_figure_has_every_op_and_transfer():
    """The script must draw the simulated start, end, kind, stage, number and bytes."""
    shown = simulate_schedule(
        schedule("1f1b", stages=3, micro_batches=4),
        Costs(transfer=0.5, boundary_bytes=64, activation_bytes=1024),
    )
    data = json.loads(DATA.search(html([shown]))[1])
    (panel,) = data["panels"]
    assert data["seconds"] == shown.makespan
    for rank, row in enumerate(panel["ranks"]):
        mine = [event for event in shown.compute if event.rank == rank]
        assert (row["t"], row["e"]) == ([e.start for e in mine], [e.end for e in mine])
        assert row["k"] == "".join(e.op.kind.value for e in mine)
        assert (row["s"], row["n"]) == ([rank] * 9, [e.op.micro_batch for e in mine])
        assert (row["h"], row["z"]) == ("0" * 9, "0" * 9)
        assert row["memory"]["peak"] == shown.peak_memory[rank]
        assert sum(count for _, count in row["memory"]["by"]) == row["memory"]["peak"]
    assert panel["ranks"][0]["b"][:2] == [64, 64]
    assert len(panel["sent"]["t"]) == 16
    assert panel["sent"]["o"][0] == "0F0"


def test_pairs_slices_and_shades_reach_the_figure():
    """The script knows no schedule; it draws what the data says."""
    (pair,) = json.loads(
        DATA.search(html([unit_timeline(Schedule.parse("0F0 0F1&0B0 0B1 0U1"))]))[1]
    )["panels"]
    assert (pair["paired"], pair["ranks"][0]["h"]) == (True, "01200")
    (cut,) = json.loads(
        DATA.search(
            html([unit_timeline(schedule("seq1f1b", stages=2, micro_batches=2, slices=2))])
        )[1]
    )["panels"]
    assert cut["ranks"][1]["n"][:2] == ["0.0", "0.1"]
    (both,) = json.loads(
        DATA.search(html([unit_timeline(schedule("chimera", stages=2, micro_batches=2))]))[1]
    )["panels"]
    assert [row["held"] for row in both["ranks"]] == ["s0↓ s1↑", "s1↓ s0↑"]
    assert set(both["ranks"][0]["z"]) == {"0", "1"}


def test_readers_without_scripts_get_the_still_figure():
    """Mail programs and code hosts run none."""
    page = html([timeline()])
    assert "<svg" in page.partition('<div class="still">')[2].partition("</div>")[0]


def test_a_page_with_too_many_ops_has_a_static_figure_and_a_note(monkeypatch):
    """A browser could not open hundreds of megabytes of data."""
    monkeypatch.setattr(importlib.import_module("penstock.draw.html"), "MAX_VIEWER_OPS", 10)
    page = html([timeline()])
    assert "<script" not in page
    assert "27 ops are too many for a figure that zooms" in page
    assert page.count("<svg") == 1


def test_the_script_ends_nowhere_before_its_end():
    """`</script` within a script's own text would cut the page in two."""
    from importlib.resources import files

    text = files("penstock.draw").joinpath("viewer.js").read_text(encoding="utf-8")
    assert "</script" not in text.lower()
    assert "innerHTML" not in text
