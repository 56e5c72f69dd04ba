"""The schedules and options that the page offers."""

from __future__ import annotations

import pytest

from penstock.errors import SettingError, UnknownName
from penstock.explore.choices import choice, choices, value_text
from penstock.search.schedules import schedule, schedules


def test_every_schedule_is_offered_with_a_sentence_and_a_source():
    """A new schedule appears by itself."""
    assert choices().keys() == schedules().keys()
    for entry in choices().values():
        assert entry.about.endswith((".", ":"))
        assert "`" not in entry.about
        assert entry.facts.source


def test_options_are_those_of_the_signatures():
    """Number of stages, micro-batches and batches are fields of the page itself."""
    names = {name: [field.name for field in entry.fields] for name, entry in choices().items()}
    assert names["interleaved"] == ["chunks", "group"]
    assert names["1f1b"] == ["warm_up"]
    assert names["pipedream"] == ["warm_up"]
    assert names["zb-h1"] == []
    kinds = {field.name: field.kind for entry in choices().values() for field in entry.fields}
    assert kinds["chunks"] == kinds["sliced"] == "int"
    assert kinds["ratio"] == "float"
    assert kinds["warm_up"] == "ints"
    assert kinds["slice_shares"] == "floats"


def test_words_of_an_option_are_all_accepted_and_the_first_is_the_default():
    """The select fields offer nothing that a schedule refuses."""
    checked = 0
    for name, entry in choices().items():
        for field in entry.fields:
            assert (field.kind == "str") == bool(field.words)
            for word in field.words:
                stages = 8 if entry.facts.stages_per_rank == "chunks" else 4
                assert schedule(name, stages, 16, **{field.name: field.parse(word)})
                assert field.default in field.words
                checked += 1
    assert checked >= 6


def test_an_alias_is_found_and_an_unknown_name_is_not():
    """`dapple` is 1F1B."""
    assert choice("dapple") is choices()["1f1b"]
    with pytest.raises(UnknownName, match="no schedule called 'x'"):
        choice("x")


def test_an_option_that_a_schedule_does_not_have_is_refused():
    """The message names those that it has."""
    with pytest.raises(SettingError, match="no option 'x'; its options: chunks, group"):
        choices()["interleaved"].field("x")
    with pytest.raises(SettingError, match="its options: none"):
        choices()["zb-h1"].field("x")


def test_values_are_read_back_as_they_were():
    """Of each kind."""
    fields = {field.name: field for entry in choices().values() for field in entry.fields}
    for name, value in (
        ("chunks", 3),
        ("ratio", 1.5),
        ("warm_up", (4, 3)),
        ("slice_shares", (0.25, 0.75)),
        ("split", True),
        ("split", False),
        ("backward_order", "reverse"),
    ):
        assert fields[name].parse(value_text(value)) == value
