"""`make check NAME=...`: which tests it runs for an entry. CONTRIBUTING's entries are checked by it
in test_contributing.py.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.check_entry import KINDS, all_entries, find, main, missing_parts

from penstock.errors import UnknownName

ROOT = Path(__file__).parents[2]


def test_an_unknown_name_gets_one_message_with_near_names(capsys):
    """The exit status is that of a usage error."""
    assert main(["zb-h3"]) == 2
    message = capsys.readouterr().out
    assert message.startswith("no catalogue entry called 'zb-h3'. Did you mean 'zb-h")
    assert len(message.splitlines()) == 1
    assert main([]) == main([""]) == 2
    with pytest.raises(UnknownName, match="stahs"):
        find(["zb-h1", "stahs"])


def test_every_entry_is_defined_in_a_file_and_has_tests_that_concern_it():
    """A file that was moved would silently be left out."""
    for entry in all_entries():
        assert entry.source.exists(), entry
        if entry.kind is KINDS["option"]:
            assert set(entry.files()) > set(entry.kind.laws), f"no test mentions {entry.name}"
        assert [path for path in entry.files() if not (ROOT / path).exists()] == []


def test_a_name_of_several_kinds_is_checked_as_all_of_them():
    """PipeDream is a schedule and a planner."""
    assert [entry.kind.name for entry in find(["pipedream"])] == ["schedule", "planner"]


@pytest.mark.parametrize(
    ("parameters", "selected"),
    [
        ("1f1b-4-8-gpt-never", True),
        ("x2-1f1b", True),
        ("eager-1f1b-4-8", False),
        ("seq1f1b", False),
        ("gpipe", False),
    ],
)
def test_tests_of_longer_names_are_not_those_of_a_shorter_one(parameters, selected):
    """`-k 1f1b` would run eager-1f1b and seq1f1b as well."""
    (entry,) = find(["1f1b"])
    item = SimpleNamespace(name=f"test_x[{parameters}]", path=ROOT / "tests" / "elsewhere.py")
    assert entry.selects(item, frozenset({"eager-1f1b", "seq1f1b"})) is selected


def test_an_option_is_tested_where_it_is_mentioned():
    """An option of training has no file of its own."""
    (entry,) = find(["clip_grad_norm"])
    assert entry.kind is KINDS["option"]
    assert "tests/runtime/test_optimizers.py" in entry.files()
    assert entry.source.name == "option.py"
    of_all_options = SimpleNamespace(name="test_x", path=ROOT / "tests" / "test_option.py")
    assert entry.selects(of_all_options, frozenset())


def test_an_option_that_no_test_mentions_is_something_still_to_do():
    """It would pass the check with no test at all."""
    (entry,) = find(["clip_norm_type"])
    assert entry.source.name == "training_options.py"
    assert list(missing_parts(entry)) == []
    name = f"{entry.name}_again"
    (request,) = missing_parts(replace(entry, name=name))
    assert request == f"write a test in tests/runtime that passes {name}= to ps.Pipeline"


def test_a_missing_test_file_is_something_still_to_do(tmp_path):
    """The laws hold what all entries share, not what is special about one."""
    (entry,) = find(["uniform"])
    entry = SimpleNamespace(
        kind=entry.kind, source=entry.source, own_tests=ROOT / "tests/partition/test_missing.py"
    )
    (request,) = missing_parts(entry)
    assert request.startswith("write tests/partition/test_missing.py")
