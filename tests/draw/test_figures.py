"""The committed figures of the documentation."""

from __future__ import annotations

import runpy
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "docs" / "figures" / "make_figures.py"


def test_the_committed_figures_are_those_that_the_script_draws(tmp_path):
    """A committed figure that the code no longer draws would be an unchecked claim."""
    runpy.run_path(str(SCRIPT))["main"](tmp_path)
    drawn = {path.name: path.read_text(encoding="utf-8") for path in tmp_path.iterdir()}
    committed = {
        path.name: path.read_text(encoding="utf-8") for path in SCRIPT.parent.glob("*.svg")
    }
    assert drawn == committed, f"run {SCRIPT}"
