"""A whole backward."""

from __future__ import annotations

from torch import Tensor
from torch.autograd.graph import _engine_run_backward


def whole_grad(root: Tensor, grad: Tensor) -> None:
    """Add the gradients of all leaves under `root` to their `.grad`, given its own.

    As `torch.autograd.backward`, which spends a tenth of a small stage's backward on making sure
    that shapes fit; these do.
    """
    _engine_run_backward(
        (root,), (grad,), False, False, (), allow_unreachable=True, accumulate_grad=True
    )
