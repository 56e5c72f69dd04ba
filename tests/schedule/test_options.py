"""Messages for options that a schedule does not take."""

from __future__ import annotations

from penstock.schedule.options import option_error, option_names


def make(stages, micro_batches, chunks=2, *, group=None, **others):
    """A schedule's function with options of every kind."""


def test_options_are_the_arguments_after_the_numbers():
    """Keyword arguments that are collected in a dictionary have no names to tell."""
    assert option_names(make) == ("chunks", "group")
    assert option_names(lambda stages, micro_batches: None) == ()


def test_only_unknown_options_are_named():
    """Known ones are listed as what it takes."""
    error = option_error("zb", {"chunks": 2, "size": 1}, ("chunks", "group"), TypeError("x"))
    assert str(error) == "zb does not take size: it takes chunks, group"
    assert str(option_error("zb", {"a": 2}, (), TypeError("x"))) == (
        "zb does not take a: it takes no options"
    )


def test_a_wrong_type_of_a_known_option_shows_the_values_and_the_reason():
    """Which of several values is wrong only Python's own words tell."""
    error = option_error("zb", {"chunks": "2"}, ("chunks",), TypeError("no len()"))
    assert str(error) == "zb cannot use chunks='2': no len()"
    several = option_error("zb", {"a": "2", "b": 3}, ("b", "a"), TypeError("no len()"))
    assert str(several) == "zb cannot use a='2', b=3: no len()"
    mixed = option_error("zb", {"x": 1, "a": 2, "y": 3}, ("a",), TypeError("x"))
    assert str(mixed) == "zb does not take x, y: it takes a"
