"""Whether the loss of a sample depends on other samples, read from the graph of a traced model.

Only ops without weights that lie behind the last op with weights are looked at: they are the loss.
Layers may mix samples, as batch normalisation does; training then works per micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, fx
from torch.utils import _pytree as pytree

from penstock.losses.terms import UnknownForm
from penstock.tracing.ops import SHAPE_ALONE, argument, op_name
from penstock.tracing.variants import Variant

#: Ops that move or combine elements along dimensions, and the argument that names these. The
#: result has the shape of the input.
_ALONG = {
    "cumsum": "dim",
    "cumprod": "dim",
    "cummax": "dim",
    "cummin": "dim",
    "logcumsumexp": "dim",
    "softmax": "dim",
    "_softmax": "dim",
    "log_softmax": "dim",
    "_log_softmax": "dim",
    "softmin": "dim",
    "sort": "dim",
    "argsort": "dim",
    "flip": "dims",
    "roll": "dims",
}


def check_single_samples(variant: Variant, reductions: Iterable[fx.Node]) -> None:
    """Check that reductions to terms of a loss reduce values of single samples.

    A graph that was captured for one number of samples does not tell, and passes.

    Args:
        variant: the graph.
        reductions: the ops that reduce to one number.

    Raises:
        UnknownForm: an op between the last weights and a reduction mixes samples.
    """
    mixing = _Mixing(variant)
    waiting = [node for reduction in reductions for node in reduction.all_input_nodes]
    visited = set(waiting)
    while waiting:
        node = waiting.pop()
        if not mixing.is_of_loss(node):
            continue
        if mixing.reduces_samples(node) or mixing.moves_samples(node):
            raise UnknownForm(f"{op_name(node)} over samples, whose losses then depend on others")
        fresh = [used for used in node.all_input_nodes if used not in visited]
        visited.update(fresh)
        waiting += fresh


class _Mixing:
    """Which ops of one graph combine values of several samples."""

    def __init__(self, variant: Variant) -> None:
        self._flow, self._domain = variant.flow, variant.captured.domain

    def is_of_loss(self, node: fx.Node) -> bool:
        """Whether an op has no weights. It may depend on the inputs of the model alone."""
        if node.op != "call_function":
            return False
        return not any(used in self._flow.weights for used in node.all_input_nodes)

    def reduces_samples(self, node: fx.Node) -> bool:
        """Whether an op takes a value with samples and returns one without, as a mean over them."""
        name = op_name(node)
        if name in SHAPE_ALONE or name.startswith("sym_") or not _tensors(node):
            return False
        return not self._has_samples(node) and any(map(self._has_samples, node.all_input_nodes))

    def moves_samples(self, node: fx.Node) -> bool:
        """Whether an op works along the dimension of the samples, as a cumulative sum does."""
        name = op_name(node)
        if name not in _ALONG:
            return False
        (value, *_) = _tensors(node.all_input_nodes[0])
        # `sort` works along the last dimension by default, and `roll` on all elements in a row.
        dims = argument(node, _ALONG[name], [0] if name == "roll" else -1)
        dims = [dims] if isinstance(dims, int) else list(dims)
        return any(self._domain.counts_samples(value.shape[dim]) for dim in dims)

    def _has_samples(self, node: fx.Node) -> bool:
        """Whether the number of samples shows in the shape of a value."""
        return any(
            self._domain.counts_samples(size) for tensor in _tensors(node) for size in tensor.shape
        )


def _tensors(node: fx.Node) -> list[Tensor]:
    """Return the tensors that a node stands for, as they were traced."""
    leaves = pytree.tree_leaves(node.meta.get("val"))
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]
