"""Pipes with a schedule and a loss, for the tests of this folder."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from penstock.pipe.pipe import Pipe

MODES = ("never", "except_last", "always")


def make_layers(count: int = 8) -> nn.Sequential:
    """Some layers of doubles, so that gradients can be compared closely."""
    torch.manual_seed(3)
    layers: list[nn.Module] = []
    for _ in range(count // 2):
        layers += [nn.Linear(6, 6), nn.Tanh()]
    return nn.Sequential(*layers).double()


def batch(samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets; torch's default generator stays as it is."""
    source = torch.Generator().manual_seed(samples)
    x = torch.randn(samples, 6, generator=source, dtype=torch.float64)
    return x, torch.randn(samples, 6, generator=source, dtype=torch.float64)


def make_pipe(threads: bool | None, layers: nn.Sequential | None = None, **options) -> Pipe:
    """A Pipe of four partitions of equal size, in threads or one thread, or as it chooses."""
    layers = make_layers() if layers is None else layers
    options = {"chunks": 4, "loss": functional.mse_loss, "schedule": "1f1b", **options}
    balance = options.pop("balance", [len(layers) // 4] * 4)
    pipe = Pipe(layers, balance, devices=["cpu"] * len(balance), **options)
    force(pipe, threads)
    return pipe


def force(pipe: Pipe, threads: bool | None) -> None:
    """Let the ranks of a Pipe run in threads, or in the caller's thread."""
    pipe._scheduled_run(pipe.loss).choice.forced = threads


def grads_of(model: nn.Module) -> list[torch.Tensor | None]:
    """The gradients of all parameters."""
    return [parameter.grad for parameter in model.parameters()]
