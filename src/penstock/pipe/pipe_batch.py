"""Split the input of a `Pipe` into micro-batches, and concatenate their outputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from penstock.batches.splitting import fault_of_rows
from penstock.transport.payload import Payload
from penstock.values.constants import same_constant
from penstock.values.structure import Structure, Unflattenable, flatten


def check_input(value: Any) -> None:
    """Reject an input that cannot be split into micro-batches.

    Raises:
        TypeError: an item in it is neither a tensor nor None (attributes of objects may be of other
            types), or is a sparse tensor.
    """
    if type(value) is Tensor:
        return
    try:
        leaves, structure = flatten(value)
    except Unflattenable as error:
        raise TypeError(f"the input of a Pipe cannot be cut into micro-batches: {error}") from error
    if structure.has("sparse"):
        raise TypeError(
            "the input of a Pipe has a sparse tensor in it, which cannot be cut into "
            "micro-batches: make it in the first layer"
        )
    for leaf, is_item in zip(leaves, structure.items(), strict=True):
        if is_item and leaf is not None and not isinstance(leaf, Tensor):
            raise TypeError(
                f"expected Tensor, but got {type(leaf).__name__}: a Pipe takes a tensor, or "
                "tensors and None in nested tuples, lists, mappings and records, so that they can "
                "be cut into micro-batches"
            )


def split_input(value: Any, chunks: int) -> list[Payload]:
    """Split a nested input into at most `chunks` micro-batches.

    Each tensor is split by `torch.chunk` along its first dimension. A single micro-batch may have
    tensors without dimensions, such as the number by which a model divides its loss.

    Raises:
        ValueError: the tensors have different numbers of samples, or there are no tensors.
    """
    whole = Payload.of(value)
    columns: list[tuple[Tensor, ...]] = []
    for tensor in whole.tensors:
        values = tensor.detach()
        # As in torchgpipe, which gives fewer pieces where the samples do not suffice.
        columns.append((values,) if chunks == 1 else torch.chunk(values, chunks))
    if len({len(tensor) for tensor in whole.tensors if tensor.dim()}) != 1:
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in whole.tensors) or "no tensors"
        raise ValueError(
            "the tensors of an input are cut into micro-batches along their first dimension, which "
            f"must be the same number of samples in each; these have {shapes}"
        )
    return [whole.with_tensors(pieces) for pieces in zip(*columns, strict=True)]


def concatenate_outputs(outputs: Sequence[Payload], samples: Sequence[int]) -> Payload:
    """Concatenate the outputs of all micro-batches.

    Args:
        outputs: by micro-batch.
        samples: number of samples of each micro-batch.

    Raises:
        TypeError: an item is neither a tensor nor None.
        RuntimeError: the outputs of micro-batches differ in structure or in attributes, or the
            first dimension of a tensor does not index the samples.
    """
    first = outputs[0]
    if any(output.structure != first.structure for output in outputs):
        raise RuntimeError(
            "the output of one micro-batch is nested in another way than that of another: they "
            "cannot be joined"
        )
    items = [True]
    if isinstance(first.structure, Structure):
        items = first.structure.items()
        if first.structure.has("sparse"):
            raise RuntimeError(
                "the last layer of a Pipe returned a sparse tensor, and outputs of micro-batches "
                "are joined along their first dimension: return its to_dense()"
            )
    leaves: list[Any] = []
    for *column, is_item in zip(*(output.leaves for output in outputs), items, strict=True):
        leaves.append(_concatenate_leaf(column, samples, is_item=is_item))
    return replace(first, leaves=tuple(leaves))


def _concatenate_leaf(column: Sequence[Any], samples: Sequence[int], *, is_item: bool) -> Any:
    """Return one leaf of the whole output, given that leaf of every micro-batch.

    Args:
        column: the leaf, by micro-batch.
        samples: number of samples of each micro-batch.
        is_item: whether it is an item of a container, not an attribute of an object.
    """
    if not all(isinstance(leaf, Tensor) for leaf in column):
        _check_constant(column, is_item=is_item)
    if not isinstance(column[0], Tensor):
        return column[0]
    if len(column) == 1:
        return column[0].detach()
    if column[0].dim() == 0:
        raise RuntimeError(
            "the last layer of a Pipe returned a tensor without dimensions: outputs of "
            "micro-batches are joined along their first one, so reduce after the Pipe, or use "
            "chunks=1. A model that computes its loss returns one: pass it no labels (Trainer "
            "passes them in evaluations without label_names=['labels'])"
        )
    fault = fault_of_rows(column, samples)
    if fault:
        raise RuntimeError(
            f"the last layer of a Pipe {fault}; so transpose or reduce after the Pipe, or use "
            "chunks=1"
        )
    return torch.cat([leaf.detach() for leaf in column])


def _check_constant(column: Sequence[Any], *, is_item: bool) -> None:
    """Reject a leaf that is not a tensor, unless it is an equal constant in all micro-batches."""
    for leaf in column:
        if is_item and leaf is not None and not isinstance(leaf, Tensor):
            raise TypeError(
                f"expected Tensor, but got {type(leaf).__name__}: the output of the last layer of "
                "a Pipe is joined from its micro-batches, so it must consist of tensors and None"
            )
        if not same_constant(leaf, column[0]):
            raise RuntimeError(
                f"the last layer of a Pipe returned {column[0]!r} for one micro-batch and {leaf!r} "
                "for another: only tensors can be joined"
            )
