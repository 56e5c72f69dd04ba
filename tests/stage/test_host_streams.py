"""Streams of Python's and NumPy's generators, see `penstock.stage.stage_random`."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from tests.stage.drawing_layers import (
    Quiet,
    batch_of,
    draws_of,
    forward,
    host_number,
    python_number,
)
from torch import nn


class Hidden(nn.Module):
    """A layer that draws by a function that its code does not name."""

    def __init__(self, function):
        super().__init__()
        self.function = [function]

    def forward(self, x):
        """Add a random number."""
        return x + self.function[0]()


def numpy_number():
    """Draw from NumPy's generator."""
    return float(np.random.rand())  # noqa: NPY002


class Mentions(nn.Module):
    """A layer that draws by a function that its code names."""

    def forward(self, x):
        """Add a random number."""
        return x + python_number() + numpy_number()


@pytest.mark.parametrize(
    ("module", "functions"),
    [
        (Hidden(python_number), [python_number]),
        (Hidden(numpy_number), [numpy_number]),
        (Mentions(), [python_number, numpy_number]),
    ],
    ids=["python", "numpy", "both by name"],
)
@pytest.mark.parametrize("training", [True, False])
def test_generators_of_the_host_are_seeded_where_layers_draw_from_them(module, functions, training):
    """Also in batches that are not observed, and in a second run; their states stay as they were."""
    draws, parts = draws_of(nn.Identity(), module)
    x = torch.zeros(1)
    for step in range(3):
        batch = batch_of(step, training=training)
        tail = () if training else (1, 0)
        for number in range(2):
            expected = sum(host_number(function, step, 1, number, *tail) for function in functions)
            random.seed(step)
            np.random.seed(step)  # noqa: NPY002
            states = random.getstate(), np.random.get_state()[1].tolist()  # noqa: NPY002
            for again in (False, True) if training else (False,):
                result = forward(draws, parts, batch, number, x, again=again)
                assert float(result) == pytest.approx(expected, rel=1e-6)
                now = random.getstate(), np.random.get_state()[1].tolist()  # noqa: NPY002
                assert now == states


class Plain(nn.Module):
    """A layer that draws nothing, unless an instance has another forward."""

    def forward(self, x):
        """Return a copy."""
        return x * 1


def test_a_forward_that_is_replaced_in_one_instance_is_read_for_that_one():
    """Other instances of its class say nothing of it, whichever comes first."""
    replaced = Plain()
    replaced.forward = lambda x: x + python_number()
    hooked = Plain()
    hooked.register_forward_hook(lambda module, inputs, output: output + python_number())
    for modules in ([Plain(), replaced], [replaced, Plain()], [hooked, Plain()], [Plain(), hooked]):
        draws, parts = draws_of(*modules)
        x = torch.zeros(1)
        for step in range(3):
            batch = batch_of(step, count=1)
            place = next(n for n, module in enumerate(modules) if module in (replaced, hooked))
            expected = host_number(python_number, step, place, 0)
            random.seed(step)
            result = forward(draws, parts, batch, 0, x)
            assert float(result) == pytest.approx(expected, rel=1e-6)


class Sometimes(nn.Module):
    """A layer whose code mentions a generator, and that draws when it is told to."""

    on = False

    def forward(self, x):
        """Add a random number."""
        return x + (python_number() if self.on else 0.0)


def replaced(layer):
    """Return a layer that draws by a forward of its own."""
    plain = Plain()
    plain.forward = lambda x: x + (python_number() if layer.on else 0.0)
    return plain


def hooked(layer):
    """Return a layer that draws in a hook after its forward."""
    plain = Plain()
    plain.register_forward_hook(
        lambda module, inputs, output: output + (python_number() if layer.on else 0.0)
    )
    return plain


def hooked_before(layer):
    """Return a layer that draws in a hook before its forward."""
    plain = Plain()
    plain.register_forward_pre_hook(
        lambda module, inputs: (inputs[0] + (python_number() if layer.on else 0.0),)
    )
    return plain


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    "make", [lambda layer: layer, nn.Sequential, replaced, hooked, hooked_before]
)
def test_a_layer_that_mentions_a_generator_is_seeded_without_an_observed_draw(make, training):
    """Batch 3 is not observed. Whatever contains the code, and beside a layer of the same kind."""
    layer = Sometimes()
    draws, parts = draws_of(Plain(), nn.Sequential(Quiet()), make(layer))
    x = torch.zeros(1)
    for step in range(2):
        forward(draws, parts, batch_of(step, training=training), 0, x)
    layer.on = True
    expected = host_number(python_number, 2, 2, 0, *(() if training else (1, 0)))
    random.seed(2)
    result = forward(draws, parts, batch_of(2, training=training), 0, x)
    assert float(result) == pytest.approx(expected, rel=1e-6)


def test_code_that_names_a_generator_is_seeded_from_the_batch_on_in_which_it_comes():
    """Although it does not draw in the batches that are observed."""
    module, draws_now = Plain(), []
    draws, parts = draws_of(module)
    x = torch.zeros(1)
    forward(draws, parts, batch_of(0, count=1), 0, x)
    module.register_forward_hook(
        lambda module, inputs, output: output + (python_number() if draws_now else 0)
    )
    for step in (1, 2):
        forward(draws, parts, batch_of(step, count=1), 0, x)
    draws_now.append(1)
    expected = host_number(python_number, 3, 0, 0)
    random.seed(3)
    result = forward(draws, parts, batch_of(3, count=1), 0, x)
    assert float(result) == pytest.approx(expected, rel=1e-6)
