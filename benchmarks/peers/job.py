"""What an adapter is given in its rank: layers with the first weights, the batch, the loss, and the
optimizer that checks.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

import torch
from cells import Cell, Spec
from torch import Tensor, nn
from workloads import WORKLOADS, Loss, first_batch, skeleton

LEARNING_RATE = 1e-3


@dataclass
class Job:
    """One rank's part. Its own layers have memory; nothing else of the model has."""

    spec: Spec
    _names: dict[int, tuple[str, nn.Parameter]] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)
    most: float = 0.0

    @property
    def cell(self) -> Cell:
        """What is compared."""
        return self.spec.cell

    @property
    def loss(self) -> Loss:
        """The mean over the samples it is given."""
        return WORKLOADS[self.cell.workload].loss

    def batch(self) -> tuple[Tensor, Tensor]:
        """Inputs and targets."""
        return first_batch(self.cell.workload)

    def layers(self, first: int = 0, last: int | None = None) -> list[nn.Module]:
        """Layers `first` to before `last`, with the first weights."""
        bare = skeleton(self.cell.workload)
        last = len(bare) if last is None else last
        values = torch.load(self.spec.weights, mmap=True)
        layers = [layer.to_empty(device="cpu") for layer in bare[first:last]]
        with torch.no_grad():
            for index, layer in enumerate(layers, first):
                for name, parameter in layer.named_parameters():
                    parameter.copy_(values[f"{index}.{name}"])
                    self._names[id(parameter)] = f"{index}.{name}", parameter
        return layers

    def stage(self, index: int, lengths: tuple[int, ...] | None = None) -> nn.Sequential:
        """One stage of the cut."""
        lengths = lengths or self.spec.cuts.lengths
        start = sum(lengths[:index])
        return nn.Sequential(*self.layers(start, start + lengths[index]))

    def boundary(
        self, index: int, lengths: tuple[int, ...] | None = None, *, micro: bool = True
    ) -> Tensor:
        """A tensor without memory, as stage `index` gets it for a micro-batch (or the batch); of
        the last index + 1, as it comes out.
        """
        lengths = lengths or self.spec.cuts.lengths
        x = self.batch()[0]
        value = x[: len(x) // self.cell.micro_batches if micro else len(x)].to("meta")
        for layer in skeleton(self.cell.workload)[: sum(lengths[:index])]:
            value = layer(value)
        return value.detach()

    def optimizer(self, parameters: Any) -> torch.optim.SGD:
        """SGD, which compares the gradients of its first step with plain training's before it takes
        it.
        """
        momentum = WORKLOADS[self.cell.workload].momentum
        sgd = torch.optim.SGD(list(parameters), lr=LEARNING_RATE, momentum=momentum)
        if self.spec.gradients:
            handle = sgd.register_step_pre_hook(
                lambda optimizer, *_: (self.check(optimizer), handle.remove(), None)[-1]
            )
        return sgd

    def check(self, optimizer: torch.optim.Optimizer) -> None:
        """Note every parameter's largest error; at once for all parameters that this optimizer has."""
        assert self.spec.gradients
        plain = torch.load(self.spec.gradients, mmap=True)
        self.most = max(float(gradient.abs().max()) for gradient in plain.values())
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                name, _ = self._names[id(parameter)]
                grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                self.errors[name] = float((grad - plain[name]).abs().max())

    def forget_names(self) -> None:
        """Drop references to parameters that are not this rank's."""
        self._names.clear()


def join(job: Job) -> None:
    """Set what torchrun sets: every rank of a system finds the others."""
    spec = job.spec
    os.environ.update(
        RANK=str(spec.rank),
        LOCAL_RANK=str(spec.rank),
        WORLD_SIZE=str(spec.ranks),
        LOCAL_WORLD_SIZE=str(spec.ranks),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(spec.port),
        TORCHELASTIC_USE_AGENT_STORE="True",
    )
