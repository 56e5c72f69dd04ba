"""Bytes that a profile counts for the backward of every layer."""

from __future__ import annotations

import math

import pytest
import torch
from tests.measure.profiled import perceptron, quick, saved_bytes
from torch import nn

from penstock.measure import profiler as measuring
from penstock.measure.saved_storages import activation_bytes
from penstock.tracing.traced_chain import chain
from penstock.zoo.catalogue import model

FLOAT = 4
CHAINS = {
    # input for the weights; own result; mask; dropout's result
    "linear maps": (perceptron, (4,), [16, 32, 32, 32]),
    # ReLU keeps its result, and the linear map behind it needs that too: counted once
    "a result that two layers need": (lambda: nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8)), (4,), [16, 32, 0]),
    # a linear map with frozen weights does not need its input
    "frozen weights": (lambda: nn.Sequential(nn.Linear(4, 8).requires_grad_(False), nn.ReLU(), nn.Linear(8, 8)), (4,), [0, 0, 32]),
    # in place: the storage that ReLU keeps is the one that the linear map made
    "in place": (lambda: nn.Sequential(nn.Linear(4, 8), nn.ReLU(inplace=True), nn.Linear(8, 8)), (4,), [16, 32, 0]),
    "dropout of nothing": (lambda: nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.0), nn.Tanh()), (4,), [16, 0, 32]),
    "no weights": (lambda: nn.Sequential(nn.Flatten(), nn.Identity()), (4,), [0, 0]),
    # input; result and, for the 2 samples together, 2 numbers per channel; result; int64 places of
    # the maxima
    "convolution": (lambda: nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)), (3, 4, 4),
                    [3 * 16 * FLOAT, 8 * 16 * FLOAT + 2 * 8 * FLOAT / 2, 8 * 16 * FLOAT, 8 * 4 * 8]),
    # the view has the storage of what it is a view of
    "a view": (lambda: nn.Sequential(nn.Conv2d(1, 2, 1), nn.Flatten(), nn.Linear(8, 3)), (1, 2, 2), [16, 0, 32]),
    "double precision": (lambda: nn.Sequential(nn.Linear(4, 8), nn.Tanh()).double(), (4,), [32, 64]),
}  # fmt: skip


@pytest.mark.parametrize("name", CHAINS)
def test_activation_bytes_are_those_worked_out_by_hand(name):
    """Memory limits decide plans; each storage counts once, at the first layer whose backward needs
    it.
    """
    make, shape, expected = CHAINS[name]
    network = make()
    dtype = next((parameter.dtype for parameter in network.parameters()), torch.float32)
    assert saved_bytes(quick(network, torch.rand(2, *shape, dtype=dtype))) == expected


def vgg_bytes(traced, samples):
    """What each layer of VGG with batch norm keeps per sample at 32 pixels, from the shapes alone."""
    expected, before = {}, "input"
    shape = (3, 32, 32)
    for layer, module in zip(traced, traced.modules, strict=True):
        size = math.prod(shape) * FLOAT
        match layer.kind:
            case "HeConv2d":
                expected[layer.name] = 0 if before == "ReLU" else size
                shape = (module.out_channels, *shape[1:])
            case "BatchNorm2d":
                expected[layer.name] = size + 2 * shape[0] * FLOAT / samples
            case "ReLU" | "Dropout":
                expected[layer.name] = size
            case "MaxPool2d":
                shape = (shape[0], shape[1] // 2, shape[2] // 2)
                expected[layer.name] = math.prod(shape) * 8
            case "Flatten":
                expected[layer.name], shape = 0, (math.prod(shape),)
            case "NormalLinear":
                expected[layer.name] = size
                shape = (module.out_features,)
        before = layer.kind
    return expected


def test_activation_bytes_of_vgg_are_right_layer_by_layer():
    """A model on meta with every common kind of layer. One run, which could not be repeated, had 0
    for its dropouts.
    """
    traced = chain(model("vgg11_bn", device="meta", image=32, classes=10))
    measured = quick(traced, torch.rand(2, 3, 32, 32))
    expected = vgg_bytes(traced, 2)
    assert {layer.name: layer.activation_bytes_per_sample for layer in measured} == expected
    assert expected["classifier.drop6"] == expected["classifier.drop7"] == 16384
    assert sum(layer.parameters for layer in measured) == traced.parameter_count


def test_every_count_of_activation_bytes_is_the_same_again():
    """Storages are told apart by address, and addresses are given again once their storage is
    freed.
    """
    network = nn.Sequential(
        *(part for _ in range(12) for part in (nn.Linear(16, 16), nn.Dropout(0.5), nn.Tanh()))
    )
    modules = measuring._copies(chain(network), torch.device("cpu"))
    counts = {
        tuple(layer.saved for layer in activation_bytes(modules, torch.rand(4, 16)))
        for _ in range(50)
    }
    assert counts == {(256, 256, 256) + (0, 256, 256) * 11}


def test_a_stage_keeps_its_input_where_that_counts_elsewhere_or_nowhere():
    """Cut behind a ReLU, both stages keep what it made: one of the two was left out, 9 % of
    ResNet-18's memory in 4 stages.
    """
    measured = quick(
        nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2), nn.Identity(), nn.Tanh()),
        torch.ones(2, 4),
    )
    assert saved_bytes(measured) == [16, 32, 0, 0, 8]
    assert [layer.entry_bytes_per_sample for layer in measured] == [
        0,  # counts here: the weights' gradient needs it
        32,  # only the rank that receives it needs it
        32,  # counts at the ReLU
        8,  # the output of a linear map is not needed
        8,
    ]


def test_what_does_not_grow_with_the_batch_is_counted_for_more_than_one_sample():
    """A table that is saved for the backward would weigh most with a single sample."""

    class Table(nn.Module):
        """Adds a product of two tables, both saved."""

        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Parameter(torch.ones(8)), nn.Parameter(torch.ones(8))

        def forward(self, x):
            """Run the layer."""
            return x + (self.first.exp() * self.second)

    network = nn.Sequential(Table())
    by_default = quick(network, torch.ones(2, 8), sizes=None, batch=64).layers[0]
    of_four = quick(network, torch.ones(2, 8), sizes=(4, 64)).layers[0]
    assert by_default.activation_bytes_per_sample == of_four.activation_bytes_per_sample > 0
