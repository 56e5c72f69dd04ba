"""The divisor of a loss, read from the graph that autograd has recorded.

Most losses are a sum over samples, tokens or pixels, divided by the number of them, or of those
that count. The loss of a batch is then the sum of the micro-batches' losses, each multiplied by its
own divisor and divided by the batch's. The graph shows the divisor: `NllLossBackward0` has saved
the total weight of its targets, a mean the number of its elements, and a division its denominator.
"""

from __future__ import annotations

import math
from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

#: Reductions as ATen numbers them.
MEAN, SUM = 1, 2

#: Nodes that pass all elements on, with at most another shape, dtype or sign. None of these changes
#: by what a sum is divided.
_SAME_VALUE = frozenset(
    {
        "AliasBackward0",
        "ViewBackward0",
        "UnsafeViewBackward0",
        "ReshapeAliasBackward0",
        "SqueezeBackward0",
        "SqueezeBackward1",
        "SqueezeBackward2",
        "UnsqueezeBackward0",
        "ToCopyBackward0",
        "CloneBackward0",
        "NegBackward0",
        "ExpandBackward0",
        "ToBackward0",
        "PermuteBackward0",
    }
)
_SUMS = frozenset({"SumBackward0", "SumBackward1"})
_MEANS = frozenset({"MeanBackward0", "MeanBackward1"})
#: Negative log-likelihoods of class indices.
NLL = frozenset({"NllLossBackward0", "NllLoss2DBackward0"})
#: Losses of torch that are a mean or a sum over the elements of their input.
_ELEMENTWISE = frozenset(
    {
        "MseLossBackward0",
        "SmoothL1LossBackward0",
        "HuberLossBackward0",
        "BinaryCrossEntropyBackward0",
        "BinaryCrossEntropyWithLogitsBackward0",
        "SoftMarginLossBackward0",
        "MultiMarginLossBackward0",
        "MultilabelMarginLossBackward0",
    }
)

#: By class weights on a device: their version, and a copy in host memory.
_HOST_COPIES: MutableMapping[Tensor, tuple[int, Tensor]] = WeakIdKeyDictionary()


class UnknownForm(Exception):
    """The graph is not that of a sum divided by a number."""


@dataclass(frozen=True)
class Term:
    """A part of a loss: a sum divided by `divisor`.

    Attributes:
        divisor: 1 for a plain sum.
        node: the node of a negative log-likelihood, if the term is nothing else.
        leaf: the leaf of the graph, if the term is that tensor times 1 / `divisor`.
        summed: whether the term is a sum that is divided by constants only.
        elements: number of elements that the term reduces; None if it reduces none.
    """

    divisor: float
    node: Any = None
    leaf: Tensor | None = None
    summed: bool = False
    elements: int | None = None


def terms_of(loss: Tensor) -> list[Term]:
    """Return the terms of which a loss is the sum (or the difference).

    Raises:
        UnknownForm: the graph has another form, or the loss has no graph.
    """
    if loss.grad_fn is None:
        if loss.requires_grad:
            return [Term(1.0, leaf=loss)]
        raise UnknownForm("no graph")
    return _terms(loss.grad_fn, 1.0)


def _terms(node: Any, factor: float) -> list[Term]:
    """Return the terms of the value that `node` computes, all of them multiplied by `factor`."""
    node, factor = _unscaled(node, factor)
    name = node.name()
    if name in ("AddBackward0", "SubBackward0"):
        parts = [child for child, _ in node.next_functions if child is not None]
        return [term for part in parts for term in _terms(part, factor)]
    stacked = _stacked(node, name)
    if stacked:
        count = 1 if name in _SUMS else _elements(node)
        return [term for part in stacked for term in _terms(part, factor / count)]
    if not math.isfinite(factor) or factor == 0.0:
        # Divided by 0, or multiplied by 0: no micro-batch counts in this term.
        return [Term(0.0)]
    if name.endswith("AccumulateGrad"):
        return [Term(1 / factor, leaf=node.variable)]
    divisor = _divisor(node, name)
    bare = node if factor == 1.0 and name in NLL else None
    return [Term(divisor / factor, bare, None, _is_sum(node, name), _elements(node))]


def _stacked(node: Any, name: str) -> list[Any]:
    """Return the nodes of the numbers of which a node is the sum or mean, such as
    `torch.stack([first_loss, second_loss]).mean()`; none if it reduces something else.
    """
    if name not in _SUMS | _MEANS:
        return []
    inputs = [source for source, _ in node.next_functions if source is not None]
    if len(inputs) != 1 or inputs[0].name() != "StackBackward0":
        return []
    if len(inputs[0]._input_metadata[0].shape) > 1:
        return []
    return [part for part, _ in inputs[0].next_functions if part is not None]


def _elements(node: Any) -> int:
    """Return the number of elements that a reduction acts on."""
    sizes = getattr(node, "_saved_self_sym_sizes", None)
    return int(node._saved_self.numel()) if sizes is None else math.prod(sizes)


def _unscaled(node: Any, factor: float) -> tuple[Any, float]:
    """Skip nodes that only multiply by a number; return the next one, and the new factor."""
    while True:
        name = node.name()
        if name in _SAME_VALUE:
            node = _only_input(node)
        elif name in _SCALING:
            scale, node = _SCALING[name](node)
            factor *= scale
        else:
            return node, factor


