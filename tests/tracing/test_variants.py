"""Graphs of one model: found by form and shape, captured if missing, captured again in other
processes.
"""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

from penstock.errors import ChainError
from penstock.tracing.traced_chain import chain


class Choosing(nn.Module):
    """Takes another branch for odd lengths, and with a second input."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x, more=None):
        inner = self.first(x) if x.shape[1] % 2 else self.first(x) * 2
        return self.third(
            torch.relu(self.second(inner) if more is None else self.second(inner) + more)
        )


class Swapping(nn.Module):
    """Runs its layers in another order for odd lengths."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.second(self.first(x)) if x.shape[1] % 2 else self.first(self.second(x))


def through(traced, inputs):
    """Run layer by layer, with every cut."""
    value = inputs
    for index, module in enumerate(traced.modules):
        value = module(value)
        if index in traced.exits:
            value = traced.entries[index + 1](traced.exits[index](value), inputs)
    return value


def test_each_form_or_shape_of_inputs_has_one_graph():
    """A graph must not be used for inputs for which it is invalid; tracing takes seconds, so it is
    done once.
    """
    torch.manual_seed(0)
    model = Choosing()
    traced = chain(model, torch.randn(3, 6, 4))
    variants = traced.modules[0].variants
    counts = []
    for inputs in (torch.randn(2, 6, 4), torch.randn(5, 8, 4), torch.randn(2, 5, 4), torch.randn(4, 7, 4), torch.randn(1, 5, 4),
                   (torch.randn(3, 6, 4), torch.ones(4))):  # fmt: skip
        expected = model(*inputs) if isinstance(inputs, tuple) else model(inputs)
        torch.testing.assert_close(through(traced, inputs), expected)
        counts.append(len(variants.all()))
    assert counts == [2, 2, 3, 3, 4, 5]


def test_a_form_for_which_layers_run_in_another_order_is_refused():
    """A layer's weights are on one rank, so it cannot run elsewhere."""
    traced = chain(Swapping(), torch.randn(3, 6, 4))
    with pytest.raises(ChainError, match=r"for inputs of this form"):
        through(traced, torch.randn(3, 5, 4))


def test_a_chain_sent_to_another_process_is_traced_again_there():
    """ps.launch pickles what a function refers to."""
    torch.manual_seed(0)
    model = Choosing()
    traced = chain(model, torch.randn(3, 6, 4))
    inputs = torch.randn(2, 6, 4)
    received = pickle.loads(pickle.dumps(traced))
    assert received.fingerprint == traced.fingerprint
    torch.testing.assert_close(through(received, inputs), model(inputs))


def test_replicas_of_layers_have_separate_tensors_and_the_same_graphs():
    """Replicas of a stage have separate weights and the same computation."""
    traced = chain(Choosing(), torch.randn(3, 6, 4))
    copied = copy.deepcopy(nn.ModuleList(traced.modules))[0]
    assert copied.variants is traced.modules[0].variants
    assert copied.weight("first.weight") is dict(copied.named_parameters())["first.weight"]
    assert copied.weight("first.weight") is not traced.modules[0].weight("first.weight")


def test_under_autocast_a_model_is_traced_as_it_runs_there():
    """A model may branch on dtypes, which autocast changes."""

    class Casting(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            inner = self.first(x)
            return self.second(inner.float().softmax(-1).to(inner.dtype)), inner * 2

    model = Casting()
    inputs = torch.randn(3, 4)
    traced = chain(model, inputs)
    with torch.autocast("cpu", torch.bfloat16):
        for output, expected in zip(through(traced, inputs), model(inputs), strict=True):
            assert output.dtype is expected.dtype is torch.bfloat16
            assert torch.equal(output, expected)
