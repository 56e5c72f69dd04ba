"""A folder of drawings with its two pages."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest

from penstock.draw.draw import draw, unit_timeline
from penstock.draw.gallery import GalleryEntry, GalleryText, write_gallery
from penstock.errors import FileError
from penstock.schedule.catalogue import schedule

TEXT = GalleryText(
    "All <of> them", ("Before & after.",), ("bubble", "in flight"), ("Not shown: x.",)
)


def entries():
    return [
        GalleryEntry(
            name,
            "<paper>",
            unit_timeline(schedule(name, stages=2, micro_batches=2)),
            ("1 %", "2"),
            group,
        )
        for name, group in (("gpipe", "quick & even"), ("naive", "slow"))
    ]


def test_every_entry_has_a_file_and_is_on_both_pages(tmp_path):
    """The files are for papers; the pages are for choosing one."""
    written = write_gallery(tmp_path / "new", TEXT, entries())
    assert [path.name for path in written] == ["gpipe.svg", "naive.svg", "index.html", "README.md"]
    assert (tmp_path / "new" / "gpipe.svg").read_text() == draw(
        schedule("gpipe", stages=2, micro_batches=2), format="svg"
    )
    page, read_me = ((tmp_path / "new" / name).read_text() for name in ("index.html", "README.md"))
    HTMLParser().feed(page)
    assert page.count("<svg") == 2
    assert page.count('<a href="#') == 2
    assert "All &lt;of&gt; them" in page
    assert not re.search(r"<link|src=|@import|fetch\(", page)
    assert page.count("<tbody>") == 2
    assert "quick &amp; even</th>" in page
    assert (
        "| quick & even | bubble | in flight |\n|---|--:|--:|\n| [gpipe](#gpipe) | 1 % | 2 |"
        in read_me
    )
    assert "![naive](naive.svg)" in read_me


def test_a_folder_that_is_there_keeps_its_other_files(tmp_path):
    """The folder may be part of a documentation."""
    (tmp_path / "mine.txt").write_text("mine")
    write_gallery(tmp_path, TEXT, entries())
    write_gallery(tmp_path, TEXT, entries())
    assert (tmp_path / "mine.txt").read_text() == "mine"


def test_a_folder_that_cannot_be_created_is_named(tmp_path):
    """A typing error in a path must not create a tree of folders."""
    with pytest.raises(FileError, match=r"cannot create the folder .*a/b: No such file"):
        write_gallery(tmp_path / "a" / "b", TEXT, entries())
