"""Text of other ranks: it is shown, and does nothing."""

from __future__ import annotations

import unicodedata

from hypothesis import given
from hypothesis import strategies as st

from penstock.ranks.foreign_text import foreign_text


def test_a_forged_line_and_terminal_codes_are_shown_escaped():
    """A line of another rank cannot pass for one of this program's messages."""
    text = "rank 1 failed\nerror: all is well\x1b[2J\r\u202eabc\x00"
    assert foreign_text(text) == ("rank 1 failed\n  error: all is well\\x1b[2J\\r\\u202eabc\\x00")


def test_plain_messages_stay_as_they_are():
    """Messages of several lines indent them already."""
    text = "rank 0 has waited 5 s\n  rank 1 waits since 5 s\n\n  größer, 大"
    assert foreign_text(text) == text


def test_long_texts_are_cut():
    """A message does not fill a terminal for minutes."""
    assert len(foreign_text("x" * 1_000_000)) < 25_000


@given(st.text())
def test_no_text_has_control_characters_or_lines_at_the_margin(text):
    """Of any Unicode, also of surrogates; the result can be printed as UTF-8."""
    first, *others = foreign_text(text).split("\n")
    assert all(line == "" or line.startswith(" ") for line in others)
    for character in first + "".join(others):
        assert character.isprintable() or unicodedata.category(character) == "Zs"
    "\n".join([first, *others]).encode()


def test_texts_are_cut_only_above_the_limit_and_say_how_long_they_were():
    """A text of exactly that length is whole."""
    whole = "x" * 20_000
    assert foreign_text(whole) == whole
    assert foreign_text(whole + "y") == whole + "… (20,001 characters)"


def test_lines_of_another_process_are_indented_unless_they_are_or_are_empty():
    """Also an empty text has a first line."""
    assert foreign_text("") == ""
    assert foreign_text("a\n\n b\nc\n") == "a\n\n b\n  c\n"
    assert foreign_text("\tb\u00a0c\u2028d") == "\\tb\u00a0c\\u2028d"
