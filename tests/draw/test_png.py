"""The PNG: the SVG's shapes as pixels."""

from __future__ import annotations

import struct
import sys

import pytest

from penstock.draw.draw import draw, unit_timeline
from penstock.draw.png import png
from penstock.draw.svg import svg
from penstock.errors import MissingExtra, SettingError
from penstock.event import Event, Timeline
from penstock.schedule.catalogue import schedule
from penstock.schedule.op import Kind, Op

pytest.importorskip("matplotlib")
MADE = unit_timeline(schedule("1f1b", stages=2, micro_batches=2))


def pixels(data):
    from io import BytesIO

    from matplotlib.image import imread

    return (imread(BytesIO(data))[:, :, :3] * 255).round().astype(int)


def test_it_has_two_pixels_per_point_of_the_svg():
    """Small numbers need them."""
    data = png([MADE])
    assert data.startswith(b"\x89PNG")
    wide, high = struct.unpack(">II", data[16:24])
    root = svg([MADE]).split('viewBox="0 0 ')[1].split('"')[0].split()
    assert (wide, high) == pytest.approx([2 * float(side) for side in root], abs=1.5)


def test_boxes_have_the_colours_and_places_of_the_svg():
    """PNG and SVG must show the same figure."""
    from xml.etree import ElementTree as ET

    picture = pixels(png([MADE]))
    space = "{http://www.w3.org/2000/svg}"
    fills = {"F": [126, 176, 232], "B": [23, 116, 74]}
    seen = 0
    for group in ET.fromstring(svg([MADE])).iter(f"{space}g"):
        if group.get("class") == "box":
            top = float(group.get("transform").split()[1].rstrip(")"))
            for box in group.iter(f"{space}rect"):
                if box.get("class") in fills:
                    x, y = float(box.get("x")) + 4, top + 4
                    assert picture[int(2 * y), int(2 * x)].tolist() == fills[box.get("class")]
                    seen += 1
    assert seen == 8


def test_the_same_timeline_gives_the_same_bytes(tmp_path):
    """A figure in a repository must change only if its contents change."""
    data = draw(MADE, tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes() == data == draw(MADE, format="png")


def test_without_matplotlib_the_message_has_the_install_command(monkeypatch):
    """The extra is optional, and a user cannot act on a plain ImportError."""
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(
        MissingExtra,
        match=r"a drawing as \.png needs matplotlib; install it with: pip install 'penstock\[draw\]'",
    ):
        png([MADE])


def test_a_picture_too_large_for_any_viewer_is_refused_with_its_size():
    """Agg would stop at 65,536 pixels with words about image sizes."""
    events = tuple(Event(rank, Op(Kind.F, rank, 0), rank, rank + 1) for rank in range(1000))
    with pytest.raises(
        SettingError,
        match=r"a PNG of \d+ by \d+ pixels is too large to open .limit 60000 a side.; draw \.svg or \.html",
    ):
        png([Timeline(events, 1000, 1000)])


def test_dollar_signs_in_titles_are_letters():
    """Matplotlib would read mathematics between two of them."""
    png([Timeline((), 1, 1, title=r"$\frac{1}$ and $x$")])
