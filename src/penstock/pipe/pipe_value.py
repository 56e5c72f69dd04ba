"""Values that pass between the partitions of a `Pipe`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from penstock.values.storage import overlapping
from penstock.values.structure import Structure, check_tensor, flatten, unflatten

#: By tensor of a `BoundaryValue`: its gradient, or None.
Grads = list[Tensor | None]


class BoundaryValue(NamedTuple):
    """A nested value of one micro-batch that passes from one partition to another.

    Attributes:
        leaves: tensors and other leaves, in order.
        structure: how the leaves nest; None for a bare tensor.
        requires_grad: by tensor, whether a gradient is returned for it.
        shared: pairs of its tensors, by position, that share memory in the partition that made
            them.
        shared_outside: positions of tensors that share memory with a value on another port.
    """

    leaves: Sequence[Any]
    structure: Structure | None
    requires_grad: Sequence[bool]
    shared: Sequence[tuple[int, int]] = ()
    shared_outside: Sequence[int] = ()

    @classmethod
    def of(cls, value: Any) -> BoundaryValue:
        """Flatten a value.

        Raises:
            Unflattenable: part of the value cannot be passed between partitions.
        """
        if type(value) is Tensor and value.layout is torch.strided:
            check_tensor(value)
            return cls((value,), None, (value.requires_grad,))
        leaves, structure = flatten(value)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        requires_grad = [tensor.requires_grad for tensor in tensors]
        return cls(leaves, structure, requires_grad, overlapping(tensors))

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors among the leaves, in order."""
        return [leaf for leaf in self.leaves if isinstance(leaf, Tensor)]

    def value(self) -> Any:
        """Return the nested value."""
        return self.leaves[0] if self.structure is None else unflatten(self.structure, self.leaves)

    def with_tensors(self, tensors: Sequence[Tensor]) -> BoundaryValue:
        """Return a copy with the tensors replaced, in order."""
        replacements = iter(tensors)
        leaves = [next(replacements) if isinstance(leaf, Tensor) else leaf for leaf in self.leaves]
        return self._replace(leaves=leaves)

    def detached(self) -> BoundaryValue:
        """Return a copy whose tensors have no graph."""
        return self.with_tensors([tensor.detach() for tensor in self.tensors])

    def gradients(self) -> Grads:
        """Return the gradient of each tensor, None for tensors that do not require one."""
        return [leaf.grad if leaf.requires_grad else None for leaf in self.tensors]


def boundary_values(values: Sequence[Any]) -> list[BoundaryValue]:
    """Flatten the values of several ports, and note tensors that share memory across ports."""
    flat_values = [BoundaryValue.of(value) for value in values]
    if len(flat_values) == 1:
        return flat_values
    port_of = [port for port, flat in enumerate(flat_values) for _ in flat.tensors]
    first_of_port = [port_of.index(port) for port in port_of]
    tensors = [tensor for flat in flat_values for tensor in flat.tensors]
    for pair in overlapping(tensors):
        if port_of[pair[0]] == port_of[pair[1]]:
            continue
        for position in pair:
            port = port_of[position]
            position_in_value = position - first_of_port[position]
            flat = flat_values[port]
            shared_outside = (*flat.shared_outside, position_in_value)
            flat_values[port] = flat._replace(shared_outside=shared_outside)
    return flat_values
