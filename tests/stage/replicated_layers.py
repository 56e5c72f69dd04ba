"""Layers whose forwards read or change state, and pipelines of them."""

from __future__ import annotations

import torch
from torch import nn

import penstock as ps


class Centred(nn.Module):
    """Subtracts a running mean, which every forward changes."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.register_buffer("centre", torch.zeros(4))

    def forward(self, x):
        output = self.inner(x)
        with torch.no_grad():
            self.centre.mul_(0.9).add_(output.detach().mean(0), alpha=0.1)
        return output - self.centre


def model_of(middle, seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 4), middle, nn.Tanh(), nn.Linear(4, 2))


def pipeline(model, schedule="chimera", **options):
    options = {"balance": [2, 2], "micro_batches": 4, "executor": "threads", **options}
    return ps.Pipeline(
        model,
        loss=nn.MSELoss(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        schedule=schedule,
        **options,
    )


def data():
    generator = torch.Generator().manual_seed(1)
    return torch.randn(8, 4, generator=generator), torch.randn(8, 2, generator=generator)
