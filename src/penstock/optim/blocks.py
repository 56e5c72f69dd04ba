"""Blocks: room for the values of parameters, laid out in memory as the parameters are.

Parameters that lie next to each other in one storage (recurrent layers on a GPU, for which cuDNN
wants them so) make one block together: moved apart, they would be brought together again at every
forward.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(eq=False)
class Block:
    """Room for one group of parameters.

    Attributes:
        group: which group.
        flat: all of it, in one dimension.
        tensors: the value of each parameter of the group, views of `flat`.
        users: how many versions it is part of.
    """

    group: int
    flat: Tensor
    tensors: list[Tensor]
    users: int = 0


class Layout:
    """The groups of some parameters: `groups` has their indices."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters = parameters
        self.groups = [
            group for together in _by_storage(parameters) for group in _split(parameters, together)
        ]
        places = {
            i: (group, position)
            for group, indices in enumerate(self.groups)
            for position, i in enumerate(indices)
        }
        self._places = [places[i] for i in range(len(parameters))]

    def present(self) -> list[Block]:
        """Blocks where the parameters are now."""
        found = []
        for group, indices in enumerate(self.groups):
            values = [self.parameters[i].data for i in indices]
            first, size = _span(values)
            found.append(Block(group, values[0].as_strided((size,), (1,), first), values))
        return found

    def room(self, group: int) -> Block:
        """A new block, not filled."""
        values = [self.parameters[i].data for i in self.groups[group]]
        first, size = _span(values)
        flat = torch.empty(size, dtype=values[0].dtype, device=values[0].device)
        views = [
            flat.as_strided(value.shape, value.stride(), value.storage_offset() - first)
            for value in values
        ]
        return Block(group, flat, views)

    def tensors(self, blocks: Sequence[Block]) -> list[Tensor]:
        """The values in some blocks, one of each group, in the order of the parameters."""
        return [blocks[group].tensors[position] for group, position in self._places]


def copy(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy values, without a word to autograd if the targets are aliases made by `.data`."""
    if targets:
        torch._foreach_copy_(list(targets), list(sources))


def point(parameters: Sequence[nn.Parameter], tensors: Sequence[Tensor]) -> None:
    """Let the parameters be these tensors. So are, from now on, those parameters that a graph in
    flight has saved whole.
    """
    for parameter, tensor in zip(parameters, tensors, strict=True):
        if parameter.data_ptr() != tensor.data_ptr():
            parameter.data = tensor


def take(parameters: Sequence[nn.Parameter], tensors: Sequence[Tensor]) -> None:
    """After a step: have its result in these tensors, which the parameters were. Some optimizers
    set `.data` anew.
    """
    moved = [
        (p, tensor)
        for p, tensor in zip(parameters, tensors, strict=True)
        if p.data_ptr() != tensor.data_ptr()
    ]
    copy([tensor for _, tensor in moved], [p.data for p, _ in moved])
    for parameter, tensor in moved:
        parameter.data = tensor


def _by_storage(parameters: Sequence[nn.Parameter]) -> Iterator[list[int]]:
    """Indices of parameters of one dtype in one storage."""
    together: dict[object, list[int]] = {}
    for index, parameter in enumerate(parameters):
        place = parameter.untyped_storage().data_ptr()
        together.setdefault((place, parameter.dtype) if place else index, []).append(index)
    yield from together.values()


def _split(parameters: Sequence[nn.Parameter], indices: list[int]) -> list[list[int]]:
    """The same group, unless there is more between its parameters than in them."""
    values = [parameters[i].data for i in indices]
    return (
        [indices] if _span(values)[1] <= sum(map(Tensor.numel, values)) else [[i] for i in indices]
    )


def _span(values: Sequence[Tensor]) -> tuple[int, int]:
    """Where in their storage these tensors begin, and over how many elements they stretch."""
    first = min(int(value.storage_offset()) for value in values)
    ends = [
        int(value.storage_offset())
        + sum((size - 1) * step for size, step in zip(value.shape, value.stride(), strict=True))
        + 1
        for value in values
        if value.numel()
    ]
    return first, max(ends, default=first) - first
