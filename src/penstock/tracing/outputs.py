"""What a model returns, taken apart for a graph and put together again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from penstock.tracing.faults import Refused

_MOVES = object()


@dataclass(frozen=True, eq=False)
class _Fields:
    """Stands for a dataclass while its fields are in a list."""

    kind: type


_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, _Fields)


@dataclass(eq=False)
class Outputs:
    """How a model's outputs nest: dataclasses that torch cannot take apart are lists of their
    fields here.
    """

    spec: pytree.TreeSpec | None = None
    constants: list[Any] = field(default_factory=list)

    def flatten(self, output: Any) -> tuple[Any, ...]:
        """What changes from run to run: tensors, and whole numbers that depend on shapes."""
        leaves, self.spec = pytree.tree_flatten(_opened(output))
        moving = []
        self.constants = []
        for leaf in leaves:
            if isinstance(leaf, (Tensor, torch.SymInt)):
                moving.append(leaf)
                self.constants.append(_MOVES)
            elif isinstance(leaf, _PLAIN):
                self.constants.append(leaf)
            else:
                raise Refused(f"it returns a {type(leaf).__name__}, which is no nesting of tensors")
        return tuple(moving)

    def value(self, moving: Sequence[Any]) -> Any:
        """The model's own output."""
        given = iter(moving)
        assert self.spec is not None
        return _closed(
            pytree.tree_unflatten(
                [next(given) if each is _MOVES else each for each in self.constants], self.spec
            )
        )


def _opened(value: Any) -> Any:
    if (
        is_dataclass(value)
        and not isinstance(value, type)
        and type(value) not in pytree.SUPPORTED_NODES
    ):
        return [
            _Fields(type(value)),
            *(_opened(getattr(value, each.name)) for each in fields(value) if each.init),
        ]
    if type(value) in (list, tuple):
        return type(value)(_opened(item) for item in value)
    if type(value) is dict:
        return {key: _opened(item) for key, item in value.items()}
    return value


def _closed(value: Any) -> Any:
    if type(value) is list and value and isinstance(value[0], _Fields):
        names = [each.name for each in fields(value[0].kind) if each.init]
        return value[0].kind(**dict(zip(names, map(_closed, value[1:]), strict=True)))
    if type(value) in (list, tuple):
        return type(value)(_closed(item) for item in value)
    if type(value) is dict:
        return {key: _closed(item) for key, item in value.items()}
    return value
