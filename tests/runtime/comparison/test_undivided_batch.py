"""Differences from one device that runs the undivided batch: how large, and why."""

from __future__ import annotations

import math
import random

import pytest
import torch
from torch import nn

import penstock as ps
from penstock.runtime.comparison.undivided_batch import (
    COARSE_TOLERANCE,
    NEXT_TO_NOTHING,
    TOLERANCE,
    WholeBatch,
    causes_in,
    coarse,
    ratio,
)


@pytest.mark.parametrize("seed", range(40))
def test_differences_are_relative_to_their_tensor_and_at_least_to_a_share_of_the_largest(seed):
    """Gradients that are zero up to rounding would else differ by any factor; and what prints is
    the largest.
    """
    rng = random.Random(seed)
    names = [f"weight{n}" for n in range(rng.randint(0, 4))]
    errors = {name: rng.choice([0.0, 10 ** rng.uniform(-9, 0)]) for name in names}
    scale = {name: 10 ** rng.uniform(-6, 1) for name in names}
    scale["loss"] = rng.uniform(1, 1e6)
    if names and seed % 4 == 0:
        del scale[names[0]]
    whole = WholeBatch(
        errors, rng.choice([0.0, 1e-3, 0.5]), scale, tolerance=rng.choice([0.1, 1e-3])
    )
    least = NEXT_TO_NOTHING * max([scale.get(name, 0.0) for name in names], default=0.0)
    expected = {}
    for name in names:
        size = max(scale.get(name, 0.0), least)
        expected[name] = 0.0 if errors[name] == 0 else errors[name] / size if size else math.inf
    expected["loss"] = whole.loss / scale["loss"]
    assert whole.ratios() == expected
    assert whole.relative == max(expected.values())
    assert whole.agrees == all(value <= whole.tolerance for value in expected.values())
    lines = str(whole).splitlines()
    assert lines[0].endswith(f": largest relative difference {max(expected.values()):.2g}")
    if whole.agrees:
        assert len(lines) == 1
        return
    assert lines[1] == (f"  loss      differs by {whole.loss:.2e}, relative {expected['loss']:.1e}")
    if names:
        worst = max(names, key=expected.__getitem__)
        assert lines[2] == (
            f"  gradient  {worst} differs by {errors[worst]:.2e}, relative {expected[worst]:.1e}"
        )
    assert lines[2 + bool(names)].startswith("  no reason is known for this model: ")
    assert len(lines) == 3 + bool(names)


def test_a_difference_of_exactly_the_tolerance_is_rounding():
    """And the least one above it is not."""
    for error, agrees in ((0.25, True), (math.nextafter(0.25, 1), False)):
        whole = WholeBatch({"w": error}, scale={"w": 1.0}, tolerance=0.25)
        assert (whole.relative, whole.agrees) == (error, agrees)
    assert WholeBatch().agrees
    assert WholeBatch().tolerance == TOLERANCE


def test_known_causes_are_listed_in_place_of_the_advice():
    """All of them."""
    whole = WholeBatch({}, 1.0, {"loss": 1.0}, ("draws", "sides"))
    assert str(whole).splitlines()[2:] == [
        "  this is expected, if it is due to a difference by design:",
        "  - draws",
        "  - sides",
    ]


def test_a_ratio_is_infinite_where_it_has_no_meaning():
    """Nothing differs from nothing by nothing."""
    assert ratio(0.0, 0.0) == 0.0
    assert ratio(3.0, 2.0) == 1.5
    for error, size in ((1e-30, 0.0), (math.inf, 1.0), (math.nan, 1.0), (-math.inf, 1.0)):
        assert ratio(error, size) == math.inf


@pytest.mark.parametrize(
    ("dtypes", "autocast", "tolerance"),
    [
        ([], None, TOLERANCE),
        ([torch.float32, torch.float64], None, TOLERANCE),
        ([torch.float32, torch.bfloat16], None, COARSE_TOLERANCE),
        ([torch.float16], None, COARSE_TOLERANCE),
        ([torch.float32], torch.float16, COARSE_TOLERANCE),
    ],
)
def test_layers_in_16_bits_are_compared_coarsely(dtypes, autocast, tolerance):
    """By their parameters or by autocast."""
    assert coarse(iter(dtypes), autocast) == tolerance


def test_batch_statistics_and_hooks_are_causes():
    """Statistics that are only read are none."""
    plain = nn.Linear(2, 2)
    still, without = nn.BatchNorm1d(2).eval(), nn.BatchNorm1d(2, track_running_stats=False).eval()
    assert causes_in([plain, still, nn.LayerNorm(2)]) == []
    batch_norm = ["batch normalisation takes its statistics from each micro-batch"]
    assert causes_in(iter([plain, nn.Sequential(nn.BatchNorm1d(2))])) == batch_norm
    assert causes_in([without]) == batch_norm
    hooked = nn.Sequential(*(nn.Linear(2, 2) for _ in range(2)))
    for part in hooked:
        part.weight.register_hook(lambda grad: grad)
        part.bias.register_hook(lambda grad: grad)
    (cause,) = causes_in([hooked])
    assert cause.startswith("hooks on weights run once for each micro-batch: ")
    assert len(cause.partition(": ")[2].split(", ")) == 3


@pytest.mark.parametrize("training", [False, True])
def test_layers_of_a_traced_model_are_known_by_their_ops(training):
    """They have no module of batch normalisation."""

    class Net(nn.Module):
        """A traced model with batch normalisation."""

        def __init__(self):
            super().__init__()
            self.first, self.norm = nn.Linear(3, 3), nn.BatchNorm1d(3)

        def forward(self, x):
            """Return the normalised values."""
            return self.norm(self.first(x))

    chain = ps.chain(Net().train(training), torch.ones(4, 3))
    assert bool(causes_in(chain.modules)) == training
