"""A numeric test of how a loss adds up over two parts of a batch.

The divisor of a loss can be read from its graph, but not whether samples interact, as in a
contrastive loss. The loss is therefore evaluated on two parts `a` and `b` and on both joined, `j`.
A loss that adds up has `loss(j) = w_a loss(a) + w_b loss(b)`, where the weights are shares of a
count, shares of the samples, or 1 for a sum. The gradients with respect to the outputs add up
likewise, and are compared too: `loss / loss.detach()` is 1 on every part.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from penstock.batches.splitting import join
from penstock.errors import SettingError
from penstock.losses.call import one_number
from penstock.losses.graph import Nonlinearity, nonlinear_in_batch, nonlinearities
from penstock.losses.terms import is_float
from penstock.values.structure import map_tensors, tensors_of

#: How far both sides may be apart, in proportion, by the precision of the loss.
_TOLERANCE = {torch.float64: 1e-6, torch.float32: 2e-4}
#: The same for float16 and bfloat16, in which long sums are off by per cents.
_COARSE = 0.03

#: How losses add up: by the divisors that the graph shows ("counts"), as a mean over samples or
#: tokens ("shares"), or as a sum.
Weighting = Literal["counts", "shares", "sums"]
Loss = Callable[[Any, Any], Any]
Change = Callable[[Tensor, int], Tensor]


class ReturnsCount(Exception):
    """The loss returns (sum, count)."""


class Draws(Exception):
    """The loss draws random numbers."""


@dataclass(frozen=True)
class Pair:
    """Two parts of a batch.

    Attributes:
        targets: the targets of both.
        sizes: the samples of both, or the tokens if the parts are slices of the same sequences.
        output: an output of the model, without its graph, from which outputs of both are made.
        dim: the dimension along which parts are joined: 0 for samples, 1 for tokens.
        count: samples, or tokens, of `output`.
    """

    targets: tuple[Any, Any]
    sizes: tuple[int, int]
    output: Any
    dim: int
    count: int


@dataclass(frozen=True)
class GradientFit:
    """Comparison of the gradient `g` of a part's loss with that of the joined loss, `g_j`.

    Both are with respect to the output of the part.

    Attributes:
        factor: the `f` that minimises the norm of `g_j - f g`.
        remainder: the norm of `g_j - factor g`.
        alone: the norm of `g`.
        joined: the norm of `g_j`.
    """

    factor: float
    remainder: float
    alone: float
    joined: float

    @classmethod
    def of(cls, alone: Sequence[Tensor], joined: Sequence[Tensor]) -> GradientFit:
        """Compare gradients, leaf by leaf."""
        square = sum(_dot(leaf, leaf) for leaf in alone)
        product = sum(_dot(one, other) for one, other in zip(alone, joined, strict=True))
        factor = product / square if square else 0.0
        rest = [other - factor * one for one, other in zip(alone, joined, strict=True)]
        remainder = math.sqrt(sum(_dot(leaf, leaf) for leaf in rest))
        return cls(
            factor,
            remainder,
            math.sqrt(square),
            math.sqrt(sum(_dot(leaf, leaf) for leaf in joined)),
        )

    def distance(self, weight: float) -> float:
        """Return the norm of `g_j - weight g`; the remainder is orthogonal to `g`."""
        if not weight:
            return self.joined
        return math.hypot(self.remainder, (weight - self.factor) * self.alone)


@dataclass(frozen=True)
class Reading:
    """The loss on two parts and on both joined.

    Attributes:
        first: the loss of the first part.
        second: the loss of the second part.
        joined: the loss of both in one batch.
        tolerance: largest relative difference.
        gradients: the comparison of the gradients of both parts; empty if one is not finite.
        nonlinear: the function that acts on a value to which all samples contribute, if there is
            one.
    """

    first: float
    second: float
    joined: float
    tolerance: float
    gradients: tuple[GradientFit, ...] = ()
    nonlinear: str | None = None

    def fits(self, weights: tuple[float, float]) -> bool:
        """Whether joined loss and gradient are the sums of the parts' with these weights."""
        return self.values_fit(weights) and self._gradients_fit(weights)

    def _gradients_fit(self, weights: tuple[float, float]) -> bool:
        """Return whether the weighted gradients of both parts add up to the joined one."""
        if not self.gradients:
            return True
        pairs = zip(weights, self.gradients, strict=True)
        distance = math.hypot(*[fit.distance(weight) for weight, fit in pairs])
        size = math.hypot(*[fit.joined for fit in self.gradients])
        return distance <= self.tolerance * max(size, 1e-12)

    def values_fit(self, weights: tuple[float, float]) -> bool:
        """Whether the joined loss is the sum of the parts' with these weights."""
        parts = [
            weight * value
            for weight, value in zip(weights, (self.first, self.second), strict=True)
            if weight
        ]
        # Losses near 0 differ by rounding of the terms that cancel in them.
        size = max(sum(map(abs, parts)), abs(self.joined), 1e-6)
        return abs(sum(parts) - self.joined) <= self.tolerance * size

    @property
    def finite(self) -> bool:
        """Whether all three losses are finite."""
        return all(math.isfinite(value) for value in (self.first, self.second, self.joined))


