"""Whether the loss of a sample depends on other samples, read from the graph of a traced model.

Only ops without weights that lie behind the last op with weights are looked at: they are the loss.
Layers may mix samples, as batch normalisation does; training then works per micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import fx

from penstock.losses.terms import UnknownForm
from penstock.tracing.ops import SHAPE_ALONE, argument, op_name, output_tensors
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
    "gather": "dim",
    "index_select": "dim",
    "take_along_dim": "dim",
}
#: Ops that combine values of all samples, along no dimension that an argument names.
_OVER_ALL = frozenset(
    {
        "batch_norm",
        "native_batch_norm",
        "_native_batch_norm_legit",
        "take",
    }
)
#: Ops whose result are places in the order of the samples, and ops that keep these.
_PLACES = frozenset({"arange", "nonzero", "nonzero_numpy"})
_SAME_PLACES = frozenset(
    {
        "alias",
        "clone",
        "contiguous",
        "expand",
        "getitem",
        "reshape",
        "select",
        "slice",
        "squeeze",
        "to",
        "_to_copy",
        "unsqueeze",
        "view",
    }
)


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
        if mixing.mixes(node):
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

    def mixes(self, node: fx.Node) -> bool:
        """Whether the result of an op for one sample depends on other samples."""
        name = op_name(node)
        if name in _OVER_ALL:
            return any(map(self._sample_dims, node.all_input_nodes))
        if name == "einsum":
            return self._sums_over_samples(node)
        if name == "index":
            return self._chooses_samples(node)
        if name == "scaled_dot_product_attention":
            keys = output_tensors(argument(node, "key", None))[0]
            return self._domain.counts_samples(keys.shape[-2])
        return self.reduces_samples(node) or self.moves_samples(node)

    def _sums_over_samples(self, node: fx.Node) -> bool:
        """Whether an index of samples in an einsum is not one of its result."""
        terms, _, result = argument(node, "equation", "").replace(" ", "").partition("->")
        for term, operand in zip(terms.split(","), argument(node, "tensors", ()), strict=True):
            sizes = output_tensors(operand)[0].shape
            # "..." stands for the dimensions that have no index of their own.
            front, dots, back = term.partition("...")
            indices = front + "." * (len(sizes) - len(term) + len(dots)) + back
            for index, size in zip(indices, sizes, strict=True):
                if index not in result and self._domain.counts_samples(size):
                    return True
        return False

    def _chooses_samples(self, node: fx.Node) -> bool:
        """Whether an op takes samples from places that are computed otherwise than in order."""
        value = output_tensors(argument(node, "self", None))[0]
        for size, index in zip(value.shape, argument(node, "indices", ()), strict=False):
            if index is None or not self._domain.counts_samples(size):
                continue
            source = index
            while op_name(source) in _SAME_PLACES:
                source = source.args[0]
            is_mask = output_tensors(index)[0].dtype is torch.bool
            if not is_mask and op_name(source) not in _PLACES:
                return True
        return False

    def reduces_samples(self, node: fx.Node) -> bool:
        """Whether a value has more dimensions of samples than the result of an op on it.

        A mean over samples takes one and leaves none. A sum over the rows of a matrix of pairs of
        samples takes two and leaves one.
        """
        name = op_name(node)
        if name in SHAPE_ALONE or name.startswith("sym_") or not output_tensors(node):
            return False
        left = self._sample_dims(node)
        return any(self._sample_dims(used) > left for used in node.all_input_nodes)

    def moves_samples(self, node: fx.Node) -> bool:
        """Whether an op works along the dimension of the samples, as a cumulative sum does."""
        name = op_name(node)
        if name not in _ALONG:
            return False
        (value, *_) = output_tensors(node.all_input_nodes[0])
        # `sort` works along the last dimension by default, and `roll` on all elements in a row.
        dims = argument(node, _ALONG[name], [0] if name == "roll" else -1)
        dims = [dims] if isinstance(dims, int) else list(dims)
        return any(self._domain.counts_samples(value.shape[dim]) for dim in dims)

    def _sample_dims(self, node: fx.Node) -> int:
        """Return the number of dimensions of a value whose size follows the number of samples."""
        counts = [
            sum(map(self._domain.counts_samples, tensor.shape)) for tensor in output_tensors(node)
        ]
        return max(counts, default=0)
