"""How the tensors of a payload lie in a slot. Known to both sides under a number once the sender has told it."""

from __future__ import annotations

import json
import math
from typing import Any

import torch
from torch import Tensor

from penstock.transport.arena import LINE, Pool, Slot
from penstock.transport.payload import Header, Payload, TensorForm

#: Of how many layouts a slot keeps its views.
_VIEWS = 64

_CONTIGUOUS = "contiguous_format"
_OTHERS = {4: "channels_last", 5: "channels_last_3d"}


class Layout:
    """One form of payloads: what is known before the tensors, and where in a slot these are. `pool` is the sender's alone."""

    __slots__ = (
        "_forms",
        "_leaves",
        "_tensors_at",
        "bare",
        "large",
        "nbytes",
        "number",
        "orders",
        "pool",
        "structure",
        "wants",
    )

    def __init__(self, number: int, header: Header, orders: list[str]) -> None:
        self.number, self.structure, self._leaves = number, header.structure, header.leaves
        self._forms, self.orders = header.forms, [getattr(torch, order) for order in orders]
        self._tensors_at = [
            at for at, leaf in enumerate(header.leaves) if isinstance(leaf, TensorForm)
        ]
        self.wants = tuple(form.wants_grad for form in self._forms)
        self.bare = header.structure == ""
        self.nbytes = sum(_padded(form) for form in self._forms)
        self.pool: Pool | None = None

    @classmethod
    def parse(cls, text: bytes) -> Layout:
        """Read what `told` wrote."""
        number, header, orders = json.loads(text)
        return cls(number, Header.parse(header), orders)

    def views(self, slot: Slot) -> tuple[Tensor, ...]:
        """The tensors as they lie in a slot, made once."""
        found = slot.views.get(self.number)
        if found is None:
            if len(slot.views) >= _VIEWS:
                slot.views.clear()
            with torch.inference_mode(mode=False):
                found = slot.views[self.number] = self._laid(slot)
        return found

    def filled(self, tensors: list[Tensor]) -> Payload:
        """The payload whose tensors these are."""
        leaves: list[Any] = list(self._leaves)
        for at, tensor in zip(self._tensors_at, tensors, strict=True):
            leaves[at] = tensor
        return Payload(self.structure, tuple(leaves), self.wants)

    def _laid(self, slot: Slot) -> tuple[Tensor, ...]:
        made, start = [], slot.start
        for form, order in zip(self._forms, self.orders, strict=True):
            dtype = getattr(torch, form.dtype)
            like = torch.empty(form.shape, dtype=dtype, device="meta", memory_format=order)
            flat = slot.segment.bytes[start : start + like.nbytes].view(dtype)
            made.append(flat.as_strided(like.shape, like.stride()))
            start += _padded(form)
        return tuple(made)


def told(number: int, payload: Payload) -> bytes:
    """What the receiver must know of payloads of this form."""
    return json.dumps(
        [number, payload.header(), [_order(tensor) for tensor in payload.tensors]]
    ).encode()


def key_of(payload: Payload) -> tuple[object, ...]:
    """What payloads of one layout have in common, cheap to make and to compare."""
    if payload.structure == "":
        tensor = payload.leaves[0]
        return (
            tensor.shape,
            tensor.dtype,
            payload.wants_grad,
            _CONTIGUOUS if tensor.is_contiguous() else _order(tensor),
        )
    leaves = tuple(
        # True is 1 and -0.0 is 0.0 for a dictionary, but not for a layer.
        (leaf.shape, leaf.dtype, _order(leaf))
        if isinstance(leaf, Tensor)
        else (leaf.__class__, repr(leaf))
        for leaf in payload.leaves
    )
    return payload.structure, leaves, payload.wants_grad


def _order(tensor: Tensor) -> str:
    """The order of its dimensions in memory, of those that have a name; all others become contiguous."""
    if tensor.is_contiguous():
        return _CONTIGUOUS
    other = _OTHERS.get(tensor.dim())
    return (
        other
        if other is not None and tensor.is_contiguous(memory_format=getattr(torch, other))
        else _CONTIGUOUS
    )


def _padded(form: TensorForm) -> int:
    """Bytes of a tensor, up to a whole line."""
    dtype: torch.dtype = getattr(torch, form.dtype)
    return -(-math.prod(form.shape) * dtype.itemsize // LINE) * LINE
