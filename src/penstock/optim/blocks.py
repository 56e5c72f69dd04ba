"""Blocks: memory for the values of parameters, laid out as the parameters are.

Parameters that are contiguous in one storage form one block. Recurrent layers on a GPU are such a
case: cuDNN requires it, and would otherwise make them contiguous again in every forward.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(eq=False)
class Block:
    """Memory for one group of parameters.

    Attributes:
        group: index of the group.
        flat: the whole memory as a tensor of one dimension.
        tensors: the value of each parameter of the group, as views of `flat`.
        users: number of versions that contain the block.
    """

    group: int
    flat: Tensor
    tensors: list[Tensor]
    users: int = 0


class Layout:
    """Division of parameters into groups.

    Attributes:
        parameters: the parameters.
        groups: for each group the indices of its parameters.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters = parameters
        self.groups: list[list[int]] = []
        for indices in _by_storage(parameters):
            self.groups += _split(parameters, indices)
        positions: dict[int, tuple[int, int]] = {}
        for group, indices in enumerate(self.groups):
            for position, index in enumerate(indices):
                positions[index] = (group, position)
        # For each parameter its group, and its position in the group.
        self._positions = [positions[index] for index in range(len(parameters))]

    def current_blocks(self) -> list[Block]:
        """Return blocks over the memory that the parameters have now."""
        blocks = []
        for group, indices in enumerate(self.groups):
            values = [self.parameters[i].data for i in indices]
            first, size = _span(values)
            blocks.append(Block(group, values[0].as_strided((size,), (1,), first), values))
        return blocks

    def new_block(self, group: int) -> Block:
        """Return a new block for a group, uninitialised."""
        values = [self.parameters[i].data for i in self.groups[group]]
        first, size = _span(values)
        flat = torch.empty(size, dtype=values[0].dtype, device=values[0].device)
        views = [
            flat.as_strided(value.shape, value.stride(), value.storage_offset() - first)
            for value in values
        ]
        return Block(group, flat, views)

    def tensors(self, blocks: Sequence[Block]) -> list[Tensor]:
        """Return the values in `blocks`, in the order of the parameters.

        Args:
            blocks: one block for each group, in order.
        """
        return [blocks[group].tensors[position] for group, position in self._positions]


def copy(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy values; autograd does not notice if the targets were obtained by `.data`."""
    if targets:
        torch._foreach_copy_(list(targets), list(sources))


def point(parameters: Sequence[nn.Parameter], tensors: Sequence[Tensor]) -> None:
    """Make the parameters share memory with `tensors`.

    Graphs in flight that saved such a parameter itself, not a view of it, read the new memory too.
    """
    for parameter, tensor in zip(parameters, tensors, strict=True):
        if parameter.data_ptr() != tensor.data_ptr():
            parameter.data = tensor


def take(parameters: Sequence[nn.Parameter], tensors: Sequence[Tensor]) -> None:
    """Bring the result of a step back into `tensors`, the memory the parameters had before it.

    Needed because some optimizers assign a new tensor to `.data`.
    """
    moved = [
        (parameter, tensor)
        for parameter, tensor in zip(parameters, tensors, strict=True)
        if parameter.data_ptr() != tensor.data_ptr()
    ]
    copy([tensor for _, tensor in moved], [parameter.data for parameter, _ in moved])
    for parameter, tensor in moved:
        parameter.data = tensor


def _by_storage(parameters: Sequence[nn.Parameter]) -> Iterator[list[int]]:
    """Yield the indices of the parameters that have one storage and dtype in common."""
    groups: dict[object, list[int]] = {}
    for index, parameter in enumerate(parameters):
        address = parameter.untyped_storage().data_ptr()
        # Address 0: without memory of its own a parameter shares none.
        key = (address, parameter.dtype) if address else index
        groups.setdefault(key, []).append(index)
    yield from groups.values()


def _split(parameters: Sequence[nn.Parameter], indices: list[int]) -> list[list[int]]:
    """Return `indices` as one group if the parameters are contiguous, else one group for each."""
    values = [parameters[i].data for i in indices]
    _, span = _span(values)
    # Below the sum where parameters overlap, and then they must stay together, too.
    if span <= sum(map(Tensor.numel, values)):
        return [indices]
    return [[index] for index in indices]


def _span(values: Sequence[Tensor]) -> tuple[int, int]:
    """Return the storage offset of the first element, and the number of elements up to the last."""
    first = min(int(value.storage_offset()) for value in values)
    end = first
    for value in values:
        if value.numel():
            steps = zip(value.shape, value.stride(), strict=True)
            last = int(value.storage_offset()) + sum((size - 1) * step for size, step in steps)
            end = max(end, last + 1)
    return first, end - first
