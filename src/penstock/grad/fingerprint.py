"""Fingerprints of tensors: a few numbers per row, to compare a forward with its recomputation.

Taking a fingerprint costs one pass over the tensor. Fingerprints are compared within the rounding
error of the tensor's dtype, because a forward without a graph may run other kernels than one with a
graph; a forward that took another branch differs by far more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from penstock.errors import RunError
from penstock.values.deferred_checks import DeferredChecks

#: Minimum number of columns of a row, if a sample of the tensor has that many elements.
_MIN_COLUMNS = 64
_SCALAR_TYPES = (bool, int, float, complex, str, type(None))

#: Largest difference due to rounding, relative to the sum of magnitudes in a row.
_TOLERANCES = {torch.float64: 1e-9, torch.float16: 4e-3, torch.bfloat16: 3e-2}
#: The same for other dtypes: float32 and complex ones; and integers, whose weighted sums alone are
#: rounded.
_TOLERANCE, _INTEGER_TOLERANCE = 2e-5, 1e-12


@dataclass(frozen=True)
class Fingerprint:
    """Fingerprint of a list of tensors and constants.

    Attributes:
        forms: for a tensor its shape and dtype, for a constant the constant or its type.
        rows: for a tensor with values one number per row, else None.
    """

    forms: tuple[Any, ...]
    rows: tuple[Tensor | None, ...]


def fingerprint(leaves: Sequence[Any]) -> Fingerprint:
    """Return the fingerprint of a list of tensors and constants."""
    return Fingerprint(tuple(map(_form, leaves)), tuple(map(_rows, leaves)))


def difference(leaves: Sequence[Any], expected: Fingerprint) -> str | None:
    """Return how tensors and constants differ from a fingerprint, as text; None if they agree."""
    forms_text = _form_difference(leaves, expected)
    if forms_text is not None:
        return forms_text
    for leaf, expected_rows in zip(leaves, expected.rows, strict=True):
        rows = _rows(leaf)
        if rows is None or expected_rows is None or torch.equal(rows, expected_rows):
            continue
        mismatch = _value_difference(leaf, rows, expected_rows)
        if mismatch is not None:
            return mismatch
    return None


def difference_on_device(
    leaves: Sequence[Any], expected: Fingerprint
) -> tuple[str | None, Tensor | None]:
    """Compare as `difference`, but leave the comparison of values on their device.

    It reads the tensors once more than `difference` does where all bits agree, and the host does
    not wait.

    Returns:
        How the forms differ, as text, None if they agree; and a boolean scalar on the device,
        whether any values differ, None if there are no values.
    """
    forms_text = _form_difference(leaves, expected)
    if forms_text is not None:
        return forms_text, None
    flags: list[Tensor] = []
    for leaf, expected_rows in zip(leaves, expected.rows, strict=True):
        rows = _rows(leaf)
        if rows is None or expected_rows is None or not rows.numel():
            continue
        largest = _relative_differences(leaf, rows, expected_rows).max()
        flags.append(largest > _tolerance(leaf.dtype))
    return None, torch.stack(flags).any() if flags else None


def check_equal(
    leaves: Sequence[Any],
    expected: Fingerprint,
    checks: DeferredChecks | None,
    error_of: Callable[[str], RunError],
) -> None:
    """Raise an error if tensors or constants differ from a fingerprint.

    Args:
        leaves: the tensors and constants.
        expected: the fingerprint.
        checks: receives the comparisons of values that are read later; None to read all at once.
        error_of: returns the error for a text that tells the difference.

    Raises:
        RunError: they differ.
    """
    if checks is None or not checks.deferring:
        mismatch = difference(leaves, expected)
    else:
        mismatch, differs = difference_on_device(leaves, expected)
        if differs is not None:
            checks.add(differs, str(error_of("other values")))
    if mismatch is not None:
        raise error_of(mismatch)


def _form_difference(leaves: Sequence[Any], expected: Fingerprint) -> str | None:
    """Return how numbers of values, shapes, dtypes or constants differ; None if they agree."""
    forms = tuple(map(_form, leaves))
    if len(forms) != len(expected.forms):
        return f"{len(forms)} values instead of {len(expected.forms)}"
    for form, expected_form in zip(forms, expected.forms, strict=True):
        if form != expected_form:
            return f"{_text(form)} instead of {_text(expected_form)}"
    return None


def _form(leaf: Any) -> Any:
    """Return what must be equal besides the numbers: shape and dtype, or a constant or its type."""
    if isinstance(leaf, Tensor):
        return leaf.shape, leaf.dtype
    # A NaN differs from itself, so only its type can be compared.
    is_comparable = isinstance(leaf, _SCALAR_TYPES) and leaf == leaf  # noqa: PLR0124
    return leaf if is_comparable else type(leaf)


def _text(form: Any) -> str:
    if isinstance(form, tuple):
        return f"a tensor of shape {tuple(form[0])} and {form[1]}"
    return repr(form)


def _rows(leaf: Any) -> Tensor | None:
    """Return one number per row of a tensor; None for leaves without numbers."""
    matrix = _matrix(leaf)
    if matrix is None:
        return None
    # Values without rows are compared element by element.
    return matrix.clone() if matrix.dim() < 2 else _weighted_sums(matrix)


def _weighted_sums(matrix: Tensor) -> Tensor:
    """Return the product with `_weights`, shape (rows,), at full precision even under autocast."""
    weights = _weights(matrix.shape[1], matrix.dtype, matrix.device)
    kind = matrix.device.type
    if torch.is_autocast_enabled(kind):
        with torch.autocast(kind, enabled=False):
            return matrix @ weights
    return matrix @ weights


def _matrix(leaf: Any) -> Tensor | None:
    """Return the values of a tensor as a matrix of floats; None if `leaf` has no values."""
    if not isinstance(leaf, Tensor) or leaf.layout is not torch.strided or leaf.is_meta:
        return None
    values = _as_float(leaf.detach())
    if values.dim() < 2 or not values.numel():
        return values.reshape(-1)
    columns = 1
    for extent in reversed(values.shape[1:]):
        columns *= extent
        if columns >= _MIN_COLUMNS:
            break
    return values.reshape(-1, columns)


def _as_float(values: Tensor) -> Tensor:
    """Convert to float32 or float64; integers and booleans to float64."""
    if values.is_complex():
        values = torch.view_as_real(values.resolve_conj())
    if values.dtype in (torch.float32, torch.float64):
        return values
    return values.to(torch.float32 if values.is_floating_point() else torch.float64)


@lru_cache(maxsize=256)
def _weights(columns: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return pseudo-random numbers from 0.5 to 1.5, shape (columns,).

    With unequal weights neither columns that sum to zero nor exchanged columns go unnoticed.
    """
    positions = torch.arange(1, columns + 1, dtype=torch.float64, device="cpu")
    # Multiples of the golden ratio: their fractions are spread evenly, and no two columns have
    # equal ones.
    return (positions * 0.6180339887498949).frac_().add_(0.5).to(device=device, dtype=dtype)


