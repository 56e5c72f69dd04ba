"""Properties of single ops of a graph."""

from __future__ import annotations

import torch
from torch import fx

from penstock.tracing.ops import argument

aten = torch.ops.aten


def test_arguments_are_found_by_name_in_the_schema():
    """By keyword, by position, or the default of the caller."""
    graph = fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    plain = graph.call_function(aten.cross_entropy_loss.default, (x, y))
    full = graph.call_function(aten.cross_entropy_loss.default, (x, y, None, 2, -7))
    named = graph.call_function(aten.cross_entropy_loss.default, (x, y), {"ignore_index": 5})
    ignored = [argument(node, "ignore_index", -100) for node in (plain, full, named)]
    assert ignored == [-100, -7, 5]
    assert [argument(node, "reduction", 1) for node in (plain, full, named)] == [1, 2, 1]
    assert argument(full, "no_such_argument", 9) == 9
