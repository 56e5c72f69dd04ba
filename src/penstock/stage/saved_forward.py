"""What a stage saves of one forward for its backward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor

from penstock.stage.eviction import Saved
from penstock.stage.second_forward import FirstForward
from penstock.transport.payload import Payload


@dataclass(slots=True)
class InputGrads:
    """The gradients of leaves as the graph made them.

    What autograd adds to `leaf.grad` it lays out like the leaf. Without a boundary the gradient
    would go on as it is, and a sum over it in another order of memory rounds otherwise.
    """

    _grads: dict[int, Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, leaves: Sequence[Tensor]) -> InputGrads:
        """Those of leaves that want gradients."""
        grads = cls()
        for place, leaf in enumerate(leaves):
            leaf.register_hook(partial(grads._note, place))  # type: ignore[no-untyped-call]  # torch's
        return grads

    def _note(self, place: int, grad: Tensor) -> None:
        self._grads[place] = grad

    def take(self, leaves: Sequence[Tensor]) -> tuple[list[Tensor | None], bool]:
        """The gradients, None where there is none; and whether all are laid out like their leaves."""
        grads = [self._grads.get(place) for place in range(len(leaves))]
        self._grads.clear()
        pairs = zip(leaves, grads, strict=True)
        alike = all(grad is None or _same_layout(leaf, grad) for leaf, grad in pairs)
        return grads, alike


def _same_layout(leaf: Tensor, grad: Tensor) -> bool:
    return grad.layout is leaf.layout and (grad.is_sparse or grad.stride() == leaf.stride())


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
        input_grads: what `InputGrads` has seen.
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
    input_grads: InputGrads | None = None


@dataclass(slots=True)
class FastForward:
    """The same on the fast path: one tensor comes in, one goes out, and nothing else is asked for."""

    leaf: Tensor | None
    root: Tensor | None
    size: int
