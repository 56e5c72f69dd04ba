"""Conversion of a model's outputs to a flat list for a graph, and back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from penstock.tracing.faults import Refused

#: Placeholder for an output that is computed in every run.
_COMPUTED = object()


@dataclass(frozen=True, eq=False)
class _Fields:
    """Marks a list as the fields of a dataclass."""

    kind: type


#: Types of outputs that are constants of the graph.
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, _Fields)


@dataclass(eq=False)
class Outputs:
    """Nesting of a model's outputs.

    Dataclasses that torch does not flatten are represented by lists of their fields.

    Attributes:
        spec: the nesting; None before `flatten`.
        constants: the leaves, with a placeholder for computed ones.
    """

    spec: pytree.TreeSpec | None = None
    constants: list[Any] = field(default_factory=list)

    def flatten(self, output: Any) -> tuple[Any, ...]:
        """Return the computed outputs: tensors, and integers that depend on shapes.

        Raises:
            Refused: an output is neither a tensor nor a constant.
        """
        leaves, self.spec = pytree.tree_flatten(_open_dataclasses(output))
        computed = []
        self.constants = []
        for leaf in leaves:
            if isinstance(leaf, (Tensor, torch.SymInt)):
                computed.append(leaf)
                self.constants.append(_COMPUTED)
            elif isinstance(leaf, _PLAIN):
                self.constants.append(leaf)
            else:
                raise Refused(f"it returns a {type(leaf).__name__}, which is no nesting of tensors")
        return tuple(computed)

    def value(self, computed: Sequence[Any]) -> Any:
        """Return the model's own output.

        Args:
            computed: the computed outputs, in order.
        """
        remaining = iter(computed)
        assert self.spec is not None
        leaves = [next(remaining) if leaf is _COMPUTED else leaf for leaf in self.constants]
        return _close_dataclasses(pytree.tree_unflatten(leaves, self.spec))


def _open_dataclasses(value: Any) -> Any:
    """Replace dataclasses by lists of their fields, within nested values."""
    is_dataclass_object = is_dataclass(value) and not isinstance(value, type)
    if is_dataclass_object and type(value) not in pytree.SUPPORTED_NODES:
        kind = type(value)
        return [
            _Fields(kind),
            *(_open_dataclasses(getattr(value, name)) for name in _init_fields(kind)),
        ]
    if type(value) in (list, tuple):
        return type(value)(_open_dataclasses(item) for item in value)
    if type(value) is dict:
        return {key: _open_dataclasses(item) for key, item in value.items()}
    return value


def _init_fields(kind: Any) -> list[str]:
    """Return the fields that the constructor of a dataclass takes; `_close_dataclasses` calls it."""
    return [field.name for field in fields(kind) if field.init]


def _close_dataclasses(value: Any) -> Any:
    """Undo `_open_dataclasses`."""
    if type(value) is list and value and isinstance(value[0], _Fields):
        names = _init_fields(value[0].kind)
        return value[0].kind(**dict(zip(names, map(_close_dataclasses, value[1:]), strict=True)))
    if type(value) in (list, tuple):
        return type(value)(_close_dataclasses(item) for item in value)
    if type(value) is dict:
        return {key: _close_dataclasses(item) for key, item in value.items()}
    return value
