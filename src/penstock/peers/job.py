"""Part of a run in one rank: layers with their initial weights, batches, loss, and the optimizer
that compares gradients.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from penstock.peers.cuts import rank_environment
from penstock.peers.plain import Plain
from penstock.peers.setup import RankSpec, Setup
from penstock.peers.workload import Loss, Workload, initialise, workload


@dataclass
class Job:
    """What an adapter gets in its rank. Only the layers that it asks for have memory.

    Attributes:
        spec: the rank's part of the run.
        errors: largest gradient error by parameter, after the first step.
        largest_gradient: of plain training.
        notes: facts that an adapter reports of its library, such as the size of a process group.
    """

    spec: RankSpec
    errors: dict[str, float] = field(default_factory=dict)
    largest_gradient: float = 0.0
    notes: dict[str, Plain] = field(default_factory=dict)
    _names: dict[int, tuple[str, nn.Parameter]] = field(default_factory=dict)

    @property
    def setup(self) -> Setup:
        """The run."""
        return self.spec.setup

    @cached_property
    def workload(self) -> Workload:
        """Model, data and loss."""
        return workload(self.setup)

    @property
    def loss(self) -> Loss:
        """The mean over the samples of a call."""
        return self.workload.loss

    def option(self, name: str, default: Plain) -> Plain:
        """Return an option of the system."""
        return self.setup.options.get(name, default)

    def layers(self, first: int = 0, last: int | None = None) -> list[nn.Module]:
        """Return layers `first` to before `last`, with their initial weights."""
        layers = initialise(self.workload.skeleton[first:last], first, self.setup.seed)
        for index, layer in enumerate(layers, first):
            for name, parameter in layer.named_parameters():
                self._names[id(parameter)] = f"{index}.{name}", parameter
        return layers

    def stage(self, index: int, lengths: tuple[int, ...] | None = None) -> nn.Sequential:
        """Return one stage of the cut."""
        lengths = lengths or self.setup.lengths
        start = sum(lengths[:index])
        return nn.Sequential(*self.layers(start, start + lengths[index]))

    def boundary(self, index: int, lengths: tuple[int, ...] | None = None) -> Tensor:
        """Return a tensor without memory of the shape that stage `index` gets for a micro-batch; of
        the number of stages: the output of the last.
        """
        lengths = lengths or self.setup.lengths
        inputs, _ = self.workload.first_batch()
        value = inputs[: len(inputs) // self.setup.micro_batches].to("meta")
        for layer in self.workload.skeleton[: sum(lengths[:index])]:
            value = layer(value)
        return value.detach()

    def rename(self, parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
        """Replace the parameters that are compared, for a library that makes its own of them.

        Args:
            parameters: names as in `nn.Sequential(*layers)`, and parameters.
        """
        self._names = {id(parameter): (name, parameter) for name, parameter in parameters}

    def optimizer(self, parameters: Any) -> torch.optim.SGD:
        """Return SGD, which compares the gradients of its first step with those of plain training
        before it updates.
        """
        setup = self.setup
        sgd = torch.optim.SGD(list(parameters), lr=setup.learning_rate, momentum=setup.momentum)
        if self.spec.gradients:

            def compare(optimizer: torch.optim.Optimizer, *_: Any) -> None:
                """Compare once."""
                # Only the first step has the weights of plain training; later ones differ by
                # rounding.
                handle.remove()
                self.compare_gradients(optimizer)

            handle = sgd.register_step_pre_hook(compare)
        return sgd

    def training_step(self, network: nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
        """Return a step that trains a network, called like the model, and returns its loss."""
        optimizer = self.optimizer(network.parameters())

        def step(inputs: Tensor, targets: Tensor) -> Tensor:
            """Train one batch."""
            loss = self.loss(network(inputs), targets)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        return step

    def compare_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        """Note the largest gradient error of every parameter of an optimizer."""
        assert self.spec.gradients
        with safe_open(self.spec.gradients, framework="pt") as plain:
            largest = (float(plain.get_tensor(name).abs().max()) for name in plain.keys())  # noqa: SIM118 - no mapping
            self.largest_gradient = max(largest)
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    name, _ = self._names[id(parameter)]
                    gradient = _full_gradient(parameter)
                    error = float((gradient - plain.get_tensor(name)).abs().max())
                    self.errors[name] = error

    def forget_names(self) -> None:
        """Drop the references to parameters, which may belong to another rank."""
        self._names.clear()


def _full_gradient(parameter: nn.Parameter) -> Tensor:
    """Return the gradient of a parameter, gathered if ranks hold shards of it."""
    gradient = parameter.grad
    if gradient is None:
        return torch.zeros_like(parameter)
    full_tensor = getattr(gradient, "full_tensor", None)
    return full_tensor() if full_tensor is not None else gradient


def join(job: Job) -> None:
    """Set the environment variables that torchrun sets, by which ranks join a process group."""
    spec = job.spec
    os.environ.update(rank_environment(spec.rank, spec.ranks, spec.port))


def write_gradients(setup: Setup, path: Path) -> list[str]:
    """Write the gradients of plain training on the whole batch, and return the names of the
    parameters.
    """
    from safetensors.torch import save_file

    work = workload(setup)
    network = nn.Sequential(*initialise(work.skeleton, 0, setup.seed))
    inputs, targets = work.first_batch()
    work.loss(network(inputs), targets).backward()  # type: ignore[no-untyped-call]
    gradients = {}
    for name, parameter in network.named_parameters():
        gradients[name] = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    save_file(gradients, path)
    return list(gradients)
