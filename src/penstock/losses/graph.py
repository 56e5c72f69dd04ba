"""Analysis of the autograd graph of a loss.

It finds functions that are nonlinear in the batch, and whether samples interact. A numeric test
cannot show all of this. `(loss - b).abs() + b` (flooding, Ishida et al., 2020) equals `loss` as
long as the loss of every part is above `b`: the losses of parts of a batch then add up early in the
training, but not late in it. The graph shows from the beginning that the absolute value is taken of
one number to which all samples contribute.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from penstock.losses.terms import MEAN, NLL, class_count, ignored_index, signed

#: Functions that are linear in parts, or nearly so; names of nodes without `Backward0`. Where all
#: samples stay in one part, no numeric test tells these from linear functions. It does see what
#: bends everywhere, such as a square root.
_PIECEWISE = frozenset(
    {
        "Abs",
        "Amax",
        "Amin",
        "Clamp",
        "ClampMax",
        "ClampMin",
        "Elu",
        "Fmax",
        "Fmin",
        "Gelu",
        "Hardshrink",
        "Hardsigmoid",
        "Hardswish",
        "Hardtanh",
        "LeakyRelu",
        "LogSigmoid",
        "Logsumexp",
        "Max",
        "Maximum",
        "Min",
        "Minimum",
        "Mish",
        "Prelu",
        "Relu",
        "Silu",
        "Softplus",
        "Softshrink",
        "Threshold",
        "Where",
    }
)
#: Losses that are piecewise linear, or nearly so; they may contain the reduction.
_PIECEWISE_LOSSES = frozenset(
    {
        "HuberLoss",
        "MultiMarginLoss",
        "MultilabelMarginLoss",
        "SmoothL1Loss",
        "SoftMarginLoss",
    }
)
#: Functions that leave every sample where it is; `_keeps_rows` looks at the dimensions of the
#: others.
_IDENTITY = frozenset({"AliasBackward0", "CloneBackward0", "ToCopyBackward0"})
_VIEWS = frozenset({"ReshapeAliasBackward0", "UnsafeViewBackward0", "ViewBackward0"})


@dataclass(frozen=True)
class Nonlinearity:
    """A piecewise linear function that is applied to a model's output.

    Attributes:
        name: name of the function, such as "Abs".
        size: number of elements that it acts on.
    """

    name: str
    size: int


def nonlinearities(loss: Tensor, outputs: Iterable[Tensor]) -> list[Nonlinearity]:
    """Return the piecewise linear functions of `outputs` in the graph of `loss`.

    Args:
        loss: one number, with its graph.
        outputs: leaves of that graph.

    Returns:
        The functions in the order of the walk over the graph.
    """
    identities = {id(leaf) for leaf in outputs}
    depends: dict[Any, bool] = {}
    order: list[Any] = []
    # A walk without recursion, since graphs are deeper than Python's stack: each node is visited
    # before its inputs and again after them.
    pending = [(loss.grad_fn, False)] if loss.grad_fn is not None else []
    while pending:
        node, visited = pending.pop()
        following = [child for child, _ in node.next_functions if child is not None]
        if visited:
            depends[node] = any(depends.get(child, False) for child in following)
        elif node not in depends:
            is_output = id(getattr(node, "variable", None)) in identities
            depends[node] = is_output
            if not is_output:
                order.append(node)
                pending.append((node, True))
                pending.extend((child, False) for child in following)
    return [
        Nonlinearity(_function(node), _size(node))
        for node in order
        if depends[node] and _function(node) in _PIECEWISE | _PIECEWISE_LOSSES
    ]


def nonlinear_in_batch(
    first: Sequence[Nonlinearity], second: Sequence[Nonlinearity], joined: Sequence[Nonlinearity]
) -> str | None:
    """Return the name of a function that acts on a value whose size does not grow with the batch.

    Such a value is a mean over samples, for example.

    Args:
        first: the functions in the loss of a part of a batch.
        second: those of another part.
        joined: those of both parts in one batch. If it has more of them, they occur once per
            sample.
    """
    names = [function.name for function in first]
    for functions in (second, joined):
        if [function.name for function in functions] != names:
            return None
    for parts in zip(first, second, joined, strict=True):
        sizes = {function.size for function in parts}
        if len(sizes) == 1 and sizes != {0}:
            return parts[0].name
    return None


def is_per_row(likelihood: Any, target: Tensor) -> bool:
    """Whether a negative log-likelihood is over rows of an output, each with its own target.

    Samples then do not interact.

    Args:
        likelihood: the node of the likelihood.
        target: the targets of a micro-batch.
    """
    # Class weights may be computed from the targets of each micro-batch.
    if likelihood._saved_weight is not None:
        return False
    rows = likelihood._saved_target.flatten()
    shifts = (target, target[:, 1:]) if target.dim() > 1 else (target,)
    if not any(_equal(rows, leaf.flatten()) for leaf in shifts):
        return False
    node = likelihood.next_functions[0][0]
    if node.name() != "LogSoftmaxBackward0" or _is_first(node, node._saved_dim):
        return False
    node = node.next_functions[0][0]
    while node.name() in _IDENTITY or _keeps_rows(node):
        node = node.next_functions[0][0]
    # Only a leaf has a variable: the output of the model, with nothing else in between.
    return hasattr(node, "variable")


def divides_smoothing_by_zero(loss: Tensor) -> bool:
    """Whether a loss has a likelihood whose targets all have a class weight of 0, and a quotient
    with a divisor of 0.

    `cross_entropy` with class weights and label smoothing is the sum of both. The divisor of both
    is the total weight of the targets. If that is 0, the likelihood has no sum either. The
    smoothing has, since it adds up the scores of all classes.
    """
    waiting = [loss.grad_fn] if loss.grad_fn is not None else []
    visited = set(waiting)
    has_likelihood = has_quotient = False
    while waiting:
        node: Any = waiting.pop()
        has_likelihood = has_likelihood or _has_no_weight(node)
        has_quotient = has_quotient or _divides_by_zero(node)
        fresh = {child for child, _ in node.next_functions if child is not None} - visited
        visited |= fresh
        waiting += fresh
    return has_likelihood and has_quotient


def _has_no_weight(node: Any) -> bool:
    """Whether a node is a mean likelihood whose targets all have a class weight of 0.

    Targets that are all ignored have no smoothing either.
    """
    if node.name() not in NLL or node._saved_reduction != MEAN:
        return False
    target, weight, ignored = node._saved_target, node._saved_weight, ignored_index(node)
    if weight is None or weight.is_meta or target.is_meta:
        return False
    return class_count(target, weight, ignored) == 0.0 < class_count(target, None, ignored)


def _divides_by_zero(node: Any) -> bool:
    """Whether a node is a quotient whose divisor is the number 0."""
    divisor = getattr(node, "_saved_other", None) if node.name() == "DivBackward0" else None
    return (
        isinstance(divisor, Tensor)
        and not divisor.is_meta
        and divisor.numel() == 1
        and not divisor.item()
    )


def _keeps_rows(node: Any) -> bool:
    """Whether a change of shape neither mixes nor drops samples."""
    name = node.name()
    if name == "SliceBackward0":
        return not _is_first(node, node._saved_dim)
    if name == "TransposeBackward0":
        return not (_is_first(node, node._saved_dim0) or _is_first(node, node._saved_dim1))
    if name not in _VIEWS:
        return False
    before = node._saved_self_sym_sizes
    after = node._input_metadata[0].shape
    # To rows of classes, each of which stays whole.
    return len(after) == 2 and before[-1] == after[-1]


def _is_first(node: Any, dim: int) -> bool:
    """Whether a dimension of a node's result is the first.

    Nodes store negative numbers as unsigned ones.
    """
    return signed(dim) % len(node._input_metadata[0].shape) == 0


def _function(node: Any) -> str:
    """Return a node's name without `Backward0`, and without `Kernel` (`PreluKernelBackward0`)."""
    name: str = node.name()
    return name.rstrip("0123456789").removesuffix("Backward").removesuffix("Kernel")


def _size(node: Any) -> int:
    """Return the number of elements that a node acts on; of a maximum, of its result."""
    if _function(node) in _PIECEWISE_LOSSES:
        return int(node._saved_self.numel())
    return math.prod(node._input_metadata[0].shape)


def _equal(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and bool((one == other).all())
