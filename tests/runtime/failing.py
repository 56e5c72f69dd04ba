"""Layers that fail, hang or die on purpose. A module of its own, so that ranks in processes can
load it by name quickly.
"""

from __future__ import annotations

import os
import signal
import sys
import threading

import torch
from torch import Tensor, nn


class FailsIn(torch.autograd.Function):
    """The identity, whose backward does something else."""

    @staticmethod
    def forward(ctx, x: Tensor, layer: Trap) -> Tensor:
        ctx.layer = layer
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        ctx.layer.spring("B")
        return grad, None


class Trap(nn.Module):
    """The identity, until its `at`-th forward or backward (counted from 0): then it does `what`."""

    def __init__(self, what: str = "raise", kind: str = "F", at: int = 0) -> None:
        super().__init__()
        self.what, self.kind, self.at = what, kind, at
        self.calls = {"F": 0, "B": 0}
        self.armed = True
        self.release = threading.Event()  # lets go of one that hangs

    def forward(self, x: Tensor) -> Tensor:
        """Run the layer."""
        self.spring("F")
        return FailsIn.apply(x, self) if x.requires_grad else x

    def spring(self, kind: str) -> None:
        """Count, and fail when it is time."""
        call = self.calls[kind]
        self.calls[kind] += 1
        if not self.armed or kind != self.kind or call != self.at:
            return
        match self.what:
            case "raise":
                raise ValueError("a planted failure")
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "hang":
                self.release.wait()
            case "exit":
                sys.exit(3)
            case "vanish":
                os._exit(0)
