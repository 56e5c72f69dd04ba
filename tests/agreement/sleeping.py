"""Layers that take a known time: they sleep, which two threads can do at once even on one core."""

from __future__ import annotations

import time

import torch
from torch import Tensor, nn


class Sleep(torch.autograd.Function):
    """The identity; its backward takes `seconds`."""

    @staticmethod
    def forward(ctx, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.seconds)
        return grad, None


class Sleepy(nn.Module):
    """x times a weight, in `forward_s`; gradients of the input and of the weight take a time of
    their own.
    """

    def __init__(self, forward_s: float, input_s: float, weight_s: float) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(()))
        self.forward_s, self.input_s, self.weight_s = forward_s, input_s, weight_s

    def forward(self, x: Tensor) -> Tensor:
        """Run the layer."""
        time.sleep(self.forward_s)
        return Sleep.apply(x, self.input_s) * Sleep.apply(self.gain, self.weight_s)
