"""Models, batches and losses of the tables; small ones with `smoke`."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from penstock.zoo.catalogue import model as zoo_model
from penstock.zoo.gpt import gpt_loss

Loss = Callable[[Tensor, Tensor], Tensor]
Parameters = Iterable[nn.Parameter]

STAGES = 4


@dataclass(frozen=True)
class Cell:
    """A model, a batch, and how it is trained.

    Attributes:
        name: of the workload.
        make: the model on the CPU, the same weights each time.
        batch: inputs and targets on the CPU.
        loss: a mean over samples.
        optimizer: "sgd" or "adamw".
        micro_batches: of a batch.
        autocast: None for float32.
        tf32: whether matrix products and convolutions may use TF32.
    """

    name: str
    make: Callable[[], nn.Sequential]
    batch: Callable[[], tuple[Tensor, Tensor]]
    loss: Loss
    optimizer: str
    micro_batches: int
    autocast: torch.dtype | None = None
    tf32: bool = False

    @property
    def label(self) -> str:
        """Such as "vgg19 M=16"."""
        return f"{self.name} M={self.micro_batches}" + (" tf32" if self.tf32 else "")

    @property
    def tolerance(self) -> float:
        """How far gradients may be off, in terms of the largest."""
        return 1e-4 if self.autocast is None and not self.tf32 else 2e-2

    def with_micro_batches(self, count: int) -> Cell:
        """The same with another number of micro-batches."""
        return replace(self, micro_batches=count)

    def first_model(self) -> nn.Sequential:
        """The model with its first weights, its layers in one row: what a cut counts."""
        torch.manual_seed(0)
        return nn.Sequential(*layers_of(copy.deepcopy(self.make())))

    def first_batch(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """The batch of every step."""
        torch.manual_seed(1)
        x, y = self.batch()
        return x.to(device), y.to(device)

    def make_optimizer(self, parameters: Parameters) -> torch.optim.Optimizer:
        """The optimizer, on parameters that are on their device already."""
        parameter_list = list(parameters)
        if self.optimizer == "adamw":
            return torch.optim.AdamW(parameter_list, lr=1e-4, fused=parameter_list[0].is_cuda)
        return torch.optim.SGD(parameter_list, lr=1e-3, momentum=0.9)

    def mixed(self, device: torch.device, *, cache: bool = True) -> torch.autocast:
        """Mixed precision, or none."""
        return torch.autocast(
            device.type,
            dtype=self.autocast or torch.bfloat16,
            enabled=self.autocast is not None,
            cache_enabled=cache,
        )

    def allow_tf32(self) -> None:
        """Set TF32 as this cell has it, and cuDNN's search for algorithms off."""
        torch.backends.cuda.matmul.allow_tf32 = self.tf32
        torch.backends.cudnn.allow_tf32 = self.tf32
        torch.backends.cudnn.benchmark = False


def layers_of(model: nn.Sequential) -> list[nn.Module]:
    """The layers in the order of running."""
    layers: list[nn.Module] = []
    for child in model:
        layers += layers_of(child) if isinstance(child, nn.Sequential) else [child]
    return layers


def equal_cut(layers: int, stages: int = STAGES) -> list[int]:
    """Layers per stage, as equal as can be.

    >>> equal_cut(15)
    [4, 4, 4, 3]
    """
    whole, rest = divmod(layers, stages)
    return [whole + (stage < rest) for stage in range(stages)]


def mlp(*, smoke: bool, micro_batches: int = 16) -> Cell:
    """8 x (Linear 64-64, ReLU): nothing but launches."""
    samples = 16 if smoke else 64

    def make() -> nn.Sequential:
        layers = [nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(8)]
        return nn.Sequential(*layers)

    def batch() -> tuple[Tensor, Tensor]:
        return torch.randn(samples, 64), torch.randn(samples, 64)

    count = min(micro_batches, 4) if smoke else micro_batches
    return Cell("mlp", make, batch, nn.functional.mse_loss, "sgd", count)


def vgg19(*, smoke: bool, micro_batches: int = 16) -> Cell:
    """VGG-19 without batch norm and dropout, 32 x 32 pixels, batch 128."""
    samples = 4 if smoke else 128

    @functools.cache
    def make() -> nn.Sequential:
        if smoke:
            return _small_convolutions()
        return zoo_model("vgg19", classes=100, image=32, dropout=0.0)

    def batch() -> tuple[Tensor, Tensor]:
        return torch.randn(samples, 3, 32, 32), torch.randint(0, 100, (samples,))

    count = min(micro_batches, 2) if smoke else micro_batches
    return Cell("vgg19", make, batch, nn.functional.cross_entropy, "sgd", count)


def _small_convolutions() -> nn.Sequential:
    """In place of VGG-19, whose 39 million parameters a smoke run would only copy about."""
    layers: list[nn.Module] = []
    channels = 3
    for width in (8, 16, 16):
        layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
        channels = width
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(16 * 4 * 4, 100))


def gpt2(*, smoke: bool, micro_batches: int = 8, layers: int = 12) -> Cell:
    """GPT-2 small, its head not tied, 1024 tokens, batch 8, bfloat16 by autocast, fused AdamW."""
    if smoke:
        samples, tokens, vocabulary, width, heads, layers = 4, 16, 64, 32, 2, 2
    else:
        samples, tokens, vocabulary, width, heads = 8, 1024, 50257, 768, 12

    @functools.cache  # GPT-2 small takes seconds to initialise; users copy it
    def make() -> nn.Sequential:
        return zoo_model(
            "gpt", layers=layers, width=width, heads=heads, tokens=tokens, vocabulary=vocabulary
        )

    def batch() -> tuple[Tensor, Tensor]:
        shape = (samples, tokens)
        return torch.randint(0, vocabulary, shape), torch.randint(0, vocabulary, shape)

    count = min(micro_batches, 4) if smoke else micro_batches
    return Cell("gpt2", make, batch, gpt_loss, "adamw", count, torch.bfloat16)
