"""Fingerprints of a forward's outcome, to be compared with those of its second run: a few numbers
for each row of a tensor.

A fingerprint costs one pass over the tensor. It is compared within the rounding of the tensor's
type, because a forward without a graph may run other kernels than one with a graph; a forward that
went another way differs by far more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

#: Columns that a row has at least, where the tensor has so many elements per sample.
_COLUMNS = 64
_PLAIN = (bool, int, float, complex, str, type(None))

#: What rounding may change, as a part of the sum of magnitudes in a row.
_TOLERANCES = {torch.float64: 1e-9, torch.float16: 4e-3, torch.bfloat16: 3e-2}
_TOLERANCE = 2e-5


@dataclass(frozen=True)
class Fingerprint:
    """Of tensors and constants: their forms, and numbers for each tensor that has values."""

    forms: tuple[Any, ...]
    rows: tuple[Tensor | None, ...]


def fingerprint(leaves: Sequence[Any]) -> Fingerprint:
    """The fingerprint of tensors and constants."""
    return Fingerprint(tuple(map(_form, leaves)), tuple(map(_rows, leaves)))


def difference(leaves: Sequence[Any], expected: Fingerprint) -> str | None:
    """In what tensors and constants differ from those of a fingerprint; None if in nothing."""
    forms = tuple(map(_form, leaves))
    if len(forms) != len(expected.forms):
        return f"{len(forms)} values instead of {len(expected.forms)}"
    for form, other in zip(forms, expected.forms, strict=True):
        if form != other:
            return f"{_text(form)} instead of {_text(other)}"
    for leaf, other_rows in zip(leaves, expected.rows, strict=True):
        rows = _rows(leaf)
        if rows is None or other_rows is None or torch.equal(rows, other_rows):
            continue
        found = _apart(leaf, rows, other_rows)
        if found is not None:
            return found
    return None


def _form(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return leaf.shape, leaf.dtype
    return leaf if isinstance(leaf, _PLAIN) and leaf == leaf else type(leaf)  # noqa: PLR0124 - NaN


def _text(form: Any) -> str:
    if isinstance(form, tuple):
        return f"a tensor of shape {tuple(form[0])} and {form[1]}"
    return repr(form)


def _rows(leaf: Any) -> Tensor | None:
    matrix = _matrix(leaf)
    if matrix is None:
        return None
    return matrix.clone() if matrix.dim() < 2 else _weighed(matrix)


def _weighed(matrix: Tensor) -> Tensor:
    weights = _weights(matrix.shape[1], matrix.dtype, matrix.device)
    kind = matrix.device.type
    if torch.is_autocast_enabled(kind):
        with torch.autocast(kind, enabled=False):
            return matrix @ weights
    return matrix @ weights


def _matrix(leaf: Any) -> Tensor | None:
    """The values as rows of floats; None where there are none."""
    if not isinstance(leaf, Tensor) or leaf.layout is not torch.strided or leaf.is_meta:
        return None
    values = leaf.detach()
    if values.is_complex():
        values = torch.view_as_real(values.resolve_conj())
    if values.dtype not in (torch.float32, torch.float64):
        low = values.is_floating_point()
        values = values.to(torch.float32 if low else torch.float64)
    if values.dim() < 2 or not values.numel():
        return values.reshape(-1)
    columns = 1
    for extent in reversed(values.shape[1:]):
        columns *= extent
        if columns >= _COLUMNS:
            break
    return values.reshape(-1, columns)


@lru_cache(maxsize=256)
def _weights(columns: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Numbers from 0.5 to 1.5 without order, so that neither zero sums nor exchanged columns go
    unnoticed.
    """
    places = torch.arange(1, columns + 1, dtype=torch.float64, device="cpu")
    return (places * 0.6180339887498949).frac_().add_(0.5).to(device=device, dtype=dtype)


def _apart(leaf: Tensor, rows: Tensor, expected: Tensor) -> str | None:
    """By how much values differ, if it is more than rounding."""
    matrix = _matrix(leaf)
    assert matrix is not None
    sizes = matrix.abs()
    if matrix.dim() == 2:
        sizes = _weighed(sizes)
    same = (rows == expected) | (rows.isnan() & expected.isnan())
    ratio = (rows - expected).abs() / sizes.maximum(rows.abs()).clamp_min(1e-30)
    ratio = torch.where(same, torch.zeros_like(ratio), ratio.nan_to_num(nan=torch.inf))
    largest = float(ratio.max()) if ratio.numel() else 0.0
    if largest <= _TOLERANCES.get(leaf.dtype, _TOLERANCE):
        return None
    return f"other values, which differ by {largest:.1e} of their size in {int((ratio > 0).sum())} of {ratio.numel()} rows"
