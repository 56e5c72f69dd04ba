"""YAML that a reader takes, and what it refuses: always one line with the file and the place."""

from __future__ import annotations

import functools

import pytest

from penstock.errors import FileError
from penstock.files import yaml_values
from penstock.files.yaml_values import MAX_CHARACTERS, yaml_text, yaml_value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("", None),
        ("# a comment\n", None),
        ("a: 1\nb: [x, 2.5, null, true]\n", {"a": 1, "b": ["x", 2.5, None, True]}),
        ("{a: {b: []}}", {"a": {"b": []}}),
        ("rate: 1e-3", {"rate": 0.001}),
        ("rate: 2.5E6", {"rate": 2.5e6}),
        ("rate: '1e-3'", {"rate": "1e-3"}),
        ("day: 2026-13-45", {"day": "2026-13-45"}),
        ("time: 1:30", {"time": "1:30"}),
        ("'1': x", {"1": "x"}),
        ("text: |\n  two\n  lines\n", {"text": "two\nlines\n"}),
        ("n: 18446744073709551615", {"n": 2**64 - 1}),
        ("x: " + "[" * 39 + "]" * 39, {"x": functools.reduce(lambda x, _: [x], range(38), [])}),
        ("a: '1:30'\nb: -1:30.5\nc: 12:30:15", {"a": "1:30", "b": "-1:30.5", "c": "12:30:15"}),
        ("a: -1.5e+3\nb: .5E2\nc: 1.e1", {"a": -1500.0, "b": 50.0, "c": 10.0}),
    ],
)
def test_plain_values_are_read(text, value):
    """Numbers with an exponent are numbers; dates and times are texts."""
    assert yaml_value(text, "lab.yaml") == value


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [", "line 2, column 1: while parsing a flow node, did not find expected node content"),
        ("a: 1\nb: {c: 2, c: 3}", "line 2, column 11: duplicate key 'c': remove one of them"),
        ("a: 1\n'a': 2", "line 2, column 1: duplicate key 'a'"),
        ("a: &x [1]\nb: *x", "line 1, column 4: anchors and aliases"),
        ("a: *x", "anchors and aliases"),
        ("<<: {a: 1}", "merge keys"),
        ("1: a", "the key 1 is not a text: put it in quotes"),
        ("[a]: b", r"the key \['a'\] is not a text"),
        ("a: .inf", ".inf is not a finite number"),
        ("a: .nan", ".nan is not a finite number"),
        ("a: 1e400", "1e400 is not a finite number"),
        ("a: 18446744073709551616", "is beyond the integers of 64 bits"),
        ("a: " + "9" * 10_000, "has no value|is beyond"),
        ("a: " + "[" * 50, "more than 40 levels"),
        ("a: " + "[" * 40 + "]" * 40, "more than 40 levels"),
        ("k:\n" * 60_000, "there are more than 100,000 values"),
        ("!!python/object/apply:os.system ['true']", "the tag .*os.system' is not allowed"),
        ("a: !!binary aGVsbG8=", "the tag .*binary' is not allowed"),
        ("a: !!seq x", "the tag .*seq' is not allowed"),
        ("a: !!map [b]", "the tag .*map' is not allowed"),
        ("a: !!str [b]", "the tag .*str' is not allowed"),
        ("a: -18446744073709551616", "is beyond the integers of 64 bits"),
        ("a: !!set {b}", "the tag .*set' is not allowed"),
        ("a: !!int many", "'many' has no value"),
        ("a: 1\n---\nb: 2", "expected a single document"),
        ('a: "\\0"', "the character NUL"),
        ('a: "\\ud800"', "Unicode"),
        ("a: \ud800", "surrogates"),
        ("a: \x07", "control characters|not allowed"),
    ],
)
def test_anything_else_is_refused_with_its_place(text, message):
    """PyYAML itself takes the last of two keys, runs constructors, and unfolds any bomb."""
    with pytest.raises(FileError, match=f"^lab.yaml is not YAML: .*(?:{message})") as caught:
        yaml_value(text, "lab.yaml")
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("[" + "1," * 100_001 + "]", "100,002"),
        ("- a\n" * 100_001, "100,001"),
        ("k: {a: 1}\n" * 25_000, "125,000"),
    ],
    ids=["flow", "block", "mappings"],
)
def test_a_text_of_too_many_values_is_refused_before_it_is_parsed(monkeypatch, text, count):
    """Parsing them would take a second."""
    monkeypatch.setattr(yaml_values, "_StrictLoader", None)
    with pytest.raises(FileError, match=f"has {count} values, more than the 100,000 allowed"):
        yaml_value(text, "lab.yaml")


def test_a_text_beyond_any_description_is_refused_before_it_is_parsed():
    """Parsing takes 100 times the memory of the text."""
    with pytest.raises(FileError, match="1,048,577 characters, more than the 1,048,576 allowed"):
        yaml_value("a" * (MAX_CHARACTERS + 1), "lab.yaml")


@pytest.mark.parametrize(
    "text",
    ["1e3", "1e-3", "-2.5E6", ".5e1", "1", "1.5", "1:30", "2026-01-02", "null", "no", "<<", "=", "",
     "*a", "&a", "!x", "a: b", "1e3\n", "e3", "- x", "~", "0x1F", "1_000", "µ", "\U0001f600"],
)  # fmt: skip
def test_a_text_is_written_so_that_it_reads_back_as_a_text(text):
    """A device may be called 1e3."""
    assert yaml_value(yaml_text({"name": text, text: [text]}), "x") == {"name": text, text: [text]}


def test_equal_values_are_written_without_anchors():
    """The reader would refuse them."""
    row = {"a": [1]}
    assert yaml_value(yaml_text([row, row]), "x") == [row, row]
