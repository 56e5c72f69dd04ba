"""Functions in graphs of losses that act on all samples together, and likelihoods by row."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from penstock.losses.graph import (
    Nonlinearity,
    divides_smoothing_by_zero,
    is_per_row,
    nonlinear_in_batch,
    nonlinearities,
)


def found(loss, *outputs):
    """Names and sizes of the functions of `outputs` in the graph of a loss."""
    return sorted((one.name, one.size) for one in nonlinearities(loss, outputs))


def test_functions_of_outputs_are_listed_with_their_sizes():
    """Not those of targets and constants, nor of other leaves."""
    x, other = torch.randn(6, 4, requires_grad=True), torch.randn(5, requires_grad=True)
    loss = (x.abs().mean() - 0.1).abs() + other.relu().sum() + torch.ones(3).abs().sum()
    assert found(loss, x) == [("Abs", 1), ("Abs", 24)]
    assert found(loss, other) == [("Relu", 5)]
    assert found(loss, x, other) == [("Abs", 1), ("Abs", 24), ("Relu", 5)]
    assert found(loss) == []
    assert found(x.square().mean().sqrt(), x) == []
    assert found(torch.zeros(()), x) == []
    assert found(functional.smooth_l1_loss(x, torch.zeros(6, 4)), x) == [("SmoothL1Loss", 24)]
    assert found(x.clamp(min=0).max(), x) == [("Clamp", 24), ("Max", 1)]


#: Functions that are linear in parts, or nearly so, by their names in a graph.
PIECEWISE = {
    "Abs": torch.abs,
    "Amax": torch.amax,
    "Amin": torch.amin,
    "Clamp": lambda x: x.clamp(0, 1),
    "ClampMax": lambda x: torch.clamp_max(x, 0),
    "ClampMin": lambda x: torch.clamp_min(x, 0),
    "Elu": functional.elu,
    "Fmax": lambda x: torch.fmax(x, torch.zeros(3)),
    "Fmin": lambda x: torch.fmin(x, torch.zeros(3)),
    "Gelu": functional.gelu,
    "Hardshrink": functional.hardshrink,
    "Hardsigmoid": functional.hardsigmoid,
    "Hardswish": functional.hardswish,
    "Hardtanh": functional.hardtanh,
    "LeakyRelu": functional.leaky_relu,
    "LogSigmoid": functional.logsigmoid,
    "Logsumexp": lambda x: x.logsumexp(0),
    "Max": lambda x: x.max(),
    "Maximum": lambda x: torch.maximum(x, torch.zeros(3)),
    "Min": lambda x: x.min(),
    "Minimum": lambda x: torch.minimum(x, torch.zeros(3)),
    "Mish": functional.mish,
    "Prelu": lambda x: functional.prelu(x, torch.tensor([0.5])),
    "Relu": torch.relu,
    "Silu": functional.silu,
    "Softplus": functional.softplus,
    "Softshrink": functional.softshrink,
    "Threshold": lambda x: functional.threshold(x, 0.5, 0.0),
    "Where": lambda x: torch.where(x > 0, x, 2 * x),
    "HuberLoss": lambda x: functional.huber_loss(x, torch.zeros(3)),
    "SmoothL1Loss": lambda x: functional.smooth_l1_loss(x, torch.zeros(3)),
    "SoftMarginLoss": lambda x: functional.soft_margin_loss(x, torch.ones(3)),
    "MultiMarginLoss": lambda x: functional.multi_margin_loss(x, torch.tensor(0)),
    "MultilabelMarginLoss": lambda x: functional.multilabel_margin_loss(
        x, torch.tensor([0, -1, -1])
    ),
}


@pytest.mark.parametrize("name", PIECEWISE)
def test_all_functions_that_are_linear_in_parts_are_listed(name):
    """No numeric test tells them from linear ones where all samples stay in one part."""
    x = torch.tensor([0.3, -0.2, 0.1], requires_grad=True)
    value = PIECEWISE[name](x)
    size = 3 if name.endswith("Loss") else value.numel()
    assert found(value.sum(), x) == [(name, size)]
    scalar = value.mean() if value.dim() else value
    assert found(PIECEWISE["Abs"](scalar), x) == sorted([("Abs", 1), (name, size)])


def test_a_function_that_is_used_twice_is_listed_once_per_use_in_the_graph():
    """One node is one function; the walk does not recurse."""
    x = torch.randn(3, requires_grad=True)
    bent = x.relu()
    assert found((bent * bent + bent).sum(), x) == [("Relu", 3)]
    value = x
    for _ in range(3000):
        value = value + 1
    assert found(value.relu().sum(), x) == [("Relu", 3)]


def function(name, size):
    """A function of a size."""
    return Nonlinearity(name, size)


@pytest.mark.parametrize(
    ("first", "second", "joined", "expected"),
    [
        ([("Abs", 1)], [("Abs", 1)], [("Abs", 1)], "Abs"),
        ([("Abs", 2)], [("Abs", 3)], [("Abs", 5)], None),
        ([("Abs", 4)], [("Abs", 4)], [("Abs", 8)], None),
        ([("Abs", 0)], [("Abs", 0)], [("Abs", 0)], None),
        ([("Abs", 2), ("Max", 1)], [("Abs", 3), ("Max", 1)], [("Abs", 5), ("Max", 1)], "Max"),
        ([("Max", 1), ("Abs", 1)], [("Max", 1), ("Abs", 1)], [("Max", 1), ("Abs", 1)], "Max"),
        ([("Abs", 1)], [("Max", 1)], [("Abs", 1)], None),
        ([("Abs", 1)], [("Abs", 1)], [("Abs", 1), ("Abs", 1)], None),
        ([], [], [], None),
    ],
)
def test_a_function_whose_size_does_not_grow_acts_on_all_samples(first, second, joined, expected):
    """Functions that occur once per sample are more in the joined batch."""
    parts = [[function(*one) for one in part] for part in (first, second, joined)]
    assert nonlinear_in_batch(*parts) == expected


def likelihood(compute, shape=(4, 5, 7)):
    """The node of a likelihood and its target."""
    x = torch.randn(shape, requires_grad=True)
    target = torch.arange(20).reshape(4, 5) % 7
    return compute(x, target).grad_fn, target


def rows_of(x, y):
    """Tokens one by one."""
    return functional.cross_entropy(x.flatten(0, 1), y.flatten())


PER_ROW = {
    "tokens": rows_of,
    "views": lambda x, y: functional.cross_entropy(x.reshape(-1, 7), y.reshape(-1)),
    "copied": lambda x, y: rows_of(x.double().clone(), y),
    "shifted": lambda x, y: rows_of(x[:, :-1].contiguous(), y[:, 1:]),
    "turned twice": lambda x, y: rows_of(x.transpose(1, 2).transpose(1, 2), y),
}
MIXED = {
    "weighted": lambda x, y: functional.cross_entropy(x.flatten(0, 1), y.flatten(), torch.ones(7)),
    "reversed": lambda x, y: rows_of(x, y.flip(0)),
    "scaled": lambda x, y: rows_of(x * 2, y),
    "over samples": lambda x, y: functional.nll_loss(x.flatten(0, 1).log_softmax(0), y.flatten()),
    "turned": lambda x, y: rows_of(x[:, :4].transpose(0, 1), y[:, :4].t()),
    "samples with targets of others": lambda x, y: rows_of(x.transpose(0, 1), y),
    "the same by dimensions in another order": lambda x, y: rows_of(x.transpose(1, 0), y),
    "by negative dimensions": lambda x, y: rows_of(x.transpose(-2, -3), y),
    "cut samples": lambda x, y: rows_of(x[:3], y[:3]),
    "other columns": lambda x, y: functional.cross_entropy(
        x.reshape(-1, 14)[:, :7].repeat(2, 1), y.flatten()
    ),
}


@pytest.mark.parametrize("name", PER_ROW)
def test_each_row_of_an_output_has_its_own_target(name):
    """Samples do not interact, so that no test is needed."""
    node, target = likelihood(PER_ROW[name])
    assert is_per_row(node, target)


@pytest.mark.parametrize("name", MIXED)
def test_rows_that_are_mixed_or_weighted_or_computed_are_not_taken_for_rows(name):
    """The numeric test then decides."""
    node, target = likelihood(MIXED[name])
    assert not is_per_row(node, target)


@pytest.mark.parametrize("shape", [(2, 3), (2, 3, 4), (2, 3, 2, 2)])
def test_smoothing_is_divided_by_zero_where_no_class_that_occurs_has_a_weight(shape):
    """For rows, sequences and images; not of ignored targets, nor without smoothing, weights or
    the division.
    """
    x, weight = torch.randn(shape, requires_grad=True), torch.tensor([0.0, 1.0, 2.0])
    zeros = torch.zeros((2, *shape[2:]), dtype=torch.int64)

    def divides(target, weight=weight, smoothing=0.1, **options):
        loss = functional.cross_entropy(
            x, target, weight, ignore_index=2, label_smoothing=smoothing, **options
        )
        return divides_smoothing_by_zero(loss.mean())

    partly_ignored = zeros.clone()
    partly_ignored[0] = 2
    assert divides(zeros)
    assert divides(partly_ignored)
    assert not divides(zeros + 1)
    assert not divides(zeros + 2)
    assert not divides(zeros, smoothing=0.0)
    assert not divides(zeros, weight=None)
    assert not divides(zeros, reduction="sum")
    assert not divides_smoothing_by_zero(torch.zeros(()))
