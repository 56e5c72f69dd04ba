"""Small models of each kind that the zoo has, with data and loss: a case runs in milliseconds."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from penstock.zoo.blocks.resnet import BasicBlock
from penstock.zoo.catalogue import model as zoo_model
from penstock.zoo.gpt import gpt_loss

SAMPLES = 10  # cut into 3 or 8 these are unequal


@dataclass(frozen=True)
class Case:
    """A model and what it is trained on. `whole` says whether the undivided batch has the same
    gradients as its parts.
    """

    make: Callable[[], nn.Sequential]
    data: Callable[[int], tuple[Any, Any]]
    loss: Callable[[Any, Any], Tensor]
    whole: bool


def vgg_like() -> nn.Sequential:
    """Convolutions, ReLUs in place, pools, and dropout between linear maps: 15 layers."""
    features = nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 8, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.Conv2d(8, 8, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
    )
    classifier = nn.Sequential(
        nn.Flatten(),
        nn.Linear(32, 16),
        nn.ReLU(inplace=True),
        nn.Dropout(0.5),
        nn.Linear(16, 16),
        nn.Dropout(0.3),
        nn.Linear(16, 5),
    )
    return nn.Sequential(features, classifier)


def resnet_like() -> nn.Sequential:
    """A stem, three basic blocks with batch norm and a head: 9 layers."""
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1, bias=False),
        nn.BatchNorm2d(6),
        nn.ReLU(inplace=True),
        BasicBlock(6, 6, 1),
        BasicBlock(6, 8, 2),
        BasicBlock(8, 8, 1),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 5),
    )


def small_gpt(dropout: float = 0.2) -> nn.Sequential:
    """Two blocks: 5 layers."""
    return zoo_model("gpt", layers=2, width=16, heads=2, tokens=6, vocabulary=11, dropout=dropout)


def small_mlp() -> nn.Sequential:
    """Four linear maps: 7 layers."""
    return zoo_model("mlp", features=16, hidden=16, layers=4, classes=5)


def small_gnmt(dropout: float = 0.2) -> nn.Sequential:
    """Two recurrent layers that read and two that write, dicts between them: 7 layers."""
    return zoo_model("gnmt", layers=4, hidden=8, vocabulary=11, dropout=dropout)


def image_data(samples: int) -> tuple[Tensor, Tensor]:
    """8 x 8 pixels of 3 channels, 5 classes."""
    return torch.randn(samples, 3, 8, 8), torch.randint(0, 5, (samples,))


def vector_data(samples: int) -> tuple[Tensor, Tensor]:
    """16 numbers, 5 classes."""
    return torch.randn(samples, 16), torch.randint(0, 5, (samples,))


def text_data(samples: int) -> tuple[Tensor, Tensor]:
    """Sequences of 6 tokens."""
    return torch.randint(0, 11, (samples, 6)), torch.randint(0, 11, (samples, 6))


def pair_data(samples: int) -> tuple[Tensor, Tensor]:
    """Source and target of 5 tokens each, and the tokens that follow the target's."""
    return torch.randint(0, 11, (samples, 2, 5)), torch.randint(0, 11, (samples, 5))


CASES = {
    "vgg": Case(vgg_like, image_data, functional.cross_entropy, whole=False),
    "resnet": Case(resnet_like, image_data, functional.cross_entropy, whole=False),
    "gpt": Case(small_gpt, text_data, gpt_loss, whole=False),
    "gpt-without-dropout": Case(lambda: small_gpt(0.0), text_data, gpt_loss, whole=True),
    "gnmt": Case(small_gnmt, pair_data, gpt_loss, whole=False),
    "mlp": Case(small_mlp, vector_data, functional.cross_entropy, whole=True),
}


def made(case: Case, samples: int = SAMPLES, seed: int = 0) -> tuple[nn.Sequential, Any, Any]:
    """The case's model and one batch, always the same for the same seed; torch's own random state
    is left alone.
    """
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return case.make(), *case.data(samples)


def lengths_of(layers: int, stages: int) -> list[int]:
    """`layers` in `stages` nearly equal parts."""
    ends = [layers * stage // stages for stage in range(stages + 1)]
    return [b - a for a, b in itertools.pairwise(ends)]
