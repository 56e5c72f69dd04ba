"""Losses that layers inside a model have besides the model's own: load balancing of mixtures of
experts, penalties on activations.

A layer says `side_loss(value)` in its forward. What a pipeline trains on, and reports, is then the
loss of the output plus all of these, wherever the layers that have them stand.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from penstock.errors import SettingError


class _Collector(threading.local):
    """What the forward that this thread is in has found so far; None outside of one."""

    found: list[Tensor] | None = None


_COLLECTOR = _Collector()


def side_loss(value: Tensor) -> None:
    """Add a number to what is trained on. Outside `collecting_side_losses`, as when the model runs
    without a pipeline, it is dropped.

    Args:
        value: one number: a mean over the samples that the layer was given, like the loss itself.

    Raises:
        SettingError: `value` is not one number.
    """
    if not isinstance(value, Tensor) or value.numel() != 1:
        shape = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise SettingError(
            f"a side loss is one number, a mean over the samples that the layer is given; this one is {shape}"
        )
    if _COLLECTOR.found is not None:
        _COLLECTOR.found.append(value.reshape(()))


@contextmanager
def collecting_side_losses() -> Iterator[list[Tensor]]:
    """The side losses of what this thread runs in here, for training without a pipeline: `(loss +
    sum(found)).backward()`.
    """
    found: list[Tensor] = []
    before = collect_side_losses(found)
    try:
        yield found
    finally:
        collect_side_losses(before)


def collect_side_losses(into: list[Tensor] | None) -> list[Tensor] | None:
    """From now on, in this thread, let side losses go there; returns where they went before."""
    before = _COLLECTOR.found
    _COLLECTOR.found = into
    return before
