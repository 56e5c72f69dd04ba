"""Absolute differences between tensors and their references in the self-check."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor


def difference(tensor: Tensor, reference: Tensor) -> float:
    """Return the largest absolute difference; infinite where shapes differ or one value is NaN."""
    if tensor.shape != reference.shape:
        return math.inf
    if not tensor.numel():
        return 0.0
    first, second = _in_double(tensor), _in_double(reference)
    values = (first - second).abs()
    # Infinities of the same sign and NaN in both are no difference, though their difference is NaN.
    values[(first == second) | (first.isnan() & second.isnan())] = 0.0
    return math.inf if bool(values.isnan().any()) else float(values.max())


def differences(
    tensors: Mapping[str, Tensor], references: Mapping[str, Tensor]
) -> dict[str, float]:
    """Return by name the largest absolute difference of each tensor from its reference."""
    return {name: difference(tensor, references[name]) for name, tensor in tensors.items()}


def loss_difference(loss: float, reference: float) -> float:
    """Return the absolute difference of two losses; 0 for two NaN, infinite for one."""
    as_tensors = torch.tensor([loss, reference], dtype=torch.float64)
    return difference(as_tensors[0], as_tensors[1])


def largest(tensor: Tensor) -> float:
    """Return the largest absolute value; 0 if there is none."""
    return float(_in_double(tensor).abs().max()) if tensor.numel() else 0.0


def _in_double(tensor: Tensor) -> Tensor:
    """Return a tensor in double precision: bool and 8-bit floats, for example, have no `abs`."""
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)
