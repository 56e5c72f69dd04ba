"""The weights of all stages under the model's own names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.errors import SettingError
from penstock.runtime.stage import Stage
from penstock.runtime.world import World
from penstock.tracing.chain import TracedChain
from penstock.tracing.names import state_of
from penstock.transport.payload import TensorForm


@dataclass(frozen=True)
class Placed:
    """Which rank holds which layers, and the stages that are held here. A stage with copies counts as its first rank's: `home`.

    `local` are all stages held here, `at_home` those of them that are not copies of another rank's.
    """

    traced: TracedChain
    lengths: tuple[int, ...]
    home: tuple[int, ...]
    local: Sequence[Stage]
    at_home: Sequence[Stage]

    def layers_of_rank(self) -> dict[int, list[int]]:
        """Layer indices by the rank that holds them, ascending."""
        placed: dict[int, list[int]] = {}
        first = 0
        for length, rank in zip(self.lengths, self.home, strict=True):
            placed.setdefault(rank, []).extend(range(first, first + length))
            first += length
        return placed


def own(stage: Stage) -> dict[str, Tensor]:
    """A stage's parameters and persistent buffers, live, by the names that the whole model's `state_dict` has for them."""
    held: dict[str, Tensor] = {}
    for layer in stage.layers:
        held |= state_of(layer.name, layer.module)
    return held


def put(stages: Sequence[Stage], tensors: Mapping[str, Tensor]) -> None:
    """Copy values into some stages: into all, or if anything does not fit, into none.

    Raises:
        SettingError: a tensor is missing or has another shape.
    """
    pairs = []
    for stage in stages:
        for name, target in own(stage).items():
            source = tensors.get(name)
            if source is None:
                raise SettingError(f"the state has no {name!r}, which stage {stage.index} needs")
            if source.shape != target.shape:
                raise SettingError(
                    f"{name} has shape {tuple(source.shape)} in the state and {tuple(target.shape)} in the model"
                )
            pairs.append((target, source))
    with torch.no_grad():
        for target, source in pairs:
            target.copy_(source)


def collect(world: World, placed: Placed) -> dict[str, Tensor]:
    """All stages' tensors on rank 0, in the order of the chain; elsewhere nothing."""
    described = _described(placed)
    local: dict[int, list[Tensor]] = {rank: [] for rank in world.local_ranks}
    for stage in placed.at_home:
        local[placed.home[stage.index]] += own(stage).values()
    return _named(world.gather(local, {rank: list(forms.values()) for rank, forms in described.items()}), described)


def collect_grads(world: World, placed: Placed) -> dict[str, Tensor]:
    """The gradients of all trainable parameters on rank 0, by the chain's names; zeros where there is none."""
    described: dict[int, dict[str, TensorForm]] = {}
    for rank, layers in placed.layers_of_rank().items():
        names = dict.fromkeys(name for layer in layers for name in placed.traced.layers[layer].parameters)
        facts = [placed.traced.description.tensor(name) for name in names]
        described[rank] = {fact.name: TensorForm(fact.shape, fact.dtype, wants_grad=False) for fact in facts if fact.trainable}
    local: dict[int, list[Tensor]] = {rank: [] for rank in world.local_ranks}
    for stage in placed.at_home:
        rank = placed.home[stage.index]
        local[rank] += [
            torch.zeros_like(parameter) if parameter.grad is None else parameter.grad for parameter in stage.update.parameters
        ]
    return _named(world.gather(local, {rank: list(forms.values()) for rank, forms in described.items()}), described)


def _described(placed: Placed) -> dict[int, dict[str, TensorForm]]:
    """Names and forms of what every rank holds, known everywhere since everywhere has the chain."""
    described: dict[int, dict[str, TensorForm]] = {}
    for rank, layers in placed.layers_of_rank().items():
        held: dict[str, Tensor] = {}
        for layer in layers:
            held |= state_of(placed.traced.layers[layer].name, placed.traced.modules[layer])
        described[rank] = {
            name: TensorForm(tuple(value.shape), str(value.dtype).removeprefix("torch."), wants_grad=False)
            for name, value in held.items()
        }
    return described


def _named(gathered: dict[int, list[Tensor]], described: dict[int, dict[str, TensorForm]]) -> dict[str, Tensor]:
    return {
        name: tensor
        for rank, tensors in sorted(gathered.items())
        for name, tensor in zip(described.get(rank, {}), tensors, strict=True)
    }
