"""A numeric test of how a loss adds up: of two parts of a batch alone, and of the two as one.

What a loss is divided by can be read from its graph, but not whether samples see each other, as they do in a contrastive loss. So the
loss is evaluated without gradients on two parts `a` and `b` and on both joined, `j`. A loss that adds up has
`loss(j) = w_a loss(a) + w_b loss(b)`, with weights that are shares of a count, shares of the samples, or 1 where it is a sum.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from penstock.errors import SettingError
from penstock.runtime.batch import join
from penstock.values.structure import map_tensors, tensors_of

#: How far both sides may be apart, in proportion, by the precision of the loss.
_TOLERANCE = {torch.float64: 1e-6, torch.float32: 2e-4}
_COARSE = 0.03

Loss = Callable[[Any, Any], Any]
Change = Callable[[Tensor, int], Tensor]


class ReturnsCount(Exception):
    """The loss returns (sum, count)."""


@dataclass(frozen=True)
class Pair:
    """Two parts of a batch: their targets and sizes, and an output for one of them to make outputs of.

    Attributes:
        targets: of both.
        sizes: samples of both, or tokens where parts follow each other in the same sequences.
        output: a model's output, without its graph.
        dim: along which parts are joined: 0 for samples, 1 for tokens.
        count: samples, or tokens, of `output`.
    """

    targets: tuple[Any, Any]
    sizes: tuple[int, int]
    output: Any
    dim: int
    count: int


@dataclass(frozen=True)
class Reading:
    """What a loss was on the parts, and on both joined."""

    first: float
    second: float
    joined: float
    tolerance: float

    def fits(self, weights: tuple[float, float]) -> bool:
        """Whether the joined loss is the sum of the parts' with these weights."""
        parts = [
            weight * value
            for weight, value in zip(weights, (self.first, self.second), strict=True)
            if weight
        ]
        size = max(sum(map(abs, parts)), abs(self.joined), 1e-6)
        return abs(sum(parts) - self.joined) <= self.tolerance * size

    @property
    def finite(self) -> bool:
        """Whether there is anything to compare."""
        return all(math.isfinite(each) for each in (self.first, self.second, self.joined))


def readings(loss: Loss, pair: Pair) -> list[Reading]:
    """Evaluate the loss on several different outputs.

    Raises:
        Exception: whatever the loss raises on the model's own outputs.
    """
    found = [_reading(loss, pair, _rolled)]
    for change in (_mirrored, _moved):
        with suppress(
            ArithmeticError, LookupError, RuntimeError, TypeError, ValueError
        ):  # values that the loss was not made for
            found.append(_reading(loss, pair, change))
    return [reading for reading in found if reading.finite]


def _reading(loss: Loss, pair: Pair, change: Change) -> Reading:
    """The loss on the model's outputs for the first part, and on changed ones for the second."""
    outputs = [
        _output(pair, size, change if second else _same) for second, size in enumerate(pair.sizes)
    ]
    values = [
        _value(loss, output, target)
        for output, target in (
            *zip(outputs, pair.targets, strict=True),
            (join_values(outputs, pair.dim), join_values(list(pair.targets), pair.dim)),
        )
    ]
    dtypes = [dtype for _, dtype in values] + [
        leaf.dtype for leaf in tensors_of(pair.output) if leaf.is_floating_point()
    ]
    tolerance = max(_TOLERANCE.get(dtype, _COARSE) for dtype in dtypes)
    first, second, joined = (value for value, _ in values)
    return Reading(first, second, joined, tolerance)


def consistent(found: Sequence[Reading], ways: Mapping[str, tuple[float, float]]) -> str | None:
    """The first of some ways of weighing both parts that fits all readings."""
    for name, weights in ways.items():
        if all(reading.fits(weights) for reading in found):
            return name
    return None


def join_values(values: list[Any], dim: int) -> Any:
    """Nested tensors, in any classes, as one.

    Raises:
        SettingError: a tensor among them has no dimension.
    """
    return join(values, dim)


def _output(pair: Pair, size: int, change: Change) -> Any:
    """An output for `size` samples or tokens, changed."""
    made = repeated(pair.output, pair.dim, pair.count, size)
    return _mapped(made, change, pair.dim)


def repeated(output: Any, dim: int, count: int, size: int) -> Any:
    """An output for `size` samples or tokens: the `count` that there are, over and over.

    Raises:
        SettingError: a tensor in it has not that many along the dimension.
    """

    def chosen(leaf: Tensor, dim: int) -> Tensor:
        if leaf.dim() <= dim or leaf.shape[dim] % count:
            raise SettingError(f"an output of {tuple(leaf.shape)} has no {count} samples")
        rows = leaf.shape[dim] // count
        wanted = torch.arange(size * rows, device=leaf.device) % leaf.shape[dim]
        return leaf.index_select(dim, wanted)

    return _mapped(output, chosen, dim)


def _mapped(value: Any, change: Change, dim: int) -> Any:
    return map_tensors(lambda leaf: change(leaf, dim), value)


def _same(leaf: Tensor, _: int) -> Tensor:
    return leaf


def _rolled(leaf: Tensor, dim: int) -> Tensor:
    """The samples in another order: values that the loss is made for."""
    return leaf.roll(1, dim)


def _mirrored(leaf: Tensor, dim: int) -> Tensor:
    """The features in another order; of probabilities these stay probabilities."""
    return leaf.flip(-1) if leaf.dim() > dim + 1 and leaf.is_floating_point() else leaf


def _moved(leaf: Tensor, _: int) -> Tensor:
    """Other values: probabilities and rates halved, all else moved down."""
    if not leaf.is_floating_point() or not leaf.numel():
        return leaf
    if bool((leaf >= 0).all()):
        return leaf / 2
    return leaf - (leaf.mean() + leaf.std(correction=0) / 2)


def _value(loss: Loss, output: Any, target: Any) -> tuple[float, torch.dtype]:
    value = loss(copied(output), copied(target))
    if isinstance(value, tuple):
        raise ReturnsCount
    return float(value), value.dtype


def copied(value: Any) -> Any:
    """A value whose tensors may be changed in place."""
    return map_tensors(Tensor.clone, value)
