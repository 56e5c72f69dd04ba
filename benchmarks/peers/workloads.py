"""Models, batches and losses: equal on every rank of every system."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from penstock.zoo.catalogue import model as zoo_model
from penstock.zoo.gpt import gpt_loss

Loss = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Workload:
    """A model, a batch for it, and how it is trained. `micro_batches`: the numbers of them that are
    compared.
    """

    make: Callable[[], nn.Sequential]
    batch: Callable[[], tuple[Tensor, Tensor]]
    loss: Loss
    samples: int
    momentum: float
    micro_batches: tuple[int, ...]
    about: str


def _mlp() -> nn.Sequential:
    return nn.Sequential(*(layer for _ in range(8) for layer in (nn.Linear(64, 64), nn.ReLU())))


def _gpt() -> nn.Sequential:
    return zoo_model("gpt", layers=12, width=256, heads=4, tokens=128, vocabulary=512)


def _vgg() -> nn.Sequential:
    return zoo_model("vgg19", classes=100, image=32, dropout=0.0)


WORKLOADS = {
    "mlp": Workload(_mlp, lambda: (torch.randn(64, 64), torch.randn(64, 64)), nn.functional.mse_loss, 64, 0.0, (16,),
                    "8 x (Linear 64-64, ReLU), batch 64"),
    "gpt": Workload(_gpt, lambda: (torch.randint(0, 512, (32, 128)), torch.randint(0, 512, (32, 128))), gpt_loss, 32, 0.9,
                    (4, 8, 16), "GPT, 12 blocks of width 256, 4 heads, 128 tokens, vocabulary 512, batch 32"),
    "vgg19": Workload(_vgg, lambda: (torch.randn(128, 3, 32, 32), torch.randint(0, 100, (128,))), nn.functional.cross_entropy,
                      128, 0.9, (1, 4, 8, 16), "VGG-19 (E), 32 x 32 pixels, classifier 512-4096-4096-100, batch 128"),
}  # fmt: skip


def layers_of(model: nn.Sequential) -> list[nn.Module]:
    """The layers in the order of running: what a cut counts."""
    return [
        layer
        for child in model
        for layer in (layers_of(child) if isinstance(child, nn.Sequential) else [child])
    ]


def skeleton(workload: str) -> list[nn.Module]:
    """The layers without memory."""
    with torch.device("meta"):
        return layers_of(WORKLOADS[workload].make())


def first_weights(workload: str) -> dict[str, Tensor]:
    """What everybody begins with, by layer and name."""
    torch.manual_seed(0)
    return nn.ModuleList(layers_of(WORKLOADS[workload].make())).state_dict()


def first_batch(workload: str) -> tuple[Tensor, Tensor]:
    """The batch that everybody trains on, in every step."""
    torch.manual_seed(1)
    return WORKLOADS[workload].batch()
