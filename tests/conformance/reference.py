"""Plain training in one process, written out: what every pipeline must equal.

Nothing of the runtime is used here but the seed of a random stream, which is part of the promise:
it depends on the pipeline's seed, the step, the layer and the micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from penstock.modules.randomness import may_draw, stream_seed
from penstock.schedule.op import Kind, Schedule


def layers_of(model: nn.Module) -> list[nn.Module]:
    """The leaves of nested Sequentials, in the order of running."""
    if type(model) is not nn.Sequential:
        return [model]
    return [layer for child in model for layer in layers_of(child)]


def samples_of(value: Any) -> int:
    """The first extent of the first tensor."""
    if isinstance(value, Tensor):
        return value.shape[0]
    return samples_of(next(iter(value.values() if isinstance(value, dict) else value)))


def split(value: Any, parts: int) -> list[Any]:
    """Nested tensors in nearly equal parts, larger ones first."""
    if isinstance(value, Tensor):
        return list(torch.tensor_split(value, parts))
    if isinstance(value, dict):
        cut = {key: split(item, parts) for key, item in value.items()}
        return [{key: item[part] for key, item in cut.items()} for part in range(parts)]
    if isinstance(value, (tuple, list)):
        cut = [split(item, parts) for item in value]
        return [type(value)(item[part] for item in cut) for part in range(parts)]
    return [value] * parts


@dataclass
class PlainTraining:
    """A model in one process, trained on the same micro-batches as the pipeline."""

    model: nn.Module
    loss: Callable[[Any, Any], Tensor]
    seed: int = 0
    step: int = 0

    def backward(self, x: Any, y: Any, micro_batches: int) -> Tensor:
        """Forward and backward of all micro-batches in turn, gradients added up in `.grad`; the
        mean loss of the batch.
        """
        parts = min(micro_batches, samples_of(x))
        losses = []
        for m, (own_x, own_y) in enumerate(zip(split(x, parts), split(y, parts), strict=True)):
            share = self.loss(self.forward(own_x, m), own_y) * (samples_of(own_x) / samples_of(x))
            share.backward()
            losses.append(share.detach())
        self.step += 1
        return torch.stack(losses).sum()

    def forward(self, x: Any, micro_batch: int) -> Any:
        """Layers in turn, each that may draw random numbers with its own stream."""
        with torch.random.fork_rng(devices=[]):
            for index, layer in enumerate(layers_of(self.model)):
                if may_draw(layer):
                    torch.default_generator.manual_seed(
                        stream_seed(self.seed, self.step, index, micro_batch)
                    )
                x = layer(x)
        return x

    def backward_in_parts(
        self, x: Any, y: Any, micro_batches: int
    ) -> tuple[Tensor, list[dict[str, Tensor]]]:
        """As `backward`, but with every micro-batch's gradients apart, by name."""
        parts = min(micro_batches, samples_of(x))
        losses, part_gradients = [], []
        for m, (own_x, own_y) in enumerate(zip(split(x, parts), split(y, parts), strict=True)):
            self.model.zero_grad()
            share = self.loss(self.forward(own_x, m), own_y) * (samples_of(own_x) / samples_of(x))
            share.backward()
            losses.append(share.detach())
            part_gradients.append(gradients(self.model))
        self.model.zero_grad()
        self.step += 1
        return torch.stack(losses).sum(), part_gradients


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Copies of all gradients by name; parameters without one are left out."""
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def added_up(parts: Sequence[dict[str, Tensor]], order: Iterable[int]) -> dict[str, Tensor]:
    """Gradients added in the order in which autograd would meet them."""
    total: dict[str, Tensor] = {}
    for m in order:
        for name, grad in parts[m].items():
            total[name] = total[name] + grad if name in total else grad
    return total


def in_order_of(
    schedule: Schedule, lengths: Sequence[int], model: nn.Module, parts: Sequence[dict[str, Tensor]]
) -> dict[str, Tensor]:
    """Gradients added up as the programs say: every copy of a stage in the order of its own B and
    W, then the copies by rank.
    """
    layers = layers_of(model)
    names = {parameter: name for name, parameter in model.named_parameters()}
    total: dict[str, Tensor] = {}
    for stage, length in enumerate(lengths):
        stage_layers, layers = layers[:length], layers[length:]
        held = {names[parameter] for layer in stage_layers for parameter in layer.parameters()}
        stage_parts = [
            {name: grad for name, grad in part.items() if name in held} for part in parts
        ]
        copies = []
        for program in schedule.programs:
            order = [
                op.micro_batch
                for op in program
                if op.stage == stage and op.kind in (Kind.B, Kind.W)
            ]
            copies.append(added_up(stage_parts, [m for m in order if m < len(parts)]))
        total |= added_up(copies, range(len(copies)))
    return total


def differences(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> list[str]:
    """Names that differ, in being there or in any bit."""
    names = actual.keys() | expected.keys()
    return sorted(
        n
        for n in names
        if n not in actual or n not in expected or not torch.equal(actual[n], expected[n])
    )
