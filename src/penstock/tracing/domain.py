"""For which shapes of inputs a graph is right."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import SymInt, Tensor, fx


@dataclass(frozen=True, eq=False)
class Domain:
    """Sizes of every input as numbers or expressions of symbols; conditions on these; and the least
    and greatest of each.

    The conditions are all that the model has asked of a size while it was traced, as `if x.shape !=
    y.shape` does.
    """

    sizes: tuple[tuple[Any, ...], ...]
    conditions: tuple[Any, ...] = ()
    ranges: tuple[tuple[Any, int, int | None], ...] = ()

    @classmethod
    def of(cls, graph: fx.Graph) -> Domain:
        """That of an exported graph."""
        sizes: list[tuple[Any, ...]] = []
        shapes: Any = None
        for node in graph.find_nodes(op="placeholder"):
            value = node.meta.get("val")
            assert isinstance(value, Tensor)
            row: list[Any] = list(
                value.shape
            )  # of whole numbers and SymInts, which torch calls ints
            sizes.append(
                tuple(size.node.expr if isinstance(size, SymInt) else size for size in row)
            )
            shapes = next((size.node.shape_env for size in row if isinstance(size, SymInt)), shapes)
        if shapes is None:
            return cls(tuple(sizes))
        # Symbols that turned out to be one, or a number, are replaced.
        conditions = tuple(
            each
            for each in (shapes.replace(guard.expr) for guard in shapes.guards)
            if each != True  # noqa: E712
        )
        free = {
            symbol for row in sizes for size in row for symbol in getattr(size, "free_symbols", ())
        }
        ranges = tuple(
            (symbol, int(held.lower), int(held.upper) if held.upper.is_Integer else None)
            for symbol, held in shapes.var_to_range.items()
            if symbol in free
        )
        return cls(tuple(sizes), conditions, ranges)

    def has(self, tensors: Sequence[Tensor]) -> bool:
        """Whether the graph is right for inputs of these shapes."""
        bound: dict[Any, int] = {}
        derived = []
        for expected, tensor in zip(self.sizes, tensors, strict=True):
            if len(expected) != tensor.dim():
                return False
            for size, found in zip(expected, tensor.shape, strict=True):
                if isinstance(size, int):
                    if size != found:
                        return False
                elif size.is_Symbol:
                    if bound.setdefault(size, found) != found:
                        return False
                else:
                    derived.append((size, found))
        if any(size.xreplace(bound) != found for size, found in derived):
            return False
        if any(
            bound.get(symbol, low) < low or (high is not None and bound.get(symbol, low) > high)
            for symbol, low, high in self.ranges
        ):
            return False
        # A condition on something else than sizes of inputs is not known to hold, so that it counts
        # as broken.
        return all(condition.xreplace(bound) == True for condition in self.conditions)  # noqa: E712  # sympy's own true
