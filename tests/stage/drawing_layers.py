"""Layers of a stage that draw random numbers, and batches to run them on."""

from __future__ import annotations

import random
from types import SimpleNamespace

import numpy as np
import torch
from torch import nn

from penstock.modules.randomness import stream_seed
from penstock.stage.stage_random import Place, StageDraws

CPU = torch.device("cpu")


SEED = 11


def parts_of(*modules, first=0):
    """Return the layers of a stage that begins with layer `first`."""
    return [
        SimpleNamespace(index=first + place, name=f"layer{first + place}", module=module)
        for place, module in enumerate(modules)
    ]


def draws_of(*modules, first=0, **options):
    """Return the random numbers of a stage, and its layers."""
    parts = parts_of(*modules, first=first)
    options = {"joined": {}, **options}
    return StageDraws(parts, CPU, SEED, **options), parts


class Batch(SimpleNamespace):
    """A batch, which is known by a weak reference."""


def batch_of(step=0, *, training=True, count=2):
    """Return a batch of some micro-batches."""
    return Batch(step=step, training=training, inputs=[None] * count)


def forward(draws, parts, batch, number, value, *, again=False):
    """Run all layers on a micro-batch, as a stage does."""
    place = Place(batch, number)
    method = draws.call_again if again else draws.call
    if not again:
        draws.begin(batch)
    with draws.running():
        for part in parts:
            value = method(part, place, part.module, value)
    return value


def seeded(function, *components):
    """Return what a function draws from a stream."""
    seed = stream_seed(SEED, *components)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return function()


class Noise(nn.Module):
    """A layer that adds random numbers of torch."""

    def forward(self, x):
        """Add them."""
        return x + torch.rand(3)


class Quiet(nn.Module):
    """A layer of the user that draws nothing, as its code proves."""

    rate = 0.0

    def forward(self, x):
        """Apply a function."""
        return torch.relu(x)


def python_number():
    """Draw from Python's generator."""
    return random.random()


def host_number(function, *components):
    """Return what a function draws from a stream of the host."""
    seed = stream_seed(SEED, *components)
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)  # noqa: NPY002
    return function()
