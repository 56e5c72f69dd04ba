"""A resumed run equals the uninterrupted one to the bit: cases in which it once did not."""

from __future__ import annotations

import pytest
import torch
from tests.conformance.reference import differences
from torch import nn
from torch.optim import SGD, AdamW

import penstock as ps


def convolutions():
    """Return a model whose weights have the memory format channels_last."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Tanh(), nn.Conv2d(4, 6, 3), nn.Flatten())
    return model.to(memory_format=torch.channels_last)


def perceptron():
    """Return a small model."""
    return nn.Sequential(nn.Linear(48, 9), nn.Tanh(), nn.Linear(9, 5), nn.Tanh())


def pipeline(model, optimizer, schedule):
    """Return a pipeline of two stages, with ranks as threads."""
    torch.manual_seed(0)
    return ps.Pipeline(
        model(),
        loss=lambda output, target: nn.functional.mse_loss(output.flatten(1).sum(1), target),
        balance=[2, 2],
        schedule=schedule,
        micro_batches=4,
        optimizer=optimizer,
        executor="threads",
    )


def train(pipe, shape, numbers):
    """Train on the batches of these numbers."""
    for number in numbers:
        generator = torch.Generator().manual_seed(number)
        x = torch.randn(8, *shape, generator=generator)
        pipe.train_batch(x, torch.randn(8, generator=generator))


@pytest.mark.parametrize(
    ("model", "shape", "optimizer", "schedule"),
    [
        (perceptron, (48,), lambda p: SGD(p, lr=0.1, momentum=0.9), "chimera"),
        (perceptron, (48,), lambda p: AdamW(p, lr=0.01), "chimera"),
        (convolutions, (3, 6, 6), lambda p: SGD(p, lr=0.1, momentum=0.9, fused=True), "1f1b"),
        (convolutions, (3, 6, 6), lambda p: AdamW(p, lr=0.01, fused=True), "chimera"),
    ],
    ids=["copies-sgd", "copies-adamw", "channels_last-sgd", "channels_last-adamw"],
)
def test_the_steps_after_a_load_are_those_of_the_uninterrupted_run(
    tmp_path, model, shape, optimizer, schedule
):
    """Copies of a stage have state of their own, in the memory format of their parameters.

    Once, copies in one process shared one momentum, which each of them updated; and a fused
    optimizer read momentum and weights in different orders.
    """
    uninterrupted = pipeline(model, optimizer, schedule)
    train(uninterrupted, shape, range(2))
    uninterrupted.save(tmp_path)
    train(uninterrupted, shape, range(2, 4))
    resumed = pipeline(model, optimizer, schedule)
    resumed.load(tmp_path)
    train(resumed, shape, range(2, 4))
    assert not differences(resumed.state_dict(), uninterrupted.state_dict())
