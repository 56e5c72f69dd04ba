"""Cut: into how many layers per stage a study cuts a model; the same on every machine, since it
goes by shapes and not by times.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from penstock.errors import SettingError
from penstock.partition.bottleneck import minimax
from penstock.tracing.chain import TracedChain

#: Multiply-adds that a number read or written is worth. With it the weights of VGG-11's layers, an
#: eighth as wide, are within a
#: half of their times on one core, where normalising takes as long as convolving.
_PER_NUMBER = 20


def cut(traced: TracedChain, example: Tensor, stages: int) -> list[int]:
    """Layers per stage, the heaviest as light as can be.

    Args:
        traced: the model, on the meta device.
        example: inputs, whose shape counts.
        stages: how many.

    Raises:
        SettingError: there are more stages than layers.
    """
    if stages > len(traced):
        raise SettingError(f"the model has {len(traced)} layers, which cannot make {stages} stages")
    return minimax(weights(traced, example), stages)


def weights(traced: TracedChain, example: Tensor) -> list[float]:
    """Per layer, what it has to do for one sample, in multiply-adds: those of its matrices, and
    numbers in and out.
    """
    found = []
    value = example[:2].to("meta")
    with torch.no_grad():
        for module in traced.modules:
            before, value = value, module(value)
            positions = _positions(value)
            sums = sum(positions * matrix.numel() for matrix in _matrices(module))
            found.append(float(sums + _PER_NUMBER * (before[0].numel() + value[0].numel())))
    return found


def _positions(output: Tensor) -> int:
    """At how many places of a sample a matrix is applied: pixels, tokens, or one."""
    shape = output.shape[1:]
    return math.prod(shape[1:] if len(shape) == 3 else shape[:-1])


def _matrices(module: nn.Module) -> list[Tensor]:
    """The weights that are multiplied with: a table of vectors is only looked up."""
    tables = {id(part.weight) for part in module.modules() if isinstance(part, nn.Embedding)}
    return [
        weight for weight in module.parameters() if weight.dim() > 1 and id(weight) not in tables
    ]
