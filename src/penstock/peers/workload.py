"""Models as lists of layers, data and losses: equal on every rank of every system."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from penstock.peers.plain import Plain
from penstock.peers.setup import Setup
from penstock.training.config import TrainConfig
from penstock.training.data.batches import batches
from penstock.training.task import make_task
from penstock.zoo.catalogue import model, models
from penstock.zoo.gpt import gpt_loss

Loss = Callable[[Tensor, Tensor], Tensor]
#: Tokens per sequence of a model that leaves them open.
_TOKENS = 40
#: Distance between the seeds of two runs: more than any model has layers.
_SEED_STEP = 100_003
#: Fixed, so that repetitions, which differ in their initial weights, train on the same batches.
_DATA_SEED = 1


class LayerGroup(nn.Module):
    """Several layers that run one after the other and stay on one stage.

    Not a Sequential, which libraries divide into its children.
    """

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, value: Tensor) -> Tensor:
        """Run the layers."""
        for layer in self.layers:
            value = layer(value)
        return value


@dataclass(frozen=True, eq=False)
class Workload:
    """Model, data and loss of a run.

    Attributes:
        skeleton: the layers, without memory.
        inputs, targets: all samples.
        loss: mean over the samples.
        batch: samples per step.
        seed: of the order of the samples.
    """

    skeleton: list[nn.Module]
    inputs: Tensor
    targets: Tensor
    loss: Loss
    batch: int
    seed: int

    def first_batch(self) -> tuple[Tensor, Tensor]:
        """Return inputs and targets of one batch."""
        return self.inputs[: self.batch], self.targets[: self.batch]

    def epoch(self, number: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Return the batches of an epoch, all of equal size; the same on every rank."""
        if len(self.inputs) == self.batch:
            return iter([(self.inputs, self.targets)])
        return batches(
            self.inputs, self.targets, self.batch, seed=self.seed, epoch=number, drop_last=True
        )


def workload(setup: Setup) -> Workload:
    """Return the workload of a setup.

    Raises:
        PenstockError: the model or the data is unknown, or they do not fit.
    """
    if setup.data == "random":
        network = model(setup.model, device="meta", **setup.model_options)
        inputs, targets, loss = _random_samples(setup)
    else:
        options = {**models()[setup.model].options, **setup.model_options}
        config = replace(
            TrainConfig(
                model=setup.model,
                model_options=dict(setup.model_options),
                data=setup.data,
                batch=setup.batch,
            ),
            **_sample_shape(options),
        )
        task = make_task(config)
        assert isinstance(task.model, nn.Sequential), f"{setup.model} is a model of the zoo"
        network, loss = task.model, task.loss
        inputs, targets = task.data.train_inputs, task.data.train_targets
    return Workload(grouped(flat_layers(network)), inputs, targets, loss, setup.batch, setup.seed)


def _sample_shape(options: dict[str, object]) -> dict[str, Any]:
    """Return the shape of samples that a model's options ask for."""
    shape = {}
    for name in ("image", "channels", "tokens"):
        value = options.get(name)
        if isinstance(value, int):
            shape[name] = value
    return shape


def _random_samples(setup: Setup) -> tuple[Tensor, Tensor, Loss]:
    """Return one batch of random samples for a model, the same in every process."""
    facts = models()[setup.model]
    options: dict[str, Plain | object] = {**facts.options, **setup.model_options}

    def size(name: str) -> int:
        """Return an option of the model that is a size."""
        value = options[name]
        assert isinstance(value, int)
        return value

    generator = torch.Generator().manual_seed(_DATA_SEED)
    count = setup.batch
    if facts.task == "classify":
        names = ("features",) if "features" in options else ("channels", "image", "image")
        shape = tuple(size(name) for name in names)
        inputs = torch.randn(count, *shape, generator=generator)
        targets = torch.randint(0, size("classes"), (count,), generator=generator)
        return inputs, targets, cross_entropy
    tokens = size("tokens") if "tokens" in options else _TOKENS
    shape = (count, 2, tokens) if facts.task == "translate" else (count, tokens)
    inputs = torch.randint(0, size("vocabulary"), shape, generator=generator)
    targets = torch.randint(0, size("vocabulary"), (count, tokens), generator=generator)
    return inputs, targets, gpt_loss


def flat_layers(network: nn.Sequential) -> list[nn.Module]:
    """Return the layers of nested Sequentials in the order of execution."""
    layers: list[nn.Module] = []
    for child in network:
        layers += flat_layers(child) if isinstance(child, nn.Sequential) else [child]
    return layers


def grouped(layers: list[nn.Module]) -> list[nn.Module]:
    """Put every layer without parameters into one group with the layer before it.

    So every stage has parameters, without which torch's optimizers and DeepSpeed refuse it, and a
    VGG-19 has the 19 layers by which the study of torchgpipe, FairScale and DeepSpeed counts.
    """
    groups: list[list[nn.Module]] = []
    for layer in layers:
        has_parameters = next(layer.parameters(), None) is not None
        if groups and not has_parameters:
            groups[-1].append(layer)
        else:
            groups.append([layer])
    return [LayerGroup(group) for group in groups]


def initialise(layers: list[nn.Module], first: int, seed: int) -> list[nn.Module]:
    """Give layers their memory on the CPU and their initial weights, which depend only on the seed
    and on the index of the layer.

    Args:
        layers: without memory.
        first: index of the first of them in the model.
        seed: of the run.
    """
    initialised = []
    for index, layer in enumerate(layers, first):
        torch.manual_seed(seed * _SEED_STEP + index)
        # A copy: the skeleton stays without memory, to compute the shapes of boundaries.
        materialised = copy.deepcopy(layer).to_empty(device="cpu")
        for part in materialised.modules():
            reset = getattr(part, "reset_parameters", None)
            if reset is not None:
                reset()
        initialised.append(materialised)
    return initialised
