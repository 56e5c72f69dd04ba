"""Formats by suffix, files whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from penstock.draw.draw import draw
from penstock.errors import FileError, SettingError
from penstock.schedule.catalogue import schedule

MADE = schedule("gpipe", stages=2, micro_batches=2)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize(
    ("name", "begins"),
    [
        ("a.txt", "gpipe, simulated\nrank 0 |"),
        ("a.svg", "<svg "),
        ("A.SVG", "<svg "),
        ("a.html", "<!DOCTYPE html>"),
        ("a.b.json", "{"),
    ],
)
def test_the_suffix_chooses_the_format_and_the_file_holds_what_is_returned(tmp_path, name, begins):
    """One call serves a notebook and a build."""
    drawing = draw(MADE, tmp_path / name)
    assert drawing.startswith(begins)
    assert (tmp_path / name).read_text(encoding="utf-8") == drawing
    assert names(tmp_path) == [name]


def test_format_outweighs_the_suffix(tmp_path):
    """Some viewers require another suffix."""
    assert draw(MADE, tmp_path / "trace.perfetto", format="json").startswith("{")
    assert draw(MADE, format=".SVG").startswith("<svg ")


def test_without_path_and_format_the_drawing_is_text():
    """print(draw(schedule)) is what a new user tries first."""
    assert draw(MADE).startswith("gpipe, simulated\nrank 0 |")


@pytest.mark.parametrize(
    ("name", "what"),
    [("out.pdf", r"the suffix '\.pdf'"), ("out", "no suffix"), (".svg", "no suffix")],
)
def test_an_unknown_suffix_is_refused_with_the_five_known_ones(tmp_path, name, what):
    """The suffix decides the format, so no file with another suffix is written."""
    with pytest.raises(
        SettingError, match=rf"has {what}.*\.txt .*\.svg, \.png, \.html and \.json \(Perfetto"
    ):
        draw(MADE, tmp_path / name)
    assert names(tmp_path) == []


def test_an_unknown_format_is_refused_with_the_five_known_ones():
    """The rule for suffixes holds for `format=` too."""
    with pytest.raises(
        SettingError, match=r"unknown drawing format 'pdf': the formats are \.txt .*\.json"
    ):
        draw(MADE, format="pdf")


def test_a_missing_folder_is_named(tmp_path):
    """The folder is not made: a typing error in a path should not grow a tree."""
    with pytest.raises(
        FileError,
        match=r"cannot write the drawing .*the folder .*plots does not exist; create it first",
    ):
        draw(MADE, tmp_path / "plots" / "a.svg")
    # A folder that takes no files says so in the same way, and exists.
    with pytest.raises(FileError, match=r"cannot write the drawing /proc/a\.svg: (?!the folder)"):
        draw(MADE, "/proc/a.svg")


def test_a_path_that_cannot_be_written_leaves_nothing_behind(tmp_path):
    """A partial file next to the real one could be mistaken for a drawing."""
    (tmp_path / "a.svg").mkdir()
    with pytest.raises(FileError, match=r"cannot write the drawing .*a\.svg: Is a directory"):
        draw(MADE, tmp_path / "a.svg")
    assert names(tmp_path) == ["a.svg"]
    with pytest.raises(FileError, match="cannot write the drawing"):
        draw(MADE, f"{tmp_path}/a\0.svg")
    (tmp_path / "file").touch()
    with pytest.raises(FileError, match=r"cannot write the drawing .*b\.svg: Not a directory"):
        draw(MADE, tmp_path / "file" / "b.svg")


def test_an_old_drawing_is_replaced_through_its_link(tmp_path):
    """The link remains a link, and its target is replaced."""
    (tmp_path / "real.svg").write_text("old")
    (tmp_path / "link.svg").symlink_to("real.svg")
    drawing = draw(MADE, tmp_path / "link.svg")
    assert (tmp_path / "link.svg").is_symlink()
    assert (tmp_path / "real.svg").read_text() == drawing


def test_a_device_is_written_to_and_not_replaced():
    """/dev/stdout must outlive `draw(…, "/dev/stdout")`, which root could replace by a file."""
    draw(MADE, os.devnull, format="txt")
    assert not Path(os.devnull).is_file()
