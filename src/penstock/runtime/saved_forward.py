"""What a stage saves of one forward for its backward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from penstock.runtime.eviction import Saved
from penstock.runtime.second_forward import FirstForward
from penstock.transport.payload import Payload


@dataclass(slots=True)
class SavedForward:
    """One micro-batch's inputs as leaves, and the roots of its graph: its outputs, losses and past.

    Attributes:
        inputs: the leaves.
        found: more leaves, where the micro-batch is a slice: the past of the slices before.
        roots: None where the forward runs again, from `inputs` and what its `first` forward saw.
        own: how many of the roots take no gradient from the next stage: side losses, and the loss
            on the last stage.
        first: see `roots`.
        saved: what is handed to another rank meanwhile.
        size: bytes.
        flags: which tensors of the output, and then of the past, want a gradient.
        loss: the loss among the roots; None where the forward runs again, whose graph it would
            keep alive.
    """

    inputs: Payload
    found: dict[int, Any]
    roots: list[Tensor] | None
    own: int
    first: FirstForward | None
    saved: Saved | None = None
    size: int = 0
    flags: tuple[bool, ...] = ()
    loss: Tensor | None = None


@dataclass(slots=True)
class PlainForward:
    """The same on the fast path: one tensor comes in, one goes out, and nothing else is asked for."""

    leaf: Tensor | None
    root: Tensor | None
    size: int
