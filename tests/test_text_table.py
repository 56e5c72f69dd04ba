"""Tables of text."""

from __future__ import annotations

import pytest

from penstock.text_table import table


def test_columns_are_as_wide_as_their_widest_cell():
    """No trailing blanks, so that pasted tables compare equal."""
    assert table(("a", "long title"), [("wide cell", "1")], indent="  ") == (
        "  a          long title\n  wide cell  1"
    )


def test_chosen_columns_are_aligned_to_the_right():
    """Numbers are compared by their last digits."""
    assert table(("rule", "S"), [("stash", "2"), ("none", "16")], right=[1]) == (
        "rule    S\nstash   2\nnone   16"
    )


def test_a_row_with_a_missing_cell_is_our_own_error():
    """A shifted column would be a wrong number without a word."""
    with pytest.raises(ValueError, match="shorter"):
        table(("a", "b"), [("1",)])
