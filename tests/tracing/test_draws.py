"""Random numbers and times that a trace cannot contain are rejected with the line that takes them."""

# ruff: noqa: NPY002 - the global functions of NumPy are what is tested

from __future__ import annotations

import logging
import os
import random
import time
import uuid
from random import random as drawn_by_name
from time import perf_counter

import numpy as np
import pytest
import torch
from torch import nn

from penstock.errors import ChainError
from penstock.tracing.traced_chain import chain

GLOBAL = np.random.default_rng(0)


class Drawing(nn.Module):
    """Scales by the result of a function."""

    def __init__(self, draw):
        super().__init__()
        self.first, self.second, self.draw = nn.Linear(4, 4), nn.Linear(4, 4), draw
        self.rng, self.nested = np.random.default_rng(1), {"twister": [random.Random(3)]}

    def forward(self, x):
        return self.second(self.first(x) * self.draw(self))


def helper():
    """Draw by an alias of a function."""
    return drawn_by_name()


@pytest.mark.parametrize(
    ("draw", "source"),
    [
        (lambda _: random.random(), r"`random`"),
        (lambda _: helper(), r"in helper: `return drawn_by_name\(\)`.*`random`"),
        (lambda _: float(np.random.rand()), r"`numpy\.random`"),
        (lambda _: float(GLOBAL.random()), r"GLOBAL \(Generator\)"),
        (lambda part: float(part.rng.random()), r"rng \(Generator\)"),
        (lambda part: part.nested["twister"][0].random(), r"nested\.twister\.0 \(Random\)"),
        (lambda _: random.Random().random(), r"a generator without a seed"),
        (
            lambda _: float(np.random.default_rng().random()),
            r"random bits from the operating system",
        ),
        (lambda _: os.urandom(1)[0] / 255, r"random bits from the operating system"),
        (lambda _: uuid.uuid4().int % 2, r"random bits from the operating system"),
        (lambda _: time.time(), r"it reads the clock"),
        (lambda _: perf_counter(), r"it reads the clock"),
        (
            lambda _: torch.rand((), generator=torch.Generator()),
            # The second is torch's own refusal before 2.13.
            r"(a torch\.Generator of its own|argument of type: .*Generator)",
        ),
        (lambda _: torch.manual_seed(0).initial_seed(), r"sets the state of torch's generator"),
    ],
)
def test_a_random_number_that_a_trace_would_repeat_is_refused_with_its_line(draw, source):
    """A layer dropped by `random.random()` during tracing would be dropped in every batch."""
    with pytest.raises(
        ChainError, match=rf"Drawing cannot be traced: \S*test_draws\.py:\d+.*{source}"
    ):
        chain(Drawing(draw), torch.randn(3, 4))


@pytest.mark.parametrize(
    "draw",
    [
        lambda _: random.Random(7).random(),
        lambda _: float(np.random.default_rng(7).random()),
        lambda _: logging.getLogger("tests").debug("a record has a time") or 2.0,
        lambda _: torch.rand(()).item(),
    ],
)
def test_seeded_generators_random_ops_of_torch_and_log_records_are_traced(draw):
    """Values that are equal in every call may be in a graph, and torch's random ops are part of it."""
    assert len(chain(Drawing(draw), torch.randn(3, 4))) == 2


def test_a_refused_draw_leaves_the_generators_as_they_were():
    """The user continues without tracing, with the same random numbers as before."""
    before = random.getstate(), np.random.get_state()[1].tolist()
    with pytest.raises(ChainError, match=r"draws random numbers"):
        chain(Drawing(lambda _: random.random() + np.random.rand()), torch.randn(3, 4))
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before


def test_masks_of_transformers_by_numpy_are_refused_and_named():
    """Wav2Vec2's SpecAugment would mask the same frames in every batch."""
    transformers = pytest.importorskip("transformers")
    config = transformers.Wav2Vec2Config(
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=24,
        conv_dim=(8, 8),
        conv_stride=(2, 2),
        conv_kernel=(3, 3),
        num_conv_pos_embeddings=4,
        layerdrop=0.0,
        num_conv_pos_embedding_groups=2,
        mask_time_prob=0.5,
        mask_time_length=2,
    )
    with pytest.raises(ChainError, match=r"_compute_mask_indices: .*from `numpy\.random`"):
        chain(transformers.Wav2Vec2Model(config), torch.randn(2, 60))
