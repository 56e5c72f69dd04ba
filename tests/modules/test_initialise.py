"""Initial values of a traced model on the meta device: by its own methods, or an error."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from penstock.errors import ChainError
from penstock.tracing.materialise import materialise
from penstock.tracing.traced_chain import chain


class Angles(nn.Module):
    """A table computed by the constructor."""

    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.arange(4.0), persistent=False)

    def forward(self, x):
        return torch.arange(x.shape[0])[:, None] * self.table


class Model(nn.Module):
    """Initialises its weights by the methods of several libraries."""

    def __init__(self):
        super().__init__()
        self.angles, self.first, self.scale, self.norm = (
            Angles(),
            nn.Linear(4, 4),
            nn.Parameter(torch.ones(4)),
            nn.BatchNorm1d(4),
        )

    def forward(self, x):
        return self.norm(self.first(x + self.angles(x)) * self.scale)


class WithInitWeights(Model):
    """With `_init_weights`, the method of the transformers library."""

    def _init_weights(self, module):
        if isinstance(module, Angles):
            module.table.copy_(torch.arange(4.0))
        if isinstance(module, nn.Linear):
            nn.init.constant_(module.weight, 0.5)
        if isinstance(module, WithInitWeights):
            nn.init.ones_(module.scale)


class Resetting(WithInitWeights):
    """With `reset_parameters`, torch's method, for its own tensors."""

    def _init_weights(self, module):
        if isinstance(module, Angles):
            module.table.copy_(torch.arange(4.0))

    def reset_parameters(self):
        nn.init.constant_(self.scale, 3.0)


def on_meta(kind):
    """Return a model without memory."""
    with torch.device("meta"):
        return kind()


def test_weights_are_initialised_by_reset_parameters_and_then_by_the_enclosing_model():
    """The constructor does both in this order; statistics begin as in batch norm."""
    inputs = torch.randn(3, 4)
    traced = chain(on_meta(WithInitWeights), inputs)
    layers = materialise(traced, range(len(traced)), torch.device("cpu"), seed=1)
    state = {name: value for layer in layers for name, value in layer.state_dict().items()}
    assert set(state) == set(WithInitWeights().state_dict())
    assert torch.equal(state["first.weight"], torch.full((4, 4), 0.5))
    assert torch.equal(state["scale"], torch.ones(4))
    assert torch.equal(state["norm.running_var"], torch.ones(4))
    assert state["first.bias"].abs().max() <= 0.5
    plain = WithInitWeights()
    plain.load_state_dict(state)
    value = inputs
    for layer in layers:
        value = layer(value)
    torch.testing.assert_close(value, plain(inputs))


def test_a_module_without_reset_parameters_is_initialised_by_the_enclosing_module():
    """For example a parameter of the model itself."""
    traced = chain(on_meta(Resetting), torch.randn(3, 4))
    layers = materialise(traced, range(len(traced)), torch.device("cpu"), seed=1)
    state = {name: value for layer in layers for name, value in layer.state_dict().items()}
    assert torch.equal(state["scale"], torch.full((4,), 3.0))


def test_a_tensor_that_nothing_gives_a_value_is_refused_by_name():
    """Training from uninitialised memory would give an arbitrary result."""
    traced = chain(on_meta(Model), torch.randn(3, 4))
    with pytest.raises(
        ChainError,
        match=r"scale \(Model\) is on the meta device, and neither reset_parameters\(\) of its module nor",
    ):
        materialise(traced, range(len(traced)), torch.device("cpu"), seed=1)


def test_a_table_that_only_the_constructor_computes_is_refused_by_name():
    """Every rank recomputes from it, and on the meta device it has no values."""

    class Alone(nn.Module):
        def __init__(self):
            super().__init__()
            self.angles, self.first = Angles(), nn.Linear(4, 4)

        def forward(self, x):
            return self.first(x + self.angles(x))

    traced = chain(on_meta(Alone), torch.randn(3, 4))
    layer = materialise(traced, [0], torch.device("cpu"), seed=1)[0]
    with pytest.raises(ChainError, match=r"angles\.table \(Angles\) is on the meta device"):
        layer(torch.randn(3, 4))
