"""`penstock list`: the entries of every catalogue."""

from __future__ import annotations

import json

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
    """Nobody knows them by heart."""
    run = penstock("list", "planer")
    assert run.status == 2
    assert "no kind of entry called 'planer'. Did you mean 'planners'?" in run.err
