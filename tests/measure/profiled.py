"""Models to be profiled, and profiles with little timing."""

from __future__ import annotations

from collections import OrderedDict

from torch import nn

from penstock.measure.profiler import profile


def perceptron():
    """Two linear maps with a ReLU and a dropout between."""
    return nn.Sequential(
        OrderedDict(
            fc1=nn.Linear(4, 8),
            relu=nn.ReLU(),
            drop=nn.Dropout(0.5),
            fc2=nn.Linear(8, 2, bias=False),
        )
    )


def quick(network, example, **settings):
    """A profile with as little timing as there can be."""
    return profile(network, example, **{"sizes": (2,), "repeats": 1, "device": "cpu", **settings})


def saved_bytes(measured):
    """Bytes per sample that each layer keeps for its backward."""
    return [layer.activation_bytes_per_sample for layer in measured]
