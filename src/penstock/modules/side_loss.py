"""Side losses: losses of layers besides the model's own loss.

Examples are load balancing of mixtures of experts, and penalties on activations. A layer calls
`side_loss(value)` in its forward. A pipeline trains on, and reports, the sum of the loss and all
side losses, wherever their layers are.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from penstock.errors import SettingError


class _Collector(threading.local):
    """Side losses of this thread's current forward so far; None outside of one."""

    losses: list[Tensor] | None = None


_COLLECTOR = _Collector()


def side_loss(value: Tensor) -> None:
    """Add a number to the loss.

    Outside `collecting_side_losses`, as when the model runs without a pipeline, it is ignored.

    Args:
        value: a tensor with one element: a mean over the layer's samples, like the loss itself.

    Raises:
        SettingError: `value` does not have one element.

    Examples:
        ```python
        class Router(nn.Module):
            def forward(self, x):
                scores = self.gate(x).softmax(-1)
                side_loss(0.01 * scores.mean(0).square().sum())  # keep experts equally busy
                return self.experts(x, scores)
        ```
    """
    if not isinstance(value, Tensor) or value.numel() != 1:
        shape = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise SettingError(
            "a side loss is one number, a mean over the samples that the layer is given; this one "
            f"is {shape}"
        )
    if _COLLECTOR.losses is not None:
        _COLLECTOR.losses.append(value.reshape(()))


@contextmanager
def collecting_side_losses() -> Iterator[list[Tensor]]:
    """Collect the side losses of forwards in this context, for training without a pipeline.

    The loss to train on is then `loss + sum(losses)`, where `losses` is the context's value.
    """
    losses: list[Tensor] = []
    before = collect_side_losses(losses)
    try:
        yield losses
    finally:
        collect_side_losses(before)


def collect_side_losses(into: list[Tensor] | None) -> list[Tensor] | None:
    """Let side losses of this thread be appended to a list, or ignored with None.

    Returns:
        The previous list, to be restored.
    """
    before = _COLLECTOR.losses
    _COLLECTOR.losses = into
    return before
