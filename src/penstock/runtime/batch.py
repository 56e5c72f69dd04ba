"""A batch on its way: cut into micro-batches, the same on every rank."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from penstock.errors import SettingError


@dataclass
class Batch:
    """Micro-batches of inputs and targets, and the results that ops leave behind.

    `shares[m]` is micro-batch m's share of the batch's samples: the mean loss weighs samples, not micro-batches.
    """

    step: int
    inputs: list[Any]
    targets: list[Any] | None
    shares: list[float]
    signature: str
    training: bool
    losses: dict[int, Tensor] = field(default_factory=dict)
    outputs: dict[int, Any] = field(default_factory=dict)

    @property
    def micro_batches(self) -> int:
        """How many micro-batches there are."""
        return len(self.inputs)


def sample_count(value: Any, what: str) -> int:
    """The common first extent of all tensors in `value`.

    Raises:
        SettingError: there is none, or the tensors differ.
    """
    tensors = [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]
    counts = {int(tensor.shape[0]) if tensor.dim() else 0 for tensor in tensors}
    if len(counts) != 1 or 0 in counts:
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors) or "no tensors"
        raise SettingError(f"{what} must be tensors with the same number of samples, at least 1, in their first dimension; "
                           f"these have {shapes}")  # fmt: skip
    return counts.pop()


def cut(value: Any, parts: int) -> list[Any]:
    """`value` in `parts` parts along the first dimension of its tensors, equal or nearly equal, larger ones first."""
    leaves, spec = pytree.tree_flatten(value)
    pieces = [list(torch.tensor_split(leaf, parts)) if isinstance(leaf, Tensor) else [leaf] * parts for leaf in leaves]
    return [pytree.tree_unflatten([piece[part] for piece in pieces], spec) for part in range(parts)]


def join(values: list[Any]) -> Any:
    """Put cut values together again.

    Raises:
        SettingError: a tensor among them has no dimension, so that it cannot be of one sample or another.
    """
    if any(isinstance(leaf, Tensor) and leaf.dim() == 0 for leaf in pytree.tree_leaves(values[0])):
        raise SettingError("the model's output has a tensor without a dimension: outputs of micro-batches are joined along their "
                           "first one, which has the samples")  # fmt: skip
    leaves = [pytree.tree_leaves(value) for value in values]
    joined = [torch.cat(list(column)) if isinstance(column[0], Tensor) else column[0] for column in zip(*leaves, strict=True)]
    return pytree.tree_unflatten(joined, pytree.tree_structure(values[0]))


def make_batch(x: Any, y: Any, micro_batches: int, *, step: int, training: bool) -> Batch:
    """Cut a batch into `micro_batches` parts, or into single samples if there are fewer.

    Raises:
        SettingError: inputs and targets have no samples, or not the same number.
    """
    samples = sample_count(x, "the inputs of a batch")
    if y is not None and sample_count(y, "the targets of a batch") != samples:
        raise SettingError(f"a batch has {samples} inputs and {sample_count(y, 'the targets')} targets")
    parts = min(micro_batches, samples)
    sizes = [samples // parts + (part < samples % parts) for part in range(parts)]
    forms = [(tuple(leaf.shape), str(leaf.dtype)) if isinstance(leaf, Tensor) else repr(leaf) for leaf in pytree.tree_leaves(x)]
    text = repr((training, y is not None, parts, forms, str(pytree.tree_structure(x))))
    signature = hashlib.sha256(text.encode()).hexdigest()[:16]
    return Batch(step, cut(x, parts), None if y is None else cut(y, parts), [size / samples for size in sizes], signature,
                 training)  # fmt: skip
