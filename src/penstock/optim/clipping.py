"""Clipping of gradients that are distributed over ranks.

Norms and scaling are those of torch.nn.utils.clip_grad_norm_ on one device.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from penstock.values.sharded import is_sharded, local_part, whole


def norms_of(
    parameters: Iterable[nn.Parameter], device: torch.device, norm_type: float = 2.0
) -> Tensor:
    """Return the norm of every gradient, in the order of the parameters.

    Parameters without a gradient are skipped. Shape (gradients,), of the dtype that the gradients'
    dtypes promote to.
    """
    norms = gradient_norms(parameters, norm_type)
    return torch.stack(norms) if norms else torch.zeros(0, device=device)


def gradient_norms(parameters: Iterable[nn.Parameter], norm_type: float = 2.0) -> list[Tensor]:
    """Return the norms of `norms_of`, each as a tensor of its own."""
    grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if not grads:
        return []
    # One call for all gradients, as torch's own function makes it, with bitwise the same result.
    # Sparse gradients and subclasses do not support it.
    kinds = {(type(grad), grad.layout, grad.dtype) for grad in grads}
    kind, layout, _ = next(iter(kinds))
    if len(kinds) == 1 and kind is Tensor and layout is torch.strided:
        return list(torch._foreach_norm(grads, norm_type))
    return [whole(torch.linalg.vector_norm(_values(grad), norm_type)) for grad in grads]


def _values(grad: Tensor) -> Tensor:
    return grad.coalesce().values() if grad.is_sparse else grad


def total_norm(parts: Sequence[Tensor], norm_type: float = 2.0) -> Tensor:
    """Return the norm of all gradients of the model, a tensor without dimensions.

    The sum is taken over the parameters, not over stages, so that the partition does not change the
    result even by one bit.

    Args:
        parts: results of `norms_of` for every stage, in the order of the model.
        norm_type: exponent of the norm.
    """
    norms = [part for part in parts if part.numel()]
    return torch.linalg.vector_norm(torch.cat(norms), norm_type) if norms else torch.tensor(0.0)


def clip(parameters: Sequence[nn.Parameter], maximum: float, total: Tensor) -> None:
    """Scale the gradients down if the total norm exceeds a maximum, with torch's own arithmetic.

    Args:
        parameters: whose gradients are scaled.
        maximum: maximum norm.
        total: result of `total_norm`.
    """
    torch.nn.utils.clip_grads_with_norm_(_local(parameters), maximum, total)


def clip_values(parameters: Sequence[nn.Parameter], maximum: float) -> None:
    """Clamp every element of the gradients, as torch.nn.utils.clip_grad_value_.

    Sparse gradients are clamped by their values.

    Args:
        parameters: whose gradients are clamped.
        maximum: largest absolute value.
    """
    dense = []
    for parameter in parameters:
        grad = parameter.grad
        if grad is None:
            continue
        if grad.is_sparse:
            parameter.grad = grad.coalesce()
            parameter.grad._values().clamp_(-maximum, maximum)
        else:
            dense.append(parameter)
    if dense:  # torch's function fails for an empty list
        torch.nn.utils.clip_grad_value_(_local(dense), maximum)


@dataclass(frozen=True)
class _Gradient:
    """A gradient in the form in which torch's functions read it from a parameter.

    Attributes:
        grad: the gradient.
    """

    grad: Tensor


def _local(parameters: Sequence[nn.Parameter]) -> list[Any]:
    """Return parameters with the parts of their gradients that this process has."""
    return [
        _Gradient(local_part(parameter.grad)) if is_sharded(parameter.grad) else parameter
        for parameter in parameters
    ]