def readings(loss: Loss, pair: Pair, *, brief: bool = False) -> list[Reading]:
    """Evaluate the loss on several different outputs.

    Args:
        loss: the loss.
        pair: the parts on which it is evaluated.
        brief: whether to take the model's own outputs only.

    Raises:
        Exception: any exception of the loss on the model's own outputs.
    """
    results = [_evaluate_pair(loss, pair, _roll_samples)]
    for change in () if brief else (_flip_features, _shift_values, _amplify, _attenuate):
        # A loss may refuse values that its model never returns, such as negative probabilities.
        with suppress(ArithmeticError, LookupError, RuntimeError, TypeError, ValueError):
            results.append(_evaluate_pair(loss, pair, change))
    return [reading for reading in results if reading.finite]


def _evaluate_pair(loss: Loss, pair: Pair, change: Change) -> Reading:
    """Evaluate the loss on the model's outputs for one part, and changed ones for the other."""
    outputs = [
        _output(pair, size, change if second else _identity)
        for second, size in enumerate(pair.sizes)
    ]
    first = _evaluate(loss, outputs[0], pair.targets[0])
    second = _evaluate(loss, outputs[1], pair.targets[1])
    targets = join(list(pair.targets), pair.dim)
    joined = _evaluate(loss, join(outputs, pair.dim), targets)
    dtypes = [evaluation.dtype for evaluation in (first, second, joined)] + [
        leaf.dtype for leaf in tensors_of(pair.output) if leaf.is_floating_point()
    ]
    return Reading(
        first.value,
        second.value,
        joined.value,
        max(_TOLERANCE.get(dtype, _COARSE) for dtype in dtypes),
        _gradient_fits((first, second), joined, pair.dim),
        nonlinear_in_batch(first.functions, second.functions, joined.functions),
    )


def _gradient_fits(
    parts: tuple[_Evaluation, _Evaluation], joined: _Evaluation, dim: int
) -> tuple[GradientFit, ...]:
    """Compare the gradients of both parts with that of both joined.

    Returns:
        One comparison per part; none if a gradient is not finite.
    """
    fits = []
    starts = [0] * len(joined.gradients)  # of the part, in the joined gradient of each leaf
    for part in parts:
        lengths = [gradient.shape[dim] for gradient in part.gradients]
        slices = [
            gradient.narrow(dim, start, length)
            for gradient, start, length in zip(joined.gradients, starts, lengths, strict=True)
        ]
        fits.append(GradientFit.of(part.gradients, slices))
        starts = [start + length for start, length in zip(starts, lengths, strict=True)]
    values = [value for fit in fits for value in (fit.remainder, fit.alone, fit.joined)]
    return tuple(fits) if all(map(math.isfinite, values)) else ()


def _dot(one: Tensor, other: Tensor) -> float:
    """Return the inner product of two gradients, as real numbers."""
    if one.is_complex():
        one, other = torch.view_as_real(one), torch.view_as_real(other)
    if one.dtype.itemsize < torch.float32.itemsize:
        one, other = one.float(), other.float()
    return float((one * other).sum(dtype=torch.float64))


def consistent(
    readings_of_loss: Sequence[Reading], weights_of: Mapping[Weighting, tuple[float, float]]
) -> Weighting | None:
    """Return the first weighting of both parts that fits all readings; None if none does."""
    for name, weights in weights_of.items():
        if all(reading.fits(weights) for reading in readings_of_loss):
            return name
    return None


