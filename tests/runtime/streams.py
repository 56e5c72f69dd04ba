"""Pipelines of asynchronous schedules and batches for them."""

from __future__ import annotations

import torch
from torch import nn

import penstock as ps


def model(trap=None):
    """Six small layers, one of which may fail."""
    torch.manual_seed(0)
    layers = [
        nn.Linear(8, 8),
        nn.Tanh(),
        nn.Linear(8, 8),
        nn.Tanh(),
        nn.Linear(8, 8),
        nn.Linear(8, 4),
    ]
    if trap is not None:
        layers[3] = trap
    return nn.Sequential(*layers)


def batches(count, samples=8):
    """Return batches of random data, always the same."""
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(samples, 8, generator=generator), torch.randn(samples, 4, generator=generator))
        for _ in range(count)
    ]


def pipeline(schedule="pipedream", balance=(2, 2, 2), *, trap=None, **options):
    """Return an asynchronous pipeline in this process."""
    options = {"micro_batches": 1, "optimizer": lambda p: torch.optim.SGD(p, lr=0.1), **options}
    return ps.Pipeline(
        model(trap),
        balance=balance,
        schedule=schedule,
        loss=nn.functional.mse_loss,
        executor="threads",
        **options,
    )
