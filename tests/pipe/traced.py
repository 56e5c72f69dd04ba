"""Traced models and Pipes of them, for the tests of this folder."""

from __future__ import annotations

import torch
from torch import nn

import penstock as ps

X = torch.randn(8, 5, generator=torch.Generator().manual_seed(1))


Y = torch.arange(8) % 3


class Residual(nn.Module):
    """A model with a skip, a scale that is an input, a tied weight and dropout."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.stem = nn.Linear(5, 6)
        self.body = nn.Linear(6, 6)
        self.again = nn.Linear(6, 6)
        self.again.weight = self.body.weight
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(6, 3)

    def forward(self, x, scale=None):
        """Return the scores."""
        scale = torch.ones(len(x), 1) if scale is None else scale
        value = torch.relu(self.stem(x))
        value = value + self.dropout(torch.tanh(self.body(value)))
        value = self.again(value) * scale
        return {"scores": self.head(value), "skip": x}


def make_model(dropout: float = 0.0) -> Residual:
    """Return the model, the same at every call."""
    torch.manual_seed(0)
    return Residual(dropout)


def make_pipe(model=None, balance=(2, 2), **options) -> ps.Pipe:
    """Return a Pipe of the model on CPU threads."""
    options = {"chunks": 4, "devices": ["cpu"] * len(balance), **options}
    return ps.Pipe(ps.chain(model or make_model(), X), balance, **options)


class Transformer(nn.Module):
    """A layer norm, and a parameter of the model itself."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.ones(6))
        self.stem = nn.Linear(5, 6)
        self.first = nn.LayerNorm(6)
        self.drop = nn.Dropout(0.5)
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        """Return the scores."""
        return self.head(self.drop(self.first(self.stem(x) + self.shift)))


def make_transformer() -> Transformer:
    """Return the model, the same at every call."""
    torch.manual_seed(0)
    return Transformer()
