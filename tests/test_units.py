"""Seconds and bytes, to and from text."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import SettingError
from penstock.units import (
    format_bytes,
    format_count,
    format_ranks,
    format_seconds,
    parse_bytes,
    parse_seconds,
)


@pytest.mark.parametrize(("text", "count"), [
    ("80 GiB", 80 * 2**30), ("80gib", 80 * 2**30), ("16 GB", 16 * 10**9), ("512", 512), (" 1.5 KiB ", 1536), ("2.", 2),
    ("1e3", 1000), ("1E+3 B", 1000), (512, 512), (1.6, 2), ("0", 0), ("3 TiB", 3 * 2**40), ("2 MB", 2 * 10**6),
    ("5 KB", 5000), ("1 MiB", 2**20), ("1 TB", 10**12), ("3 B", 3),
])  # fmt: skip
def test_bytes_are_read_from_what_people_write(text, count):
    """Binary and decimal units are told apart; spaces and case are not."""
    assert parse_bytes(text) == count


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("3 ms", 0.003),
        ("2 min", 120),
        ("0.5", 0.5),
        ("1h", 3600),
        ("10 us", 1e-5),
        ("10 µs", 1e-5),
        ("7ns", 7e-9),
        (4, 4),
        ("5 S", 5),
    ],
)
def test_seconds_are_read_from_what_people_write(text, seconds):
    """A number without a unit is seconds."""
    assert parse_seconds(text) == pytest.approx(seconds, rel=1e-12)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "GiB",
        "-3 GiB",
        "3 parsecs",
        "3 s",
        "1,5 GiB",
        "3 GiB/s",
        "0x10",
        "nan",
        "inf",
        "\u0663 GiB",
        "1e999",
        -1,
        float("nan"),
        float("inf"),
        "1_000",
        "3 G iB",
    ],
)
def test_what_is_no_number_of_bytes_is_refused_with_an_example(text):
    """`1e999`, nan and inf once escaped as Python's own OverflowError and ValueError."""
    with pytest.raises(
        SettingError, match=r"is not a quantity in B, KiB, MiB.*; write for example '80 B'"
    ):
        parse_bytes(text)


@pytest.mark.parametrize("text", ["", "soon", "3 GiB", "-1", -0.5, float("nan"), "1e400 h"])
def test_what_is_no_number_of_seconds_is_refused_with_an_example(text):
    """A negative or endless duration has no meaning anywhere in the program."""
    with pytest.raises(
        SettingError,
        match=r"is not a quantity in ns, us, µs, ms, s, min, h; write for example '80 s'",
    ):
        parse_seconds(text)


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (12, "12 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536, "1.5 KiB"),
        (3 * 2**30, "3.0 GiB"),
        (2**41, "2.0 TiB"),
        (2**52, "4096.0 TiB"),
    ],
)
def test_bytes_are_printed_in_the_unit_that_fits(count, text):
    """One digit after the point is what a person compares."""
    assert format_bytes(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (75, "75.0 s"),
        (1, "1.0 s"),
        (0.0123, "12.3 ms"),
        (5e-6, "5.0 us"),
        (2e-9, "2.0 ns"),
    ],
)
def test_seconds_are_printed_in_the_unit_that_fits(seconds, text):
    """From nanoseconds to minutes of training, as seconds and their parts."""
    assert format_seconds(seconds) == text


@given(st.integers(0, 2**50))
@settings(deadline=None, max_examples=100)
def test_printed_bytes_read_back_within_the_last_digit(count):
    """What we print, we read: settings are copied from reports."""
    assert parse_bytes(format_bytes(count)) == pytest.approx(count, rel=0.06)


@given(st.floats(1e-6, 1e6))
@settings(deadline=None, max_examples=100)
def test_printed_seconds_read_back_within_the_last_digit(seconds):
    """The same for durations."""
    assert parse_seconds(format_seconds(seconds)) == pytest.approx(seconds, rel=0.06)


def test_a_number_may_begin_with_its_point():
    """People write .8 for 0.8."""
    assert parse_seconds(".8") == 0.8
    assert parse_seconds(".5ms") == 0.0005


def test_quantities_that_nothing_has_are_refused():
    """Sums of them overflow, and JSON cannot hold such integers."""
    assert parse_bytes(2**60) == 2**60
    assert parse_seconds(1e9) == 1e9
    with pytest.raises(SettingError, match=r"'1e300' is too large: at most 1\.153e\+18 B"):
        parse_bytes("1e300")
    with pytest.raises(SettingError, match=r"'1e9 h' is too large: at most 1e\+09 s"):
        parse_seconds("1e9 h")


def test_only_one_is_singular():
    """Messages count parameters, ranks and states, of which there may be 0 or 1.5."""
    assert [format_count(number, "state") for number in (0, 1, 1.0, 1.5)] == [
        "0 states",
        "1 state",
        "1 state",
        "1.5 states",
    ]
    assert format_count(2, "process", "processes") == "2 processes"
    assert (format_ranks([3]), format_ranks(range(3))) == ("rank 3", "ranks 0, 1, 2")
