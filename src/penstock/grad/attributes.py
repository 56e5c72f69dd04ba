"""Attributes of modules during recomputation: counters, rates and switches.

The second forward of a recomputed layer sees the numbers, strings and flags that the first forward
saw, and its own changes to them are undone, as for buffers. A counter therefore goes up once per
micro-batch, with and without recomputation. Modules of torch.nn keep no such state, so layers that
consist of torch.nn modules alone are skipped.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import NoneType
from typing import Any

from torch import nn

_SCALAR_TYPES = frozenset({bool, int, float, complex, str, NoneType})
_MODULE_ATTRIBUTES = frozenset(vars(nn.Module())) - {"training"}

#: Attribute values, one tuple per module, in the order of `_ModuleAttributes.keys`.
Values = Sequence[tuple[Any, ...]]


class _NotScalar:
    """Marker for a value that is neither a number, a string, a flag nor None."""


class _ModuleAttributes:
    """The scalar attributes of one module."""

    __slots__ = ("keys", "names", "values")

    def __init__(self, values: dict[str, Any]) -> None:
        self.values = values
        self.keys: tuple[str, ...] = ()
        # The keys, and what torch keeps in every module.
        self.names = set(_MODULE_ATTRIBUTES)

    def read(self) -> tuple[Any, ...]:
        """Return the current values, one per key."""
        values = self.values
        # Their number does not tell: a module may delete one attribute and make another.
        if not values.keys() <= self.names:
            # Keys are only appended, so that tuples that were read earlier stay aligned with them.
            self.keys += tuple(key for key in values if key not in self.names)
            self.names.update(self.keys)
        current = [values.get(key, _NotScalar) for key in self.keys]
        return tuple([value if type(value) in _SCALAR_TYPES else _NotScalar for value in current])

    def write(self, targets: tuple[Any, ...]) -> None:
        """Set the attributes whose value differs from `targets`, a result of `read`."""
        # `targets` is shorter than `keys` if the module has got attributes since it was read.
        for key, target, current in zip(self.keys, targets, self.read(), strict=False):
            if target is not current and target is not _NotScalar:
                self.values[key] = target


class Attributes:
    """The numbers, strings and flags that modules hold as attributes.

    Args:
        layers: the modules. Those that consist of torch.nn modules alone are skipped.
    """

    def __init__(self, layers: Iterable[nn.Module]) -> None:
        modules: dict[int, _ModuleAttributes] = {}
        for layer in layers:
            parts = list(layer.modules())
            if any(not is_torch_module(part) for part in parts):
                for part in parts:
                    modules.setdefault(id(part), _ModuleAttributes(vars(part)))
        self._modules = list(modules.values())

    def contents(self) -> Values:
        """Return the current values, which a forward is about to read."""
        return [module.read() for module in self._modules]

    @contextmanager
    def with_contents(self, contents: Values) -> Iterator[None]:
        """Set the attributes to `contents` in this context, and restore them afterwards."""
        before = self.contents()
        self._write(contents)
        try:
            yield
        finally:
            self._write(before)

    def _write(self, contents: Values) -> None:
        for module, values in zip(self._modules, contents, strict=True):
            module.write(values)


def is_torch_module(module: nn.Module) -> bool:
    """Return whether a module runs only the forward of its torch.nn class."""
    return type(module).__module__.startswith("torch.nn.modules.") and "forward" not in vars(module)
