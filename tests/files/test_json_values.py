"""JSON that a reader takes, and what it refuses: always one line with the file."""

from __future__ import annotations

import math

import pytest

from penstock.errors import FileError
from penstock.files.json_values import json_value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('{"a": [1, 2.5, null, true, "x"]}', {"a": [1, 2.5, None, True, "x"]}),
        ('{"a": {"a": 1}}', {"a": {"a": 1}}),
        ("-18446744073709551615", -(2**64) + 1),
        (r'"\\u0000"', r"\u0000"),
        ("1e-400", 0.0),
    ],
)
def test_plain_values_are_read(text, value):
    """The same key in two objects is no duplicate, and an escaped backslash no NUL."""
    assert json_value(text, "plan.json") == value


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is not JSON: it is empty"),
        ('{"a": 1, "b": {"c": 1, "c": 2}}', "is not JSON: duplicate key 'c': remove one of them"),
        ('{"a": 1, "b": 2, "c": 3, "b": 4}', "is not JSON: duplicate key 'b': remove one of them"),
        ("-Infinity", "is not JSON: -Infinity is not a finite number"),
        ("NaN", "is not JSON: NaN is not a finite number"),
        ("[1e400]", "is not JSON: 1e400 is not a finite number"),
        ("18446744073709551616", "is not JSON: 18446744073709551616 is beyond the integers"),
        ("9" * 1_000_000, "is not JSON: 9+… is beyond the integers of 64 bits"),
        ("[" * 100_000, "is not JSON: it has too many levels of nesting"),
        ("[" + "[]," * 500_000 + "[]]", "has 1,000,002 values, more than the 1,000,000 allowed"),
        (r'{"a": "x\u0000"}', "is not JSON: it contains the character NUL"),
        ('"\x00"', "is not JSON: it contains the character NUL"),
        ('"\x07"', "is not JSON: Invalid control character"),
        ('"\ud800"', "is not JSON: character 1 is half of a surrogate pair"),
        ("{} {}", "is not JSON: Extra data"),
    ],
)
def test_anything_else_is_refused(text, message):
    """Python's own reader takes the last of two keys, NaN and numbers of any size."""
    with pytest.raises(FileError, match=f"^plan.json {message}") as caught:
        json_value(text, "plan.json")
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


def test_numbers_that_are_not_finite_are_read_where_they_are_allowed():
    """States of optimizers hold infinities; integers keep their limit."""
    text = '{"best": Infinity, "worst": -1e999, "last": NaN}'
    value = json_value(text, "state", finite=False)
    assert (value["best"], value["worst"]) == (math.inf, -math.inf)
    assert math.isnan(value["last"])
    with pytest.raises(FileError, match="beyond the integers of 64 bits"):
        json_value(str(2**64), "state", finite=False)


def test_the_values_of_a_text_are_counted_up_to_a_limit_of_the_caller():
    """By commas and opening brackets, before the text is parsed."""
    assert json_value('[1, {"a": 2}]', "x", max_values=3) == [1, {"a": 2}]
    with pytest.raises(FileError, match=r"^x has 3 values, more than the 2 allowed$"):
        json_value('[1, {"a": 2}]', "x", max_values=2)
