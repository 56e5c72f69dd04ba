"""Models that check values.

They are in a file of their own because pytest rewrites the asserts in test files.
"""

from __future__ import annotations

import torch
from torch import nn


class Checking(nn.Module):
    """Checks its input by a function that is passed to it."""

    def __init__(self, check):
        super().__init__()
        self.first, self.second, self.check = nn.Embedding(8, 4), nn.Linear(4, 3), check

    def forward(self, x, more=None):
        self.check(x, more)
        return self.second(self.first(x.clamp(0, 7)))


def by_comparison(x, _):
    if x.max() >= 8:
        message = f"tokens are below 8, not {x.shape}"
        raise ValueError(message)


def by_or(x, more):
    if more is not None or torch.any(x < 0) or not (x.max() < 8):
        raise ValueError


def by_else(x, _):
    if x.max() < 8:
        x = x + 1
    else:
        raise ValueError


def by_item(x, _):
    if x.max().item() > 7:
        raise ValueError


def by_name(x, _):
    valid = (x < 8).all()
    if not valid:
        raise ValueError


def by_bool(x, _):
    if bool(x.max() > 7):
        raise ValueError


def by_and(x, more):
    assert more is None and (x < 8).all()  # noqa: PT018 - as one test


def by_chain(x, _):
    assert 0 <= x.max() < 8


def by_torch(x, _):
    torch._assert((x < 8).all(), "range")


def branches(x, more):
    if x.max() > 3:
        x.add_(1)


def ambiguous(x, more):
    if x.max() > 3 and x.min() < 1:
        raise ValueError


def inside(x, more):
    if str(bool(x.max() > 3)) == "True":
        raise ValueError
