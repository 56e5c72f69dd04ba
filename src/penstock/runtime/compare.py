"""The self-check: one batch through the pipeline and through plain training, side by side."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from penstock.runtime import state
from penstock.runtime.batch import Batch
from penstock.runtime.stage import Loss
from penstock.runtime.world import World
from penstock.tracing.chain import TracedChain
from penstock.tracing.materialise import materialise
from penstock.tracing.names import parameters_of, state_of
from penstock.tracing.randomness import drawing, may_draw, seed_generators, stream_seed
from penstock.tracing.slices import has_past


@dataclass(frozen=True)
class Comparison:
    """Largest absolute differences between the pipeline and one device that accumulates the same micro-batches.

    `gradients` and `buffers` by name; `loss` is the difference of the mean losses. `scale` has the largest absolute value of
    each on the one device, to hold the difference against.
    """

    gradients: Mapping[str, float] = field(default_factory=dict)
    buffers: Mapping[str, float] = field(default_factory=dict)
    loss: float = 0.0
    scale: Mapping[str, float] = field(default_factory=dict)

    @property
    def worst(self) -> tuple[str, float]:
        """The name and size of the largest difference."""
        everything = {**self.gradients, **self.buffers, "loss": self.loss}
        name = max(everything, key=lambda key: everything[key])
        return name, everything[name]


def compare(world: World, placed: state.Placed, play: Callable[[], Tensor], batch: Batch, loss: Loss, seed: int) -> Comparison:
    """Play a batch without updates and hold gradients, buffers and loss against plain training on rank 0.

    Gradients and buffers of the stages are afterwards as they were before.

    Args:
        world: the ranks.
        placed: where layers are.
        play: runs the batch's program without updates and returns its mean loss.
        batch: the batch.
        loss: the loss function.
        seed: the pipeline's seed, for dropout.
    """
    before = state.collect(world, placed)
    grads = [(parameter, parameter.grad) for stage in placed.local for parameter in stage.update.parameters]
    buffers = [(buffer, buffer.detach().clone()) for stage in placed.local for module in stage.modules()
               for buffer in module._buffers.values() if buffer is not None]  # fmt: skip
    for parameter, _ in grads:
        parameter.grad = None
    try:
        found_loss = play()
        found_grads, found_state = state.collect_grads(world, placed), state.collect(world, placed)
    finally:
        for parameter, grad in grads:
            parameter.grad = grad
        with torch.no_grad():
            for buffer, content in buffers:
                buffer.copy_(content)
    if 0 not in world.local_ranks:
        return Comparison()
    modules = _one_device(placed, before)
    # Sequences that the schedule cuts stay whole here, which checks the layers' `forward_slice` against their `forward`; but where
    # layers draw random numbers, these go by slice.
    plain_loss, drew = _plain_training(modules, batch.with_whole_sequences() if batch.cuts_tokens else batch, loss, seed)
    if drew and batch.cuts_tokens:
        modules = _one_device(placed, before)
        plain_loss, _ = _plain_training(modules, batch, loss, seed)
    plain_grads: dict[str, Tensor] = {}
    plain_state: dict[str, Tensor] = {}
    for layer, module in zip(placed.traced.layers, modules, strict=True):
        for name, parameter in parameters_of(layer.name, module):
            grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            plain_grads.setdefault(placed.traced.aliases[name], grad)
        plain_state.update(state_of(layer.name, module))
    parameters = {name for layer in placed.traced.layers for name in layer.parameters} | set(plain_grads)
    moved = {name: tensor for name, tensor in found_state.items() if placed.traced.aliases.get(name, name) not in parameters}
    return Comparison(
        {name: _difference(grad, plain_grads[name]) for name, grad in found_grads.items()},
        {name: _difference(tensor, plain_state[name]) for name, tensor in moved.items()},
        abs(float(found_loss) - plain_loss),
        {name: float(grad.abs().max()) for name, grad in plain_grads.items() if grad.numel()} | {"loss": abs(plain_loss)},
    )


def _one_device(placed: state.Placed, values: Mapping[str, Tensor]) -> list[nn.Module]:
    """A copy of the whole model on the CPU with these values."""
    copied = tuple(copy.deepcopy(nn.ModuleList(placed.traced.modules)))
    # Layers from the meta device are initialised first, for the buffers that no state has.
    modules = materialise(TracedChain(placed.traced.description, copied, placed.traced.aliases), range(len(copied)),
                          torch.device("cpu"), seed=0)  # fmt: skip
    with torch.no_grad():
        for layer, module in zip(placed.traced.layers, modules, strict=True):
            module.zero_grad()
            for name, target in state_of(layer.name, module).items():
                target.copy_(values[name])
    return modules


def _plain_training(modules: list[nn.Module], batch: Batch, loss: Loss, seed: int) -> tuple[float, bool]:
    """Forward and backward of all micro-batches in turn, gradients accumulated, slices of one in one graph.

    Returns:
        The mean loss, and whether any layer has drawn random numbers.
    """
    assert batch.targets is not None
    total = 0.0
    drew = False
    for row in batch.rows():
        parts = []
        pasts: dict[int, Any] = {}
        for n in row:
            value, drawn = _plain_forward(modules, batch, n, seed, pasts)
            parts.append(loss(value, batch.targets[n]) * batch.shares[n])
            drew = drew or drawn
        torch.autograd.backward(parts)
        total += sum(float(part.detach()) for part in parts)
    return total, drew


def _plain_forward(modules: list[nn.Module], batch: Batch, n: int, seed: int, pasts: dict[int, Any]) -> tuple[Any, bool]:
    """The model's output for one micro-batch, or slice, and whether a layer has drawn random numbers; `pasts` moves on."""
    value = pytree.tree_map(
        lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, batch.inputs[n]
    )  # for work in place
    cpu = torch.device("cpu")
    drew = False
    with drawing(cpu):
        for index, module in enumerate(modules):
            if may_draw(module):
                seed_generators(cpu, stream_seed(seed, batch.step, index, n))
            state = torch.get_rng_state()
            if batch.cuts_tokens and has_past(module):
                value, pasts[index] = module.forward_slice(value, pasts.get(index))  # type: ignore[operator]
            else:
                value = module(value)
            drew = drew or not torch.equal(state, torch.get_rng_state())
    return value, drew


def _difference(one: Tensor, other: Tensor) -> float:
    return float((one.double() - other.double()).abs().max()) if one.numel() else 0.0
