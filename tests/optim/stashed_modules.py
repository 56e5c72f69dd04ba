"""Modules of many kinds of layers, and data for them."""

from __future__ import annotations

import torch
from torch import nn


class Tied(nn.Module):
    """One weight in two places, a frozen parameter, one used by odd micro-batches only, and an
    unused one.
    """

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(6, 6)
        self.back = nn.Linear(6, 6)
        self.back.weight = self.enter.weight
        self.scale = nn.Parameter(torch.full((6,), 0.5), requires_grad=False)
        self.sometimes = nn.Parameter(torch.ones(6))
        self.never = nn.Parameter(torch.ones(3))
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        x = self.back(torch.tanh(self.enter(x) * self.scale))
        return x * self.sometimes if self.calls % 2 else x


class Recurrent(nn.Module):
    """A GRU whose parameters are contiguous, as cuDNN requires."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(4, 5, num_layers=2, batch_first=True)
        parameters = list(self.gru.parameters())
        flat = torch.cat([parameter.detach().reshape(-1) for parameter in parameters])
        first = 0
        for parameter in parameters:
            parameter.data = flat[first : first + parameter.numel()].view_as(parameter)
            first += parameter.numel()

    def forward(self, x):
        return self.gru(x)[0]


class Bilinear(nn.Module):
    """A product of two weights."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = (
            nn.Parameter(torch.randn(6, 3) / 3),
            nn.Parameter(torch.randn(3, 6) / 3),
        )

    def forward(self, x):
        return x @ (self.one @ self.two)


def images(number):
    """Return a micro-batch of images."""
    generator = torch.Generator().manual_seed(number)
    return torch.randn(3, 2, 8, 8, generator=generator), torch.randn(3, 4, generator=generator)


def tokens(number):
    """Return a micro-batch of tokens."""
    generator = torch.Generator().manual_seed(number)
    return torch.randint(11, (3, 5), generator=generator), torch.randn(3, 5, 6, generator=generator)


def rows(number):
    """Return a micro-batch of vectors."""
    generator = torch.Generator().manual_seed(number)
    return torch.randn(4, 6, generator=generator), torch.randn(4, 6, generator=generator)


def sequences(number):
    """Return a micro-batch of sequences."""
    generator = torch.Generator().manual_seed(number)
    return torch.randn(3, 6, 4, generator=generator), torch.randn(3, 6, 5, generator=generator)


MODULES = {
    "convolutions": (
        lambda: nn.Sequential(
            nn.Conv2d(2, 4, 3, padding=1),
            nn.BatchNorm2d(4),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2),
            nn.Conv2d(4, 4, 3, bias=False),
            nn.GroupNorm(2, 4),
            nn.Flatten(),
            nn.Linear(16, 4),
        ),
        images,
    ),
    "attention": (
        lambda: nn.Sequential(
            nn.Embedding(11, 6),
            nn.TransformerEncoderLayer(6, 2, 12, dropout=0, batch_first=True),
            nn.LayerNorm(6),
            nn.Linear(6, 6),
        ),
        tokens,
    ),
    "tied, frozen, unused": (Tied, rows),
    "recurrent": (Recurrent, sequences),
    "weight norm": (
        lambda: nn.Sequential(
            nn.utils.parametrizations.weight_norm(nn.Linear(6, 6)), nn.PReLU(), Bilinear()
        ),
        rows,
    ),
}


class Reassigning(torch.optim.Optimizer):
    """SGD that gives the parameters new memory in every step, as some optimizers do."""

    def __init__(self, parameters, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.data = parameter.data - group["lr"] * parameter.grad
