"""Random models in a `Pipe`, against the plain model: outputs, gradients, side losses and modes."""

from __future__ import annotations

import copy
import random

import pytest
import torch
from tests.pipe.layers import Holder
from torch import nn
from torch.nn import functional

import penstock as ps
from penstock.modules.side_loss import collecting_side_losses
from penstock.pipe.pipe import Pipe

WIDTH = 4


class Pair(nn.Module):
    """Passes two tensors on, one of them without a gradient."""

    def forward(self, x):
        """Return both."""
        return x * 2, x.detach().round()


class Unpair(nn.Module):
    """Adds two tensors."""

    def forward(self, pair):
        """Return the sum."""
        return pair[0] + pair[1]


class Penalised(nn.Linear):
    """A linear map with a side loss, and a constant one."""

    def forward(self, x):
        """Add the mean square of the output, and a number."""
        output = super().forward(x)
        ps.side_loss(output.square().mean())
        ps.side_loss(torch.ones(()))
        return output


@ps.skippable(stash=["skip"])
class Stash(nn.Module):
    """Stashes its input."""

    def forward(self, x):
        """Stash it."""
        yield ps.stash("skip", x)
        return x.tanh()


@ps.skippable(pop=["skip"])
class Pop(nn.Module):
    """Adds what was stashed."""

    def forward(self, x):
        """Pop it."""
        value = yield ps.pop("skip")
        return x + value


def random_layers(rng: random.Random) -> nn.Sequential:
    """Return some layers; some are frozen, and some share a weight."""
    tied = nn.Linear(WIDTH, WIDTH)
    frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
    choices = [
        lambda: [nn.Linear(WIDTH, WIDTH)],
        lambda: [nn.Tanh()],
        lambda: [nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True)],
        lambda: [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))],
        lambda: [Pair(), Unpair()],
        lambda: [Penalised(WIDTH, WIDTH)],
        lambda: [copy.deepcopy(frozen)],
        lambda: [Holder(tied)],
    ]
    layers = [layer for _ in range(rng.randint(1, 5)) for layer in rng.choice(choices)()]
    if rng.random() < 0.5:
        layers = [Stash(), *layers, Pop()]
    return nn.Sequential(*layers)


def random_balance(rng: random.Random, count: int) -> list[int]:
    """Return the numbers of layers of some partitions."""
    bounds = sorted(rng.sample(range(1, count), rng.randint(0, min(3, count - 1))))
    return [end - first for first, end in zip([0, *bounds], [*bounds, count], strict=True)]


def train(model, x, y, chunks, loss_of):
    """Return the loss of a plain model, whose side losses are those of its micro-batches."""
    loss = 0.0
    for part, target in zip(x.chunk(chunks), y.chunk(chunks), strict=True):
        with collecting_side_losses() as sides:
            output = model(part)
        loss = loss + (loss_of(output, target) + sum(sides)) * (len(part) / len(x))
    if loss.requires_grad:
        loss.backward()
    return loss.detach()


@pytest.mark.parametrize("seed", range(24))
def test_a_random_model_trains_as_without_a_pipe(seed):
    """In two batches of unlike sizes, with any balance, number of micro-batches and checkpoint
    mode; in threads or one thread; with the loss outside or under 1F1B.
    """
    rng = random.Random(seed)
    torch.manual_seed(seed)
    plain = random_layers(rng).double()
    layers = copy.deepcopy(plain)
    balance, chunks = random_balance(rng, len(layers)), rng.randint(1, 4)
    inside = rng.random() < 0.4 and len({id(w) for w in layers.parameters()}) == sum(
        1 for layer in layers for _ in layer.parameters()
    )
    pipe = Pipe(
        layers,
        balance,
        devices=len(balance),
        chunks=chunks,
        checkpoint=rng.choice(["never", "except_last", "always"]),
        **({"schedule": "1f1b", "loss": functional.mse_loss} if inside else {}),
    )
    for _ in range(2):
        x = torch.randn(rng.randint(1, 9), WIDTH, dtype=torch.float64)
        y = torch.randn_like(x)
        inputs, plain_inputs = x.clone(), x.clone()
        if not inside and rng.random() < 0.5:
            inputs.requires_grad_()
            plain_inputs.requires_grad_()
        expected = train(plain, plain_inputs, y, chunks, functional.mse_loss)
        if inside:
            loss = pipe(inputs, y)
        else:
            loss = functional.mse_loss(pipe(inputs), y) + pipe.side_loss
            for choice in pipe._engine.choices.values():
                choice.forced = rng.choice([True, False])
        torch.testing.assert_close(loss.detach(), expected)
        if loss.requires_grad:
            loss.backward()
        assert (inputs.grad is None) == (plain_inputs.grad is None)
        if inputs.grad is not None:
            torch.testing.assert_close(inputs.grad, plain_inputs.grad)
        for weight, other in zip(pipe.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(weight.grad, other.grad)
