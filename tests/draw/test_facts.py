"""Texts that all drawings share."""

from __future__ import annotations

from xml.etree import ElementTree as ET

from hypothesis import given
from hypothesis import strategies as st

from penstock.draw.facts import clean, heading, stages_of_rank
from penstock.event import Event, Timeline
from penstock.schedule.op import Kind, Op


@given(st.text(st.characters(), max_size=60))
def test_cleaned_text_is_one_line_of_xml_that_can_be_encoded(text):
    """A drawing with a title from a foreign file can still be written and parsed."""
    cleaned = clean(text)
    assert len(cleaned.splitlines()) <= 1
    escaped = cleaned.replace("&", "&amp;").replace("<", "&lt;")
    assert (ET.fromstring(f"<a>{escaped}</a>".encode()).text or "") == cleaned


def test_the_heading_names_the_source_of_the_numbers():
    """A figure must not present a prediction as a measurement."""
    assert heading(Timeline((), 1, 1, source="measured", title="1f1b")) == "1f1b, measured"
    assert heading(Timeline((), 1, 1)) == "simulated"


def test_stages_of_a_rank_are_those_it_worked_on():
    """Transfers belong to links."""
    events = (
        Event(0, Op(Kind.F, 2, 0), 0, 1),
        Event(0, Op(Kind.F, 0, 0), 1, 2),
        Event(1, Op(Kind.F, 0, 0), 2, 3, 0, 0),
    )
    assert stages_of_rank(Timeline(events, 2, 3)) == [[0, 2], []]
