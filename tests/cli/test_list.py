"""`penstock list`: the entries of every catalogue."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from penstock.cli.list import KINDS


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_lists_names_with_their_sources(penstock, kind):
    """A list without sources says nothing about an entry."""
    facts = json.loads(penstock("list", kind, "--json").out)
    assert facts
    assert all(entry["source"] for entry in facts.values())
    printed = penstock("list", kind)
    assert printed.status == 0
    assert all(name in printed.out for name in facts)


def test_an_unknown_kind_is_refused_with_all_kinds(penstock):
    """The names must be listed, since users cannot know them all."""
    run = penstock("list", "planer")
    assert run.status == 2
    assert "no kind of entry called 'planer'. Did you mean 'planners'?" in run.err


#: Lists all kinds, and prints which of the slow libraries were imported.
_LIST_ALL = """
import sys
from penstock.cli.flags import model_flags, options
from penstock.cli.list import KINDS

for list_entries in KINDS.values():
    list_entries()
assert model_flags.complete_models() and options.complete_schedules()
print(sorted({"torch", "numba"} & set(sys.modules)))
"""


def test_lists_and_completion_load_neither_torch_nor_numba():
    """They take seconds to import, and a shell asks for completions at every press of Tab."""
    listed = subprocess.run(
        [sys.executable, "-c", _LIST_ALL], capture_output=True, text=True, check=True
    )
    assert listed.stdout.strip() == "[]"
