"""A backward over the whole graph of a stage."""

from __future__ import annotations

from torch import Tensor
from torch.autograd.graph import _engine_run_backward

from penstock.modules.recomputing import recomputing


def whole_grad(root: Tensor, grad: Tensor) -> None:
    """Add the gradients of all leaves under `root` to their `.grad`.

    As `torch.autograd.backward`, without its validation of shapes, which takes a tenth of the
    backward of a small stage; here the shapes are known to match.

    Args:
        root: output of the stage.
        grad: gradient of `root`, of its shape.
    """
    # A layer that recomputes by itself runs its second forward in here.
    with recomputing():
        _engine_run_backward(
            (root,), (grad,), False, False, (), allow_unreachable=True, accumulate_grad=True
        )
