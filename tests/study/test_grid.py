"""Grids from YAML files: what they make, and what is refused before anything runs."""

from __future__ import annotations

import itertools
import re

import pytest
from tests.study.grid_text import GRID

from penstock.errors import PenstockError
from penstock.study.grid import grid_entry
from penstock.study.settings import Settings

REPEATED_GRID = f"title: A grid\nrepetitions: 2{GRID}"


@pytest.fixture
def file(tmp_path):
    """Write a grid, with lines replaced."""

    def write(old="", new="", text=REPEATED_GRID):
        path = tmp_path / "grid.yaml"
        path.write_text(text.replace(old, new) if old else text + new)
        return path

    return write


def test_a_grid_is_the_product_of_its_values_without_what_is_excluded(file):
    """Counted by hand: 2 systems x 2 schedules x 2 stages x 2 repetitions, less a quarter."""
    cells = grid_entry(file()).study().cells(Settings())
    expected = []
    for name, schedule, stages, seed in itertools.product(
        ("torch", "penstock"), ("1f1b", "gpipe"), (2, 4), (0, 1)
    ):
        if (name, schedule) != ("torch", "gpipe"):
            expected.append((name, schedule, stages, seed))
    combinations = [(cell.system, cell.schedule, cell.stages, cell.repetition) for cell in cells]
    assert sorted(combinations) == sorted(expected)
    assert {cell.study for cell in cells} == {"grid"}
    assert cells[0].model_options == (("layers", 6),)


def test_settings_of_the_command_line_take_precedence(file):
    """The data and the number of repetitions."""
    settings = Settings(data="digits", repetitions=1)
    cells = grid_entry(file()).study().cells(settings)
    assert len(cells) == 6
    assert {cell.data for cell in cells} == {"digits"}


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("steps: 3", "stepz: 3", "at stepz: unknown key. Did you mean 'steps'?"),
        ("batch: 32", "batch: many", "at batch"),
        ("batch: 32", "batch: [32, 1.5]", "at batch"),
        ("batch: 32", "batch: 0", "batch 0: must be at least 1"),
        ("stages: [2, 4]", "stages: -1", "stages -1: must be at least 1"),
        ("system: [torch, penstock]", "system: [torch, penstok]", "Did you mean 'penstock'?"),
        ("schedule: [1f1b, gpipe]", "schedule: 1b1f", "no schedule of these systems called '1b1f'"),
        ("model: mlp", "model: mpl", "no model called 'mpl'"),
        ("steps: 3", "steps: 0", "steps or epochs, and repetitions: at least 1"),
        ("repetitions: 2", "repetitions: 0", "at least 1"),
        ("batch: 32", "batch: 32\nbalance: by-luck", "by-luck"),
        ("batch: 32", "batch: 32\nbalance: 3-x", "lengths such as 3-3-2"),
        ("{system: torch, schedule: gpipe}", "{sistem: torch}", "unknown key 'sistem'"),
        ("{system: torch, schedule: gpipe}", f"{{{'x' * 900}: torch}}", "x…; known: system"),
        ("{system: torch, schedule: gpipe}", "{model: mlp}", "every combination is excluded"),
        ("stages: [2, 4]", f"stages: {list(range(1, 3000))}", "more than 10,000"),
        ("batch: 32", "batch: 32\nbatch: 64", "duplicate key 'batch'"),
        ("batch: 32", "batch: &a 32", "anchors and aliases"),
        ("batch: 32", "batch: !!python/object/apply:os.system [ls]", "is not allowed"),
        ("model: mlp", "", "model"),
        (
            "layers: 6",
            "layers: six",
            "model_options: mlp takes layers of 1 or more, a whole number",
        ),
        (
            "layers: 6",
            "layers: 1.5",
            "model_options: mlp takes layers of 1 or more, a whole number",
        ),
        (
            "layers: 6",
            "layer: 6",
            "model_options: mlp has no option 'layer'. Did you mean 'layers'?",
        ),
        ("layers: 6", "layers: [6, 8]", "at model_options"),
        (REPEATED_GRID, "- a list", "is no study"),
        (REPEATED_GRID, "\x00", "NUL"),
        (REPEATED_GRID, "[" * 500, "is not YAML"),
        ("batch: 32", "batch: 99999999999999999999999", "64 bits"),
    ],
)
def test_a_wrong_file_is_one_message_and_no_run(file, old, new, message):
    """At the door, before a folder is made."""
    with pytest.raises(PenstockError, match=re.escape(message)) as caught:
        grid_entry(file(old, new))
    assert "\n" not in str(caught.value)


def test_a_file_that_does_not_exist_is_named(tmp_path):
    """Of a misspelt path."""
    with pytest.raises(PenstockError, match=r"no-such\.yaml"):
        grid_entry(tmp_path / "no-such.yaml")
