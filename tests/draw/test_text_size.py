"""Estimated widths of words."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.draw.text_size import flow_lines, text_width, wrap_text


@given(st.text(max_size=200), st.floats(40, 400))
def test_wrapped_words_keep_every_character_within_the_room(words, room):
    """Words are broken if necessary, and nothing is cut off."""
    lines = wrap_text(words, 12, room)
    assert "".join("".join(lines).split()) == "".join(words.split())
    assert all(text_width(line, 12) <= room for line in lines)


def test_a_full_width_character_counts_as_two_thirds_more_than_a_letter():
    """Titles are written in all scripts."""
    assert text_width("管道", 10) > 1.6 * text_width("ab", 10)


@given(st.lists(st.floats(1, 50), max_size=20))
def test_entries_flow_in_order_and_within_the_room(widths):
    """A lost legend entry would leave a colour without a name."""
    lines = flow_lines(widths, 5, 60)
    assert [index for line in lines for index in line] == list(range(len(widths)))
    assert all(sum(widths[i] for i in line) + 5 * (len(line) - 1) <= 60.001 for line in lines)
