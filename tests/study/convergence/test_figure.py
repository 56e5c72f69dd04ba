"""Figures are drawn from results alone."""

from __future__ import annotations

import sys

import pytest

from penstock.errors import MissingExtra
from penstock.study.convergence.figure import draw_figures


def test_every_figure_is_written_as_png_and_svg(results, tmp_path):
    """One to look at, one to scale. Nothing was measured here, so there is no figure of it."""
    names = draw_figures(results, tmp_path)
    assert names == ["digits-samples.png", "digits-simulated-time.png", "digits-final.png"]
    for name in names:
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
        svg = (tmp_path / name).with_suffix(".svg").read_text()
        assert "<svg" in svg


def test_without_matplotlib_the_extra_is_named(results, tmp_path, monkeypatch):
    """A study on a bare machine should say what to install."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingExtra, match=r"pip install 'penstock\[draw\]'"):
        draw_figures(results, tmp_path)
