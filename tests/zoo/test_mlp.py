"""MLP: how many layers, which sizes."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from penstock.zoo.blocks.layers import NormalLinear
from penstock.zoo.catalogue import model


@settings(deadline=None, max_examples=25)
@given(
    layers=st.integers(2, 9),
    features=st.integers(1, 9),
    hidden=st.integers(1, 9),
    classes=st.integers(1, 9),
)
def test_layers_and_parameters_follow_the_stated_formulas(layers, features, hidden, classes):
    """Tests elsewhere cut chains of a length that they work out from `layers`."""
    network = model("mlp", layers=layers, features=features, hidden=hidden, classes=classes)
    stated = (features + 1) * hidden + (layers - 2) * (hidden + 1) * hidden + (hidden + 1) * classes
    assert sum(parameter.numel() for parameter in network.parameters()) == stated
    assert [type(layer) for layer in network] == [NormalLinear, nn.ReLU] * (layers - 1) + [
        NormalLinear
    ]
    assert network(torch.zeros(3, features)).shape == (3, classes)


def test_one_layer_is_a_single_linear_map():
    """The shortest chain there is."""
    network = model("mlp", layers=1, features=3, classes=2)
    assert list(network._modules) == ["fc1"]
    assert network.fc1.weight.shape == (2, 3)


def test_names_count_from_1():
    """As in the papers' figures: fc1 is the first."""
    assert list(model("mlp", layers=3)._modules) == ["fc1", "relu1", "fc2", "relu2", "fc3"]
