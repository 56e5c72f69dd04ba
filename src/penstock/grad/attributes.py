"""Plain attributes of modules between a forward and its recomputation: counters, rates and
switches.

The second forward sees the numbers, strings and flags that the first saw, and its own changes to
them are undone, as for buffers: a counter goes up once per micro-batch, with recompute and without.
Modules of torch.nn keep no such state, so layers that are made of them alone are left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import NoneType
from typing import Any

from torch import nn

_PLAIN = frozenset({bool, int, float, complex, str, NoneType})
_OF_TORCH = frozenset(vars(nn.Module())) - {"training"}

#: Values by module, in the order of `_Module.keys`.
Values = Sequence[tuple[Any, ...]]


class _Other:
    """In the place of a value that is no plain one."""


class _Module:
    """The attributes of one module."""

    __slots__ = ("keys", "size", "values")

    def __init__(self, values: dict[str, Any]) -> None:
        self.values = values
        self.keys: tuple[str, ...] = ()
        self.size = -1

    def read(self) -> tuple[Any, ...]:
        values = self.values
        if len(values) != self.size:
            # Keys are never dropped or moved, so that tuples that were read earlier still fit.
            known = set(self.keys)
            self.keys += tuple(key for key in values if key not in known and key not in _OF_TORCH)
            self.size = len(values)
        found = [values.get(key, _Other) for key in self.keys]
        return tuple([value if type(value) in _PLAIN else _Other for value in found])

    def write(self, wanted: tuple[Any, ...]) -> None:
        for key, value, present in zip(self.keys, wanted, self.read(), strict=False):
            if value is not present and value is not _Other:
                self.values[key] = value


class Attributes:
    """Numbers, strings and flags that modules have as attributes.

    Args:
        layers: modules; those that consist of modules of torch.nn alone are left out, unless
        `complete`. complete: include all.
    """

    def __init__(self, layers: Iterable[nn.Module], *, complete: bool = False) -> None:
        found: dict[int, _Module] = {}
        for layer in layers:
            parts = list(layer.modules())
            if complete or any(not of_torch(part) for part in parts):
                for part in parts:
                    found.setdefault(id(part), _Module(vars(part)))
        self._modules = list(found.values())

    def contents(self) -> Values:
        """What a forward is about to see."""
        return [module.read() for module in self._modules]

    @contextmanager
    def as_they_were(self, contents: Values) -> Iterator[None]:
        """Let a forward see `contents`; afterwards all is as before."""
        present = self.contents()
        self._write(contents)
        try:
            yield
        finally:
            self._write(present)

    def _write(self, contents: Values) -> None:
        for module, values in zip(self._modules, contents, strict=True):
            module.write(values)


def of_torch(module: nn.Module) -> bool:
    """Whether a module runs code of torch.nn only."""
    return type(module).__module__.startswith("torch.nn.modules.") and "forward" not in vars(module)
