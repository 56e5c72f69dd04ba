"""Shapes, types and order of a batch in words, which must be equal on all ranks."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from penstock.batches.batch_parts import BatchPart, whole_value
from penstock.ranks.checksum import whole_checksum
from penstock.values.structure import flatten, tensors_of


@lru_cache(maxsize=1024)
def crc_of(text: str) -> int:
    """Return the CRC-32 of a text."""
    return zlib.crc32(text.encode())


@lru_cache(maxsize=1024)
def pair_form(
    x_shape: torch.Size, x_dtype: torch.dtype, y_shape: torch.Size, y_dtype: torch.dtype
) -> str:
    """Describe inputs and targets that are one tensor each."""
    return f"x {_shape(x_shape, x_dtype)} and y {_shape(y_shape, y_dtype)}"


def nested_form(x: Any, y: Any) -> tuple[str, list[Tensor]]:
    """Describe nested inputs and targets; return also their tensors."""
    parts, tensors = [], []
    for name, value in (("x", x), ("y", y)):
        if value is None:
            continue
        leaves, structure = flatten(value)
        tensors += [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        words = [_leaf(leaf) for leaf in leaves]
        single = len(leaves) == 1 and leaves[0] is value
        parts.append(
            f"{name} {words[0]}"
            if single
            else f"{name} [{'; '.join(words)}] in {structure.describe()}"
        )
    return " and ".join(parts), tensors


def part_form(x: Any, y: Any) -> tuple[str, list[Tensor]]:
    """Describe inputs and targets of which this process may have read a part.

    The words are those of the whole batch, with a checksum of the numbers of its samples if that is
    known.

    Returns:
        The words; and the tensors of the whole batch, none if samples are missing.
    """
    form, tensors = nested_form(whole_value(x), whole_value(y))
    orders: list[str] = []
    for part in (x, y):
        if isinstance(part, BatchPart) and part.order is not None:
            orders.append(f"{part.order:08x}")
    if orders:
        form += f", samples in order {' and '.join(sorted(set(orders)))}"
    return form, [] if is_partial(x, y) else tensors


def is_partial(x: Any, y: Any) -> bool:
    """Return whether this process has not read all samples of a batch."""
    return any(isinstance(part, BatchPart) and not part.is_whole for part in (x, y))


def contents(x: Any, y: Any) -> list[int | None]:
    """Return checksums of the inputs and of the targets; None for what was not read as a whole."""
    checksums: list[int | None] = []
    for value in (x, y):
        missing = value is None or is_partial(value, None)
        checksums.append(None if missing else whole_checksum(tensors_of(whole_value(value))))
    return checksums


def differ(rows: Sequence[Sequence[int | None]]) -> bool:
    """Return whether ranks that have read the same part of a batch have read other numbers.

    Args:
        rows: `contents` of each rank.
    """
    return any(len(set(column) - {None}) > 1 for column in zip(*rows, strict=True))


def _shape(shape: torch.Size, dtype: torch.dtype) -> str:
    return f"{tuple(shape)} {str(dtype).removeprefix('torch.')}"


def _leaf(leaf: object) -> str:
    if isinstance(leaf, Tensor):
        return _shape(leaf.shape, leaf.dtype)
    plain = leaf is None or isinstance(leaf, (bool, int, float, str))
    return repr(leaf) if plain else type(leaf).__name__
