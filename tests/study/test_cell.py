"""Cells: keys, names and groups."""

from __future__ import annotations

import json
from dataclasses import fields, replace

from penstock.study.cell import Cell, options


def test_the_key_leaves_out_defaults_so_that_new_fields_do_not_change_it():
    """Records of an older version must be found again."""
    cell = Cell("study", "torch", stages=2)
    assert json.loads(cell.key) == {"study": "study", "system": "torch", "stages": 2}


def test_cells_that_differ_in_one_field_have_different_keys_and_file_names():
    """Otherwise one would be taken for the other after an interrupt."""
    base = Cell("study", "torch", options=options(a=1))
    others = {
        "str": "other",
        "int": 7,
        "Options": options(b=2),
    }
    cells = [base] + [replace(base, **{f.name: others[f.type]}) for f in fields(Cell)]
    assert len({cell.key for cell in cells}) == len(cells)
    assert len({cell.file_name for cell in cells}) == len(cells)


def test_the_order_of_options_does_not_matter():
    """Two ways to write one cell have one record."""
    assert Cell("s", options=options({"b": 1}, a=2)) == Cell("s", options=options(a=2, b=1))


def test_a_file_name_is_safe_whatever_the_names_are():
    """Names from a YAML file become file names of logs."""
    cell = Cell("s", "../../etc/passwd", model='<b>"x"\n' * 50, options=options(k="/"))
    assert "/" not in cell.file_name
    assert len(cell.file_name) < 120


def test_repetitions_share_their_group():
    """A group is what a row of a table is about."""
    cell = Cell("s", "torch", repetition=4)
    assert cell.group == Cell("s", "torch")
    assert str(cell).endswith("#4")


def test_learning_rate_and_momentum_are_not_part_of_a_systems_label():
    """They are equal for all systems of a comparison."""
    cell = Cell("s", "ddp", options=options(lr=0.1, momentum=0.9, accumulate=True))
    assert cell.system_label == "ddp accumulate=True"
