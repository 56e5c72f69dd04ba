"""Layers for `Recomputing`, of all kinds, and a forward of some of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from penstock.grad.recompute import Recomputing

SHAPE = (6, 4, 5, 5)


@dataclass(frozen=True)
class Layer:
    """A layer's index and module."""

    index: int
    module: nn.Module


def run(layers, value, recomputed, call):
    """A single forward, whose backward runs some layers again."""
    return Recomputing(layers, recomputed).run(value, call)


def unseeded(layer: Layer, value: Any) -> Any:
    """Run a layer."""
    return layer.module(value)


class Split(nn.Module):
    """Returns a dict with a tensor, a number, and one tensor twice."""

    def forward(self, x: Tensor) -> dict[str, Any]:
        return {"both": (x * 2, x.sin()), "count": 3, "again": [x, x]}


class Join(nn.Module):
    """Returns one tensor from that dict."""

    def forward(self, value: dict[str, Any]) -> Tensor:
        (a, b), (c, d) = value["both"], value["again"]
        assert c is d
        return a * b + value["count"] * c * d


class Add(nn.Module):
    """Changes its input in place."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.full((1,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        return x.add_(self.bias).mul_(2)


class Counted(nn.Module):
    """Its output depends on a buffer that counts its forwards; another of its buffers is replaced
    in each.
    """

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("last", torch.zeros(()), persistent=False)
        self.register_buffer("queue", torch.zeros(2**18))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.last = self.last + x.detach().mean()
        self.queue[int(self.calls)] = 1
        return x.sin() * self.calls.clone() + x * self.last + self.queue[:3].sum()


class Rising(nn.Module):
    """Its output depends on an attribute that counts its forwards."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen = torch.full((), float(self.calls))
        return (x * self.calls).sin()


class Square(torch.autograd.Function):
    """A user's autograd.Function that saves its input and its output."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x * x
        ctx.save_for_backward(x, y)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        x, y = ctx.saved_tensors
        return grad * (2 * x + 0 * y)


class Own(nn.Module):
    """Runs an autograd.Function."""

    def forward(self, x: Tensor) -> Tensor:
        return Square.apply(x.tanh())


class Checkpointed(nn.Module):
    """Uses torch's checkpoint inside."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Conv2d(4, 4, 1), nn.Tanh(), nn.Conv2d(4, 4, 1))

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=False)


def frozen() -> nn.Module:
    """Return a layer whose weight is not trained."""
    conv = nn.Conv2d(4, 4, 3, padding=1)
    conv.weight.requires_grad_(False)
    return conv


KINDS: dict[str, Callable[[], list[nn.Module]]] = {
    "conv": lambda: [nn.Conv2d(4, 4, 3, padding=1)],
    "norm": lambda: [nn.BatchNorm2d(4)],
    "relu in place": lambda: [nn.ReLU(inplace=True)],
    "tanh": lambda: [nn.Tanh()],
    "dropout": lambda: [nn.Dropout(0.3)],
    "structure": lambda: [Split(), Join()],
    "add in place": lambda: [Add()],
    "counted": lambda: [Counted()],
    "attribute": lambda: [Rising()],
    "rrelu": lambda: [nn.RReLU()],
    "own": lambda: [Own()],
    "checkpointed": lambda: [Checkpointed()],
    "frozen": lambda: [frozen()],
}


def layers_of(kinds: list[str]) -> list[Layer]:
    """Return layers of these kinds in float64, numbered from 10."""
    torch.manual_seed(0)
    modules = [module.double() for kind in kinds for module in KINDS[kind]()]
    return [Layer(10 + index, module) for index, module in enumerate(modules)]


def seeded(layer: Layer, value: Any) -> Any:
    """Run a layer with the same random numbers each time, as a stage does."""
    torch.manual_seed(layer.index)
    return layer.module(value)
