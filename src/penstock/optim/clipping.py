"""The norm of gradients that lie on several ranks: as torch.nn.utils.clip_grad_norm_ has it for
those of one device.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn


def norms_of(
    parameters: Iterable[nn.Parameter], device: torch.device, norm_type: float = 2.0
) -> Tensor:
    """The norm of every gradient there is, in the order of the parameters; of none, an empty
    tensor.

    Shape (gradients,), of the dtype that theirs promote to.
    """
    grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
    return torch.stack(_norms(grads, norm_type)) if grads else torch.zeros(0, device=device)


def _norms(grads: list[Tensor], norm_type: float) -> list[Tensor]:
    # One call for all, as torch's own function has it, and to the bit the same; sparse ones and
    # subclasses have no such call.
    if (
        all(type(grad) is Tensor and grad.layout is torch.strided for grad in grads)
        and len({g.dtype for g in grads}) == 1
    ):
        return list(torch._foreach_norm(grads, norm_type))
    return [torch.linalg.vector_norm(_values(grad), norm_type) for grad in grads]


def _values(grad: Tensor) -> Tensor:
    return grad.coalesce().values() if grad.is_sparse else grad


def total_norm(parts: Sequence[Tensor], norm_type: float = 2.0) -> Tensor:
    """The norm of all gradients together, from `norms_of` of every stage in the order of the model.
    A tensor of no dimensions.

    The sum is made over the parameters, whichever stages they are in, so the cut does not change it
    by a bit.
    """
    norms = [part for part in parts if part.numel()]
    return torch.linalg.vector_norm(torch.cat(norms), norm_type) if norms else torch.tensor(0.0)


def clip(parameters: Sequence[nn.Parameter], most: float, total: Tensor) -> None:
    """Scale all gradients down, if together they are longer than `most`; torch's own arithmetic."""
    torch.nn.utils.clip_grads_with_norm_(parameters, most, total)


def clip_values(parameters: Sequence[nn.Parameter], most: float) -> None:
    """Bring every gradient's numbers between -most and most, as torch.nn.utils.clip_grad_value_.
    Sparse ones by their values.
    """
    dense = []
    for parameter in parameters:
        grad = parameter.grad
        if grad is None:
            continue
        if grad.is_sparse:
            parameter.grad = grad.coalesce()
            parameter.grad._values().clamp_(-most, most)
        else:
            dense.append(parameter)
    if dense:  # of an empty list torch's function fails
        torch.nn.utils.clip_grad_value_(dense, most)