def _relative_differences(leaf: Tensor, rows: Tensor, expected: Tensor) -> Tensor:
    """Return by row the difference, relative to the sum of magnitudes; inf for NaN."""
    matrix = _matrix(leaf)
    assert matrix is not None
    magnitudes = matrix.abs()
    if matrix.dim() == 2:
        magnitudes = _weighted_sums(magnitudes)
    equal = (rows == expected) | (rows.isnan() & expected.isnan())
    # A row of zeros has no magnitude to compare with: its difference counts in full.
    ratio = (rows - expected).abs() / magnitudes.clamp_min(1e-30)
    return torch.where(equal, torch.zeros_like(ratio), ratio.nan_to_num(nan=torch.inf))


def _tolerance(dtype: torch.dtype) -> float:
    is_integer = not (dtype.is_floating_point or dtype.is_complex)
    return _TOLERANCES.get(dtype, _INTEGER_TOLERANCE if is_integer else _TOLERANCE)


def _value_difference(leaf: Tensor, rows: Tensor, expected: Tensor) -> str | None:
    """Return by how much values differ, as text; None if within rounding error."""
    ratio = _relative_differences(leaf, rows, expected)
    largest = float(ratio.max()) if ratio.numel() else 0.0
    if largest <= _tolerance(leaf.dtype):
        return None
    differing_rows = int((ratio > 0).sum())
    return (
        f"other values, which differ by {largest:.1e} of their size in {differing_rows} of "
        f"{ratio.numel()} rows"
    )
