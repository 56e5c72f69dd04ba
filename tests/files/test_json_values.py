"""JSON that a reader takes, and what it refuses: always one line with the file."""

from __future__ import annotations

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
