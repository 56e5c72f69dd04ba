"""Models and batches, equal on every host."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from penstock.zoo.catalogue import model


@dataclass(frozen=True)
class Workload:
    """A model and a batch for it.

    Attributes:
        model: makes the model, with the same weights on every host.
        batch: makes inputs and targets.
        samples: in the batch.
    """

    model: Callable[[], nn.Sequential]
    batch: Callable[[], tuple[Tensor, Tensor]]
    samples: int


def _vgg16() -> nn.Sequential:
    """Return VGG-16 for images of 32 pixels: 34 million parameters."""
    return model("vgg16", classes=100, image=32, dropout=0.0)


def _mlp() -> nn.Sequential:
    """Return an MLP of 17 layers: 8.5 million parameters."""
    return model("mlp", layers=17, features=64, hidden=720, classes=100)


WORKLOADS = {
    "vgg16": Workload(
        _vgg16, lambda: (torch.randn(32, 3, 32, 32), torch.randint(0, 100, (32,))), 32
    ),
    "mlp": Workload(_mlp, lambda: (torch.randn(256, 64), torch.randint(0, 100, (256,))), 256),
}
