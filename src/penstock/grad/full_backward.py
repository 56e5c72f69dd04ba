"""A backward over the whole graph of a stage."""

from __future__ import annotations

from torch import Tensor
from torch.autograd import Variable

#: The engine itself: torch's function around it asks the logger at every call whether to log.
_ENGINE = Variable._execution_engine


def whole_grad(root: Tensor, grad: Tensor) -> None:
    """Add the gradients of all leaves under `root` to their `.grad`.

    As `torch.autograd.backward`, without its validation of shapes, which takes a tenth of the
    backward of a small stage; here the shapes are known to match.

    Args:
        root: output of the stage.
        grad: gradient of `root`, of its shape.
    """
    # A layer that recomputes by itself runs its second forward in here, see `is_recomputing`.
    _ENGINE.run_backward(
        (root,), (grad,), False, False, (), allow_unreachable=True, accumulate_grad=True
    )
