"""The model, the data and the optimizer of the programs beside this file.

Shows: what all of them share, so that it is not counted as a line of any library.
Story: a small VGG on scikit-learn's handwritten digits, 30 batches of 64, from the same first
    weights in every program and process. It has neither dropout nor batch norm, so that every
    synchronous pipeline has the losses of plain training but for rounding.
Takes: nothing; it is imported.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

BATCH, BATCHES = 64, 30
MICRO_BATCHES = 4


def make_model() -> nn.Sequential:
    """Return 15 layers for images of (1, 8, 8) and 10 classes, with the same weights every time."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    channels = 1
    for width in (16, 32):
        for _ in range(2):
            layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU()]
            channels = width
        layers.append(nn.MaxPool2d(2))
    layers += [nn.Flatten(), nn.Linear(32 * 2 * 2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU()]
    layers.append(nn.Linear(64, 10))
    for layer in layers:
        if isinstance(layer, (nn.Conv2d, nn.Linear)):
            # With torch's own first weights the loss stays on its plateau for all batches.
            nn.init.kaiming_normal_(layer.weight)
    return nn.Sequential(*layers)


def make_optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Return SGD with momentum."""
    return torch.optim.SGD(parameters, lr=0.02, momentum=0.9)


def batches(samples: int = BATCH) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield images (samples, 1, 8, 8) and their digits (samples,), in the same order every time.

    Args:
        samples: of a batch. A library that draws micro-batches itself asks for smaller ones.
    """
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 8 - 1
    targets = torch.tensor(digits.target)
    total = BATCHES * BATCH
    order = torch.arange(total) % len(targets)
    for part in order.split(samples):
        yield images[part], targets[part]


def report(losses: list[float]) -> None:
    """Print the first and the last loss."""
    print(f"loss {losses[0]:.6f} at first, {losses[-1]:.6f} after {len(losses)} batches")
