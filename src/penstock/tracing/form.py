"""The structure of a micro-batch's inputs, and the call of a model with them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree


@dataclass(frozen=True, eq=False)
class Form:
    """Structure of a micro-batch's inputs.

    Attributes:
        spec: the nesting.
        leaves: tensors, of which only shape and dtype matter, and constants, which become part of
            the graph.
    """

    spec: pytree.TreeSpec
    leaves: tuple[Any, ...]

    @classmethod
    def of(cls, inputs: Any) -> Form:
        """Return the form of inputs; a mapping that is not a dict is treated as a dict."""
        if isinstance(inputs, Mapping) and not isinstance(inputs, dict):
            inputs = dict(inputs)
        leaves, spec = pytree.tree_flatten(inputs)
        return cls(spec, tuple(leaves))

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors, in order."""
        return [leaf for leaf in self.leaves if isinstance(leaf, Tensor)]

    @property
    def kind(self) -> tuple[object, ...]:
        """A key that must be equal for one graph to serve two inputs, whatever their shapes."""
        leaves = tuple(
            (leaf.dtype, leaf.dim()) if isinstance(leaf, Tensor) else (type(leaf), repr(leaf))
            for leaf in self.leaves
        )
        return str(self.spec), leaves

    def on_meta(self) -> Form:
        """Return the same form with its tensors on the meta device."""
        leaves = tuple(
            torch.empty_like(leaf, device="meta") if isinstance(leaf, Tensor) else leaf
            for leaf in self.leaves
        )
        return Form(self.spec, leaves)

    def value(self, tensors: Sequence[Tensor]) -> Any:
        """Return inputs of this structure with other tensors."""
        remaining = iter(tensors)
        leaves = [next(remaining) if isinstance(leaf, Tensor) else leaf for leaf in self.leaves]
        return pytree.tree_unflatten(leaves, self.spec)


def call(model: nn.Module, inputs: Any) -> Any:
    """Call a model with a micro-batch's inputs.

    A tensor is the only argument, a tuple or list the positional arguments, and a dict the keyword
    arguments.
    """
    if isinstance(inputs, dict):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, (tuple, list)) else model(inputs)
