"""Models and batches, equal on every host."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from penstock.zoo.catalogue import model
from penstock.zoo.gpt import gpt_loss

#: Seconds per sample for which a layer of the sleeping workloads sleeps, in each phase.
SLEEP_S = 2e-3


@dataclass(frozen=True)
class Workload:
    """A model and a batch for it.

    Attributes:
        model: makes the model, with the same weights on every host.
        batch: makes inputs and targets.
        samples: in the batch.
        loss: of outputs and targets.
    """

    model: Callable[[], nn.Sequential]
    batch: Callable[[], tuple[Tensor, Tensor]]
    samples: int
    loss: Callable[[Tensor, Tensor], Tensor] = nn.functional.cross_entropy


def _vgg16() -> nn.Sequential:
    """Return VGG-16 for images of 32 pixels: 34 million parameters."""
    return model("vgg16", classes=100, image=32, dropout=0.0)


def _vgg19() -> nn.Sequential:
    """Return VGG-19 for images of 32 pixels: 39 million parameters."""
    return model("vgg19", classes=100, image=32, dropout=0.0)


def _gpt() -> nn.Sequential:
    """Return a GPT of 4 blocks whose vocabulary has most of its 12 million parameters."""
    return model("gpt", layers=4, width=256, heads=4, tokens=64, vocabulary=16_384)


def _gnmt() -> nn.Sequential:
    """Return a translation model of LSTMs with a vocabulary of 8,192 words."""
    return model("gnmt", layers=4, hidden=256, vocabulary=8_192, dropout=0.0)


def _words(*shape: int, vocabulary: int) -> Tensor:
    """Return random words."""
    return torch.randint(0, vocabulary, shape)


def _mlp() -> nn.Sequential:
    """Return an MLP of 17 layers: 8.5 million parameters."""
    return model("mlp", layers=17, features=64, hidden=720, classes=100)


class _Sleep(torch.autograd.Function):
    """The identity; its backward sleeps."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.seconds)
        return grads[0], None


class Sleeping(nn.Module):
    """x times a weight per feature, and a time per sample in which no core is used.

    Forward, input gradient and weight gradient take the same time. With layers that sleep, the
    times of steps depend on links, order and messages alone, also where hosts share few cores.

    Args:
        features: of a sample, in float32.
        sample_s: seconds per sample of each of the three.
    """

    def __init__(self, features: int, sample_s: float) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(features))
        self.sample_s = sample_s

    def forward(self, x: Tensor) -> Tensor:
        """Run the layer."""
        seconds = self.sample_s * len(x)
        time.sleep(seconds)
        output: Tensor = _Sleep.apply(x, seconds) * _Sleep.apply(self.gain, seconds)
        return output


def _sleeping(features: int, samples: int = 16) -> Workload:
    """Return 8 layers of 2 ms per sample, whose outputs have this many features."""

    def model() -> nn.Sequential:
        return nn.Sequential(*(Sleeping(features, SLEEP_S) for _ in range(8)))

    def batch() -> tuple[Tensor, Tensor]:
        return torch.randn(samples, features), torch.randn(samples)

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return nn.functional.mse_loss(output.mean(1), target)

    return Workload(model, batch, samples, loss)


WORKLOADS = {
    "sleep": _sleeping(25_000),
    "sleep-wide": _sleeping(250_000),
    "vgg16": Workload(
        _vgg16, lambda: (torch.randn(32, 3, 32, 32), torch.randint(0, 100, (32,))), 32
    ),
    "vgg19": Workload(
        _vgg19, lambda: (torch.randn(32, 3, 32, 32), torch.randint(0, 100, (32,))), 32
    ),
    "gpt": Workload(
        _gpt,
        lambda: (_words(16, 64, vocabulary=16_384), _words(16, 64, vocabulary=16_384)),
        16,
        gpt_loss,
    ),
    "gnmt": Workload(
        _gnmt,
        lambda: (_words(16, 2, 24, vocabulary=8_192), _words(16, 24, vocabulary=8_192)),
        16,
        gpt_loss,
    ),
    "mlp": Workload(_mlp, lambda: (torch.randn(256, 64), torch.randint(0, 100, (256,))), 256),
}