def _is_sum(node: Any, name: str) -> bool:
    return name in _SUMS or getattr(node, "_saved_reduction", MEAN) == SUM


def _divisor(node: Any, name: str) -> float:
    """Return the number by which a reduction divides its sum; 1 for a sum."""
    if _is_sum(node, name):
        return 1.0
    if name == "MeanBackward0":
        return float(node._saved_self_sym_numel)
    if name == "MeanBackward1":
        sizes, dims = node._saved_self_sym_sizes, node._saved_dim
        return float(math.prod(sizes[signed(dim)] for dim in dims) if dims else math.prod(sizes))
    if name in NLL and node._saved_reduction == MEAN:
        return nll_count(node)
    if name in _ELEMENTWISE and node._saved_reduction == MEAN:
        return float(node._saved_self.numel())
    raise UnknownForm(name)


def nll_count(node: Any) -> float:
    """Return the total weight of the targets of a negative log-likelihood."""
    total = node._saved_total_weight
    if not total.is_meta:
        return float(total)
    return class_count(node._saved_target, node._saved_weight, ignored_index(node))


def ignored_index(node: Any) -> int:
    """Return the class that the node ignores."""
    return signed(node._saved_ignore_index)


def class_count(target: Tensor, weight: Tensor | None, ignore_index: int) -> float:
    """Return the total weight of targets that are class indices.

    Raises:
        UnknownForm: the values are unknown, since they depend on outputs.
    """
    if target.is_meta or (weight is not None and weight.is_meta):
        raise UnknownForm("targets that depend on outputs")
    counts = target != ignore_index
    if weight is None:
        return float(counts.sum())
    if target.is_cpu:
        weight = _host_copy(weight)
    chosen = weight.detach().double()[target.clamp(0, len(weight) - 1).long()]
    return float((chosen * counts).sum())


def class_counts(
    targets: Sequence[Tensor], weight: Tensor | None, ignore_index: int
) -> list[float]:
    """Return the total weights of several targets that are class indices.

    Targets in host memory are counted there, without waiting for a device. Otherwise the host
    waits for the device once.
    """
    if all(target.is_cpu for target in targets):
        return [class_count(target, weight, ignore_index) for target in targets]
    totals = []
    for target in targets:
        classes = target if weight is None else target.to(weight.device)
        counts = classes != ignore_index
        if weight is not None:
            counts = counts * weight.detach().double()[classes.clamp(0, len(weight) - 1).long()]
        totals.append(counts.sum())
    return [float(total) for total in torch.stack(totals).tolist()]


def _host_copy(weight: Tensor) -> Tensor:
    """Return class weights in host memory. They are copied from a device when they have changed."""
    if weight.is_cpu:
        return weight
    version = 0 if weight.is_inference() else weight._version
    copy = _HOST_COPIES.get(weight)
    if copy is None or copy[0] != version:
        copy = _HOST_COPIES[weight] = version, weight.detach().cpu()
    return copy[1]


def signed(number: int) -> int:
    """Return a number that a node has saved; nodes return negative ones as unsigned 64-bit ones."""
    return number - 2**64 if number >= 2**63 else number


def _only_input(node: Any) -> Any:
    """Return the only node whose result `node` takes; None in `next_functions` is a constant."""
    inputs = [source for source, _ in node.next_functions if source is not None]
    if len(inputs) != 1:
        raise UnknownForm(node.name())
    return inputs[0]


# The functions of `_SCALING` return the factor of a node, and the node that it multiplies.


def _number(value: Any) -> float:
    """Return a factor as a number, which must not depend on outputs of the model."""
    if isinstance(value, Tensor):
        if value.is_meta or value.numel() != 1:
            raise UnknownForm("a factor that depends on outputs")
        return float(value)
    return float(value)


def _multiplication(node: Any) -> tuple[float, Any]:
    multiplied = _only_input(node)
    is_first = node.next_functions[0][0] is multiplied
    return _number(node._saved_other if is_first else node._saved_self), multiplied


def _multiplication_by_number(node: Any) -> tuple[float, Any]:
    return _number(node._saved_other), _only_input(node)


def _division(node: Any) -> tuple[float, Any]:
    """Return the factor of a division by a constant, and the node that it divides."""
    if node.next_functions[0][0] is None:
        raise UnknownForm("a division by what depends on outputs")
    divisor = _number(node._saved_other)
    return (math.inf if divisor == 0.0 else 1.0 / divisor), _only_input(node)


_SCALING: dict[str, Callable[[Any], tuple[float, Any]]] = {
    "MulBackward0": _multiplication,
    "MulBackward1": _multiplication_by_number,
    "DivBackward0": _division,
    "DivBackward1": _division,
}


def is_float(leaf: Any) -> bool:
    """Whether a leaf of an output can have a gradient."""
    return isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.is_complex())


def same(one: float, other: float, tolerance: float = 1e-6) -> bool:
    """Whether two counts are equal up to rounding."""
    return math.isclose(one, other, rel_tol=tolerance, abs_tol=1e-12)


def detached(value: Any) -> Any:
    """Return a tensor without its graph; any other value unchanged."""
    return value.detach() if isinstance(value, torch.Tensor) else value
