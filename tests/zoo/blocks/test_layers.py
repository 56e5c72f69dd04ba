"""Layers that initialise their weights: from the stated distribution, at construction and at every
reset.
"""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

from penstock.zoo.blocks.layers import HeConv2d, NormalEmbedding, NormalLinear

every_layer = pytest.mark.parametrize(
    ("make", "std"),
    [
        (lambda: HeConv2d(32, 128, 3), (2 / (9 * 128)) ** 0.5),
        (lambda: HeConv2d(32, 128, 3, bias=False), (2 / (9 * 128)) ** 0.5),
        (lambda: NormalLinear(128, 256, std=0.01), 0.01),
        (lambda: NormalLinear(128, 256, std=0.3, bias=False), 0.3),
        (lambda: NormalEmbedding(256, 128, std=0.02), 0.02),
    ],
    ids=["conv", "conv without bias", "linear", "linear without bias", "embedding"],
)


@every_layer
def test_weights_have_the_stated_deviation_at_construction_and_after_a_reset(make, std):
    """The first draw happens inside torch's constructor, before a subclass is usually ready."""
    torch.manual_seed(0)
    layer = make()
    assert layer.weight.std().item() == pytest.approx(std, rel=0.03)
    first = layer.weight.detach().clone()
    nn.init.ones_(layer.weight)
    layer.reset_parameters()
    assert layer.weight.std().item() == pytest.approx(std, rel=0.03)
    assert layer.weight.mean().item() == pytest.approx(0, abs=0.05 * std)
    assert not torch.equal(first, layer.weight)


@pytest.mark.parametrize(
    "make", [lambda: HeConv2d(2, 3, 1), lambda: NormalLinear(2, 3, std=1.0)], ids=["conv", "linear"]
)
def test_biases_start_at_0(make):
    """Torch's own biases are random."""
    layer = make()
    assert not layer.bias.any()
    nn.init.ones_(layer.bias)
    layer.reset_parameters()
    assert not layer.bias.any()


@every_layer
def test_a_copied_or_pickled_layer_draws_from_the_same_distribution(make, std):
    """Ranks get their layers by copying or pickling, which must preserve the standard deviation."""
    torch.manual_seed(0)
    for layer in (copy.deepcopy(make()), pickle.loads(pickle.dumps(make()))):
        layer.reset_parameters()
        assert layer.weight.std().item() == pytest.approx(std, rel=0.03)


def test_the_deviation_is_printed():
    """Two linear maps that print alike but start apart would puzzle."""
    assert "std=0.01" in repr(NormalLinear(2, 3, std=0.01))
    assert "std=0.02" in repr(NormalEmbedding(2, 3, std=0.02))
