"""Cut a study's models into stages by operation counts, which are the same on every machine."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from penstock.errors import SettingError
from penstock.partition.bottleneck import minimax
from penstock.tracing.traced_chain import TracedChain

#: Cost of an element read or written, in multiply-adds. With this value the costs of the layers of
#: a VGG-11 an eighth as wide are within a half of their times on one core, where normalising takes
#: as long as convolving.
_MULTIPLY_ADDS_PER_ELEMENT = 20


def cut_into_stages(traced: TracedChain, example: Tensor, stages: int) -> list[int]:
    """Return the layers per stage that minimise the cost of the most expensive stage.

    Args:
        traced: the model, on the meta device.
        example: inputs; only their shape matters.
        stages: number of stages.

    Raises:
        SettingError: there are more stages than layers.
    """
    if stages > len(traced):
        raise SettingError(f"the model has {len(traced)} layers, which cannot make {stages} stages")
    return minimax(layer_costs(traced, example), stages)


def layer_costs(traced: TracedChain, example: Tensor) -> list[float]:
    """Return the cost of each layer for one sample in multiply-adds: those of its matrices, plus 20
    per element of its input and output.
    """
    costs = []
    value = example[:2].to("meta")
    with torch.no_grad():
        for module in traced.modules:
            layer_input, value = value, module(value)
            positions = _count_positions(value)
            multiply_adds = sum(positions * matrix.numel() for matrix in _matrices(module))
            elements = layer_input[0].numel() + value[0].numel()
            costs.append(float(multiply_adds + _MULTIPLY_ADDS_PER_ELEMENT * elements))
    return costs


def _count_positions(output: Tensor) -> int:
    """Return the number of positions of a sample at which a matrix is applied: pixels, tokens or
    1.
    """
    shape = output.shape[1:]
    return math.prod(shape[1:] if len(shape) == 3 else shape[:-1])


def _matrices(module: nn.Module) -> list[Tensor]:
    """Return the weights of matrix products; an embedding's table is looked up, not multiplied."""
    embeddings = [part for part in module.modules() if isinstance(part, nn.Embedding)]
    table_ids = {id(embedding.weight) for embedding in embeddings}
    return [
        weight for weight in module.parameters() if weight.dim() > 1 and id(weight) not in table_ids
    ]
