"""The page."""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser

from penstock.draw.html import html
from penstock.event import Timeline
from penstock.schedule.catalogue import schedule
from penstock.simulate.costs import Costs
from penstock.simulate.simulate import simulate_schedule

VOID = {"meta"}


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


def made():
    return simulate_schedule(schedule("1f1b", stages=3, micro_batches=4), Costs(activation_bytes=1024))


def test_the_page_lists_every_rank_and_stage():
    """The drawing shows where time goes, the tables say how much."""
    cells = Reader(html([made()])).cells
    assert cells[:6] == ["0", "0", "12", "66.7 %", "33.3 %", "3.0 KiB"]
    assert cells[-3:] == ["2", "2", "1"]
    assert len(cells) == 3 * 6 + 3 * 3


def test_memory_has_no_column_when_it_is_not_known():
    """An empty column reads as zero bytes."""
    page = html([replace(made(), peak_memory=None)])
    assert "peak memory" not in page
    assert len(Reader(page).cells) == 3 * 5 + 3 * 3


def test_the_page_needs_no_network_and_has_a_dark_side():
    """It is mailed, archived and opened behind firewalls."""
    page = html([made()])
    assert not re.search(r"<script|<link|src=|href=|@import|url\((?!#)", page)
    assert "prefers-color-scheme:dark" in page
    assert page.count("<svg") == 1


def test_title_and_note_are_escaped():
    """A title is text, whatever is in it."""
    page = html([replace(made(), title='</title><script>&"')], note="<b>&")
    assert "<script" not in page
    assert "&lt;b&gt;&amp;" in page
    assert "&lt;/title&gt;&lt;script&gt;&amp;&quot;, simulated" in page


def test_an_empty_timeline_has_a_page():
    """Before the first step there is nothing to show, and that is no error."""
    assert Reader(html([Timeline((), 2, 1)])).cells[:5] == ["0", "none", "0", "0.0 %", "100.0 %"]
