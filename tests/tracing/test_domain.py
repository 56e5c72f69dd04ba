"""Shapes of inputs for which a graph is valid, and the sizes that its values have for them."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.export import Dim, export

from penstock.tracing.domain import Domain


class Branches(nn.Module):
    """A model with a branch by shape, and with values of several sizes."""

    def forward(self, x, y):
        """Return values; the first branch is taken for two columns and more."""
        if x.shape[1] > 2:
            x = x * 2
        return x @ x.t(), x.reshape(-1), y.sum(), x[x > 0], x.new_zeros(4, 3)


@pytest.fixture(scope="module")
def graph():
    """The graph of the model for inputs (n, m) and (n, 3), and its values."""
    rows, columns = Dim("rows", max=9), Dim("columns", min=3)
    example = (torch.ones(4, 5), torch.ones(4, 3))
    program = export(
        Branches(), example, dynamic_shapes=({0: rows, 1: columns}, {0: rows, 1: None})
    )
    (output,) = program.graph.find_nodes(op="output")
    return program.graph, [node.meta["val"] for node in output.args[0]]


def inputs(rows, columns, others=3, more_rows=None):
    """Return inputs of these sizes."""
    return [torch.ones(rows, columns), torch.ones(more_rows or rows, others)]


def test_a_graph_is_valid_for_the_shapes_that_take_its_branches(graph):
    """Within the ranges of its symbols, where equal symbols have equal sizes."""
    domain = Domain.of(graph[0])
    assert domain.has(inputs(4, 5))
    assert domain.has(inputs(9, 3))
    assert not domain.has(inputs(10, 5)), "more rows than declared"
    assert not domain.has(inputs(4, 2)), "the other branch"
    assert not domain.has(inputs(4, 5, others=2)), "a size that is a number"
    assert not domain.has(inputs(4, 5, more_rows=5)), "two sizes of one symbol"
    assert not domain.has([torch.ones(4, 5, 1), torch.ones(4, 3)]), "another number of dimensions"


@pytest.mark.parametrize(("rows", "columns"), [(4, 5), (2, 7)])
def test_numbers_of_elements_follow_the_shapes_of_the_inputs(graph, rows, columns):
    """Those that depend on the contents are not known."""
    domain = Domain.of(graph[0])
    numbers = [domain.elements(value, inputs(rows, columns)) for value in graph[1]]
    assert numbers == [rows * rows, rows * columns, 1, None, 12]


def test_a_graph_without_symbols_is_valid_for_one_shape():
    """Its values have one size."""
    program = export(nn.Linear(3, 2), (torch.ones(4, 3),))
    domain = Domain.of(program.graph)
    (output,) = program.graph.find_nodes(op="output")
    assert domain.elements(output.args[0][0].meta["val"], [torch.ones(4, 3)]) == 8
    assert domain.has([torch.ones(2, 2), torch.ones(2), torch.ones(4, 3)]) is False
    shapes = [torch.ones(size) for size in domain.sizes]
    assert domain.has(shapes)
