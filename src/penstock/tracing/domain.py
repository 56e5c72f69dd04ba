"""Input shapes for which a graph is valid."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import SymInt, Tensor, fx


@dataclass(frozen=True, eq=False)
class Domain:
    """Input shapes for which a graph is valid.

    Attributes:
        sizes: for each input its sizes, as numbers or as expressions of symbols.
        conditions: conditions on the symbols that the model evaluated while it was traced, as
            `if x.shape != y.shape` does.
        ranges: symbols with their least and greatest values; None for no upper limit.
    """

    sizes: tuple[tuple[Any, ...], ...]
    conditions: tuple[Any, ...] = ()
    ranges: tuple[tuple[Any, int, int | None], ...] = ()

    @classmethod
    def of(cls, graph: fx.Graph) -> Domain:
        """Return the domain of an exported graph."""
        sizes: list[tuple[Any, ...]] = []
        shape_env: Any = None
        for node in graph.find_nodes(op="placeholder"):
            value = node.meta.get("val")
            assert isinstance(value, Tensor)
            shape: list[Any] = list(value.shape)  # of ints and SymInts; to mypy all are ints
            for size in shape:
                if isinstance(size, SymInt) and shape_env is None:
                    shape_env = size.node.shape_env
            sizes.append(tuple(map(_expression, shape)))
        if shape_env is None:
            return cls(tuple(sizes))
        return cls(tuple(sizes), _conditions(shape_env), _ranges(shape_env, sizes))

    def has(self, tensors: Sequence[Tensor]) -> bool:
        """Return whether the graph is valid for inputs of these shapes."""
        values = self._values_of_symbols(tensors)
        if values is None:
            return False
        for symbol, low, high in self.ranges:
            value = values.get(symbol, low)
            if value < low or (high is not None and value > high):
                return False
        # A condition on symbols other than sizes of inputs cannot be decided, and counts as
        # violated.
        # Compared with True, since sympy has a true of its own.
        results = (condition.xreplace(values) for condition in self.conditions)
        return all(result == True for result in results)  # noqa: E712

    def elements(self, value: Tensor, tensors: Sequence[Tensor]) -> int | None:
        """Return how many elements a value of the graph has for inputs of these shapes.

        Args:
            value: the value as it was traced.
            tensors: the inputs.

        Returns:
            None if the number depends on the contents of the inputs.
        """
        count: Any = math.prod(map(_expression, value.shape))
        if not isinstance(count, int):
            count = count.xreplace(self._values_of_symbols(tensors) or {})
        return int(count) if isinstance(count, int) or count.is_Integer else None

    def counts_samples(self, size: Any) -> bool:
        """Return whether a size in the graph follows the number of samples, the first size of the
        inputs, or depends on their contents.
        """
        symbols: frozenset[Any] = getattr(_expression(size), "free_symbols", frozenset())
        # torch names sizes that depend on contents u0, u1 and so on.
        return any(symbol in self._sample_symbols or str(symbol)[0] == "u" for symbol in symbols)

    @cached_property
    def _sample_symbols(self) -> frozenset[Any]:
        """The symbols in the first sizes of the inputs."""
        symbols: set[Any] = set()
        for sizes in self.sizes:
            if sizes:
                symbols |= getattr(sizes[0], "free_symbols", frozenset())
        return frozenset(symbols)

    def _values_of_symbols(self, tensors: Sequence[Tensor]) -> dict[Any, int] | None:
        """Return the value of each symbol; None if the shapes contradict `sizes`."""
        pairs: list[tuple[Any, int]] = []
        for expected, tensor in zip(self.sizes, tensors, strict=True):
            if len(expected) != tensor.dim():
                return None
            pairs += zip(expected, tensor.shape, strict=True)
        values: dict[Any, int] = {}
        derived = []
        for expression, size in pairs:
            if isinstance(expression, int):
                matches = expression == size
            elif expression.is_Symbol:
                matches = values.setdefault(expression, size) == size
            else:
                # Decided below, when the values of all symbols are known.
                matches = True
                derived.append((expression, size))
            if not matches:
                return None
        if any(expression.xreplace(values) != size for expression, size in derived):
            return None
        return values


def _expression(size: Any) -> Any:
    """Return the symbolic expression of a size; a number for a fixed one."""
    return size.node.expr if isinstance(size, SymInt) else size


def _conditions(shape_env: Any) -> tuple[Any, ...]:
    """Return the conditions on sizes under which a trace is valid."""
    # `replace` substitutes symbols that turned out to be equal to others, or to numbers.
    conditions = (shape_env.replace(guard.expr) for guard in shape_env.guards)
    return tuple(condition for condition in conditions if condition != True)  # noqa: E712


def _ranges(
    shape_env: Any, sizes: Sequence[Sequence[Any]]
) -> tuple[tuple[Any, int, int | None], ...]:
    """Return the symbols that occur in sizes, with the least and the largest value of each."""
    symbols: set[Any] = set()
    for shape in sizes:
        for size in shape:
            symbols.update(getattr(size, "free_symbols", ()))
    return tuple(
        (symbol, int(limits.lower), int(limits.upper) if limits.upper.is_Integer else None)
        for symbol, limits in shape_env.var_to_range.items()
        if symbol in symbols
    )
