"""Meaning of the two shades of a colour: stages, directions, or batches of a stream."""

from __future__ import annotations

import re

import pytest

from penstock.draw.box_shades import BoxShades
from penstock.draw.draw import draw, unit_timeline
from penstock.schedule.catalogue import schedule
from penstock.schedule.op import Op
from penstock.simulate.costs import Costs
from penstock.simulate.simulate import simulate_schedule


@pytest.mark.parametrize(
    ("name", "stages", "size", "meaning"),
    [
        ("pipedream", 3, 2, "shades: alternating batches"),
        ("avgpipe", 2, 3, "shades: alternating batches"),
        ("hetpipe", 2, 2, "shades: alternating batches"),
        ("pipedream", 3, 1, ""),
        ("1f1b", 3, 4, ""),
        ("gpipe", 1, 4, ""),
        ("wpipe", 4, 2, "shades: stages of a rank"),
        ("interleaved", 4, 4, "shades: stages of a rank"),
        ("chimera", 4, 4, "shades: stages down and up the ranks"),
    ],
)
def test_the_legend_explains_shades(name, stages, size, meaning):
    """Shades mean stages if a rank has several, batches if a batch has several micro-batches, and
    otherwise there is one shade.
    """
    example = schedule(name, stages, size)
    assert BoxShades.of(unit_timeline(example)).meaning == meaning
    for form in ("svg", "html"):
        assert re.findall("shades: [^<]*", draw(example, format=form).replace("&#x27;", "'")) == [
            meaning
        ] * bool(meaning) * (2 if form == "html" else 1)


@pytest.mark.parametrize(
    "source", [unit_timeline, lambda example: simulate_schedule(example, Costs(transfer=0.1))]
)
def test_every_other_batch_of_a_stream_has_the_second_shade(source):
    """A batch is found by the U that takes its gradient, also if replicas take turns with batches
    and each shades its own.
    """
    shades = BoxShades.of(source(schedule("pipedream", 2, 2, batches=4)))
    assert [shades.is_second(0, Op.parse(f"0F{n}")) for n in range(8)] == [
        False,
        False,
        True,
        True,
    ] * 2
    assert [shades.is_second(1, Op.parse(f"1B{n}")) for n in range(8)] == [
        False,
        False,
        True,
        True,
    ] * 2
    assert not shades.is_second(0, Op.parse("0U2"))
    shades = BoxShades.of(source(schedule("hetpipe", 1, 2, batches=8)))
    assert [shades.is_second(1, Op.parse(f"0F{n}")) for n in (2, 3, 6, 7, 10, 11)] == [
        False,
        False,
        True,
        True,
        False,
        False,
    ]


def test_boxes_of_the_second_shade_are_filled_with_it():
    """The shade in the legend is the shade of the boxes."""
    drawn = draw(schedule("pipedream", 1, 2, batches=2), format="svg")
    boxes = re.findall(r'<rect class="([FB]2?)"[^>]*><title>0([FB]\d)', drawn)
    assert boxes == [
        ("F", "F0"),
        ("B", "B0"),
        ("F", "F1"),
        ("B", "B1"),
        ("F2", "F2"),
        ("B2", "B2"),
        ("F2", "F3"),
        ("B2", "B3"),
    ]
