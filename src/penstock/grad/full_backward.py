"""A backward over the whole graph of a stage."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.autograd import Variable
from torch.autograd.graph import _engine_run_backward

#: The engine itself: torch's function around it asks the logger at every call whether to log.
_ENGINE = Variable._execution_engine


def whole_grad(roots: Sequence[Tensor], grads: Sequence[Tensor]) -> None:
    """Add the gradients of all leaves under `roots` to their `.grad`.

    As `torch.autograd.backward`, without its validation of shapes, which takes a tenth of the
    backward of a small stage; here the shapes are known to match.

    Args:
        roots: outputs of the stage.
        grads: the gradient of each, of its shape.
    """
    # A layer that recomputes by itself runs its second forward in here, see `is_recomputing`.
    # The threads of other devices read a context that torch's own function stores (torch 2.13).
    run = _ENGINE.run_backward if roots[0].is_cpu else _engine_run_backward
    run(tuple(roots), tuple(grads), False, False, (), allow_unreachable=True, accumulate_grad=True)