def _output(pair: Pair, size: int, change: Change) -> Any:
    """Return an output for `size` samples or tokens, changed by `change`."""
    outputs = repeat_samples(pair.output, pair.dim, pair.count, size)
    return _map_leaves(outputs, change, pair.dim)


def repeat_samples(output: Any, dim: int, count: int, size: int) -> Any:
    """Return an output for `size` samples or tokens, by repeating the `count` that there are.

    Raises:
        SettingError: a tensor in it does not have that many along the dimension.
    """

    def chosen(leaf: Tensor, dim: int) -> Tensor:
        if leaf.dim() <= dim or leaf.shape[dim] % count:
            raise SettingError(f"an output of {tuple(leaf.shape)} has no {count} samples")
        rows = leaf.shape[dim] // count
        places = torch.arange(size * rows, device=leaf.device) % leaf.shape[dim]
        return leaf.index_select(dim, places)

    return _map_leaves(output, chosen, dim)


def _map_leaves(value: Any, change: Change, dim: int) -> Any:
    return map_tensors(lambda leaf: change(leaf, dim), value)


def _identity(leaf: Tensor, _: int) -> Tensor:
    return leaf


def _roll_samples(leaf: Tensor, dim: int) -> Tensor:
    """Return the samples in another order, whose values the loss supports."""
    return leaf.roll(1, dim)


def _flip_features(leaf: Tensor, dim: int) -> Tensor:
    """Return the features in another order; probabilities stay probabilities."""
    return leaf.flip(-1) if leaf.dim() > dim + 1 and leaf.is_floating_point() else leaf


def _shift_values(leaf: Tensor, _: int) -> Tensor:
    """Return other values: probabilities and rates halved, all others shifted down."""
    if not leaf.is_floating_point() or not leaf.numel():
        return leaf
    if bool((leaf >= 0).all()):
        return leaf / 2
    return leaf - (leaf.mean() + leaf.std(correction=0) / 2)


def _amplify(leaf: Tensor, dim: int) -> Tensor:
    """Return larger values of the other sign if there are values below 0; others may be
    probabilities.
    """
    if not leaf.is_floating_point() or bool((leaf >= 0).all()):
        return _flip_features(leaf, dim)
    return leaf * -4


def _attenuate(leaf: Tensor, _: int) -> Tensor:
    """Return smaller values, as late in the training."""
    return leaf / 8 if leaf.is_floating_point() else leaf


@dataclass(frozen=True)
class _Evaluation:
    """A loss on one output.

    Attributes:
        value: the loss.
        dtype: its dtype.
        gradients: with respect to the floating-point leaves of the output, in order.
        functions: the piecewise linear functions in it.
    """

    value: float
    dtype: torch.dtype
    gradients: list[Tensor]
    functions: list[Nonlinearity]


def _evaluate(loss: Loss, output: Any, target: Any) -> _Evaluation:
    """Evaluate the loss and its gradient, without changing any tensor or gradient of the caller.

    Raises:
        ReturnsCount: the loss returns (sum, count).
        NotOneNumber: it returns neither that nor a tensor of one number.
    """
    leaves: list[Tensor] = []

    def as_leaf(leaf: Tensor) -> Tensor:
        if not is_float(leaf):
            return leaf.clone()
        leaves.append(leaf.detach().clone().requires_grad_())
        return leaves[-1].clone()  # the loss may change it in place, which a leaf forbids

    value = loss(map_tensors(as_leaf, output), clone_tensors(target))
    if isinstance(value, tuple):
        raise ReturnsCount
    value = one_number(value)
    gradients: Sequence[Tensor | None] = [None] * len(leaves)
    functions: list[Nonlinearity] = []
    if value.requires_grad:
        functions = nonlinearities(value, leaves)
        if leaves:
            gradients = torch.autograd.grad(value, leaves, allow_unused=True)
    filled = [
        torch.zeros_like(leaf) if gradient is None else gradient
        for leaf, gradient in zip(leaves, gradients, strict=True)
    ]
    return _Evaluation(float(value.detach()), value.dtype, filled, functions)


def clone_tensors(value: Any) -> Any:
    """Return a value with cloned tensors, which may be changed in place."""
    return map_tensors(Tensor.clone, value)
