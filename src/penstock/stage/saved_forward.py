"""What a stage saves of a forward for its backward."""

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
    """Records the gradients of leaves as the graph produces them.

    Autograd gives `leaf.grad` the memory layout of the leaf. Without a stage boundary the gradient
    would keep its own layout, and a sum over it in another order of memory rounds differently.
    """

    _grads: dict[int, Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, leaves: Sequence[Tensor]) -> InputGrads:
        """Record the gradients of leaves that require them."""
        grads = cls()
        for place, leaf in enumerate(leaves):
            leaf.register_hook(partial(grads._note, place))  # type: ignore[no-untyped-call]  # torch's
        return grads

    @classmethod
    def of_inputs(cls, inputs: Payload) -> InputGrads | None:
        """Record the gradients of a stage's inputs that require them; None if there are none."""
        leaves = with_grad(inputs.tensors)
        return cls.of(leaves) if leaves else None

    def _note(self, place: int, grad: Tensor) -> None:
        self._grads[place] = grad

    def take(self, leaves: Sequence[Tensor]) -> tuple[list[Tensor | None], bool]:
        """Return the gradients and forget them.

        Returns:
            By leaf, its gradient or None; and whether all have the memory layout of their leaves.
        """
        grads = [self._grads.get(place) for place in range(len(leaves))]
        self._grads.clear()
        pairs = zip(leaves, grads, strict=True)
        same_layout = all(grad is None or _same_layout(leaf, grad) for leaf, grad in pairs)
        return grads, same_layout


def _same_layout(leaf: Tensor, grad: Tensor) -> bool:
    return grad.layout is leaf.layout and (grad.is_sparse or grad.stride() == leaf.stride())


@dataclass(slots=True)
class SavedForward:
    """What the backward of one micro-batch needs.

    The roots of the graph are the outputs that require a gradient, then the losses of this stage,
    then the state for the next slice.

    Attributes:
        inputs: the inputs of the stage, as leaves.
        slice_state: where the micro-batch is a slice, the state of the slices before, as leaves.
        roots: None if the forward is recomputed for the backward.
        loss_root_count: number of the roots that take no gradient from the next stage: side losses,
            and on the last stage the loss.
        first: the state in which the forward is recomputed, and its fingerprint.
        saved: the tensors that may be evicted to another rank until the backward.
        size: bytes that are held.
        requires_grad: which tensors of the output, and then of the state for the next slice,
            require a gradient.
        loss: the loss among the roots; None if the forward is recomputed, since it would keep the
            graph alive.
        input_grads: records the gradients of the inputs.
    """

    inputs: Payload
    slice_state: dict[int, Any]
    roots: list[Tensor] | None
    loss_root_count: int
    first: FirstForward | None
    saved: Saved | None = None
    size: int = 0
    requires_grad: tuple[bool, ...] = ()
    loss: Tensor | None = None
    input_grads: InputGrads | None = None


@dataclass(slots=True)
class FastForward:
    """What the backward of a micro-batch of the fast path needs.

    Attributes:
        leaf: the input, if it requires a gradient.
        root: the output or, on the last stage, the loss, if it requires a gradient.
        size: bytes that are held.
    """

    leaf: Tensor | None
    root: Tensor | None
    size: int


def roots_of(
    outputs: Sequence[Tensor], loss_roots: Sequence[Tensor], carried: Sequence[Tensor]
) -> list[Tensor]:
    """Return the roots of a graph, in the order of `SavedForward`.

    Args:
        outputs: the tensors of the output.
        loss_roots: losses that require a gradient.
        carried: the tensors of the state for the next slice.
    """
    return [*with_grad(outputs), *loss_roots, *with_grad(carried)]


def with_grad(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the tensors that require a gradient."""
    return [tensor for tensor in tensors if tensor.requires_grad]
