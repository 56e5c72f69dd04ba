"""Split nested tensors into micro-batches, and concatenate them again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from penstock.errors import SettingError
from penstock.values.constants import same_constant
from penstock.values.structure import Structure, Unflattenable, flatten, unflatten


def sample_count(value: Any, what: str) -> int:
    """Return the common size of the first dimension of all tensors in `value`.

    Args:
        value: nested tensors.
        what: their name, for the message.

    Raises:
        SettingError: there is no tensor, a tensor has no first dimension, or the sizes differ.
    """
    requirement = (
        f"{what} must be tensors with the same number of samples, at least 1, in their first "
        "dimension"
    )
    return _common_size(value, 0, what, requirement)


def token_count(value: Any, what: str) -> int:
    """Return the common size of the second dimension of all tensors in `value`.

    Arguments and errors are those of `sample_count`.
    """
    requirement = (
        f"the schedule cuts sequences, so {what} must be tensors with the same number of tokens, "
        "at least 1, in their second dimension"
    )
    return _common_size(value, 1, what, requirement)


def _dense_tensors(value: Any, what: str) -> list[Tensor]:
    """Return the tensors of a value that is to be split.

    Raises:
        SettingError: the value cannot be flattened, or contains a sparse tensor.
    """
    if type(value) is Tensor and value.layout is torch.strided:
        return [value]
    try:
        leaves, structure = flatten(value)
    except Unflattenable as error:
        raise SettingError(f"{what} cannot be cut into micro-batches: {error}") from error
    if structure.has("sparse"):
        raise SettingError(
            f"{what} have a sparse tensor in them, which cannot be cut into micro-batches: pass "
            "its indices by sample as padded dense tensors, and make it in the first layer; or "
            "to_dense()"
        )
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def _common_size(value: Any, dim: int, what: str, requirement: str) -> int:
    """Return the common size, at least 1, of dimension `dim` of all tensors in `value`."""
    tensors = _dense_tensors(value, what)
    counts = {int(tensor.shape[dim]) if tensor.dim() > dim else 0 for tensor in tensors}
    if len(counts) != 1 or 0 in counts:
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors) or "no tensors"
        raise SettingError(f"{requirement}; these have {shapes}")
    return counts.pop()


def cut(value: Any, sizes: Sequence[int], dim: int = 0) -> list[Any]:
    """Split `value` into parts of these sizes along one dimension of its tensors."""
    if type(value) is Tensor:
        return list(torch.split(value, list(sizes), dim))
    leaves, structure = flatten(value)
    parts = len(sizes)
    columns: list[Sequence[Any]] = []
    for leaf in leaves:
        is_tensor = isinstance(leaf, Tensor)
        columns.append(torch.split(leaf, list(sizes), dim) if is_tensor else [leaf] * parts)
    values: list[Any] = []
    for part in range(parts):
        values.append(unflatten(structure, [column[part] for column in columns]))
    return values


def join(values: list[Any], dim: int = 0) -> Any:
    """Concatenate the tensors of values that `cut` has split.

    Raises:
        SettingError: a tensor has no dimension, so that it cannot be assigned to a sample; or the
            values differ in structure or in constants.
    """
    flat = [flatten(value) for value in values]
    structure = flat[0][1]
    _check_joinable(flat)
    joined: list[Any] = []
    columns = zip(*(leaves for leaves, _ in flat), strict=True)
    for position, column in enumerate(columns):
        is_tensor = isinstance(column[0], Tensor)
        constant = None if is_tensor else _common_constant(column, position, structure)
        joined.append(torch.cat(list(column), dim) if is_tensor else constant)
    return unflatten(structure, joined)


def fault_of_rows(column: Sequence[Tensor], samples: Sequence[int]) -> str | None:
    """Return why outputs of micro-batches cannot be joined along their first dimension, or None.

    It must index the samples, or samples and tokens together. A mean of shape (1,), a weight, or
    an output (tokens, samples, features) would be joined to something that the model does not
    return for the whole batch.

    Args:
        column: a tensor of the output, with at least one dimension, by micro-batch.
        samples: number of samples of each micro-batch.
    """
    if len(column) == 1:
        return None
    rows_per_sample = {len(tensor) / count for tensor, count in zip(column, samples, strict=True)}
    # An output (tokens, samples, features) passes the test of rows when tokens divide evenly.
    has_samples_second = all(
        tensor.dim() > 2 and len(tensor) != count and tensor.shape[1] == count
        for tensor, count in zip(column, samples, strict=True)
    )
    if len(rows_per_sample) == 1 and rows_per_sample.pop().is_integer() and not has_samples_second:
        return None
    shapes = ", ".join(str(tuple(tensor.shape)) for tensor in column[:2])
    return (
        f"returned tensors of shape {shapes}, … for micro-batches of "
        f"{', '.join(map(str, samples[:2]))}, … samples: outputs of micro-batches are joined along "
        "their first dimension, which must index the samples"
    )


def _check_joinable(flat: Sequence[tuple[list[Any], Structure]]) -> None:
    """Reject values that cannot be concatenated; see `join`.

    Args:
        flat: leaves and structure of each value.
    """
    leaves, structure = flat[0]
    if structure.has("sparse"):
        raise SettingError(
            "the model's output has a sparse tensor in it, and outputs of micro-batches are joined "
            "along their first dimension: return its to_dense()"
        )
    if any(isinstance(leaf, Tensor) and leaf.dim() == 0 for leaf in leaves):
        raise SettingError(
            "the model's output has a tensor without a dimension: outputs of micro-batches are "
            "joined along their first one, which indexes the samples"
        )
    if any(flat_structure != structure for _, flat_structure in flat):
        raise SettingError(
            "the model's output for one micro-batch nests in another way than that for another: "
            "they cannot be joined"
        )


def _common_constant(column: Sequence[Any], position: int, structure: Structure) -> Any:
    """Return the constant of all micro-batches at a position of their outputs.

    Raises:
        SettingError: the micro-batches have different constants.
    """
    for constant in column:
        if not same_constant(constant, column[0]):
            raise SettingError(
                f"the model's output has {column[0]!r} for one micro-batch and {constant!r} for "
                f"another, at output{structure.labels()[position]}: only tensors can be joined. "
                "Return a tensor with a number for every sample, or leave it out"
            )
    return column[0]


def even_sizes(total: int, parts: int) -> list[int]:
    """Divide `total` into integer parts that differ by at most 1, larger ones first."""
    return [total // parts + (part < total % parts) for part in range(parts)]


def sizes_by_share(total: int, shares: Sequence[float]) -> list[int]:
    """Divide `total` into positive integers, each as near as possible to its share.

    Among equal shares, the first get the larger parts.

    >>> sizes_by_share(10, [1 / 3, 1 / 3, 1 / 3]), sizes_by_share(4, [0.9, 0.05, 0.05])
    ([4, 3, 3], [2, 1, 1])

    Args:
        total: at least the number of shares.
        shares: positive weights; they need not add up to 1.
    """
    share_sum = sum(shares)
    # Rounded, because shares such as 1/3 are not exact in floating point.
    exact_sizes = [round(total * share / share_sum, 9) for share in shares]
    sizes = [max(1, int(size)) for size in exact_sizes]
    while remainder := total - sum(sizes):
        # One at a time, to the part that is furthest from its exact size in this direction.
        step = 1 if remainder > 0 else -1
        candidates = [i for i, size in enumerate(sizes) if size + step >= 1]
        index = max(candidates, key=lambda i: (step * (exact_sizes[i] - sizes[i]), -i))
        sizes[index] += step
    return sizes
