"""How the tensors of a payload lie in a slot. Known to both sides under a number once the sender
has told it.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from penstock.transport.arena import LINE, Pool, Slot
from penstock.transport.payload import Header, Payload, TensorForm
from penstock.values.constants import key_of as constant_key

#: Of how many layouts a slot keeps its views.
_VIEWS = 64


class Layout:
    """One form of payloads: what is known before the tensors, and where in a slot these are. `pool`
    is the sender's alone.
    """

    __slots__ = ("bare", "forms", "header", "nbytes", "number", "pool", "straight", "wants")

    def __init__(self, number: int, header: Header) -> None:
        self.number, self.header, self.forms = number, header, header.forms
        self.wants = tuple([form.wants_grad for form in self.forms])
        self.bare = header.structure == ""
        # Whether what lies in a slot has the strides that it is to have.
        self.straight = all(form.stride is None for form in self.forms)
        self.nbytes = sum(_padded(form) for form in self.forms)
        self.pool: Pool | None = None

    @classmethod
    def parse(cls, text: bytes) -> Layout:
        """Read what `told` wrote."""
        number, _, header = text.decode().partition(" ")
        return cls(int(number), Header.parse(header))

    def views(self, slot: Slot) -> tuple[Tensor, ...]:
        """The tensors as they lie in a slot, made once."""
        found = slot.views.get(self.number)
        if found is None:
            if len(slot.views) >= _VIEWS:
                slot.views.clear()
            with torch.inference_mode(mode=False):
                found = slot.views[self.number] = self._laid(slot)
        return found

    def put(self, slot: Slot, tensors: tuple[Tensor, ...] | list[Tensor]) -> None:
        """Copy the tensors of a payload into a slot."""
        views = slot.views.get(self.number)
        if views is None:
            views = self.views(slot)
        if self.bare and self.straight:
            tensor = tensors[0]
            views[0].copy_(tensor.detach() if tensor.requires_grad else tensor)
            return
        if self.straight:
            for view, tensor in zip(views, tensors, strict=True):
                view.copy_(tensor.detach() if tensor.requires_grad else tensor)
            return
        for form, view, tensor in zip(self.forms, views, tensors, strict=True):
            view.copy_(form.packed(tensor.detach()))

    def take(self, slot: Slot, device: torch.device | None) -> Payload:
        """The payload that lies in a slot, copied out, to another device than the CPU where one is
        given.
        """
        views = slot.views.get(self.number)
        if views is None:
            views = self.views(slot)
        if device is not None:
            return self.header.unpacked([view.to(device) for view in views])
        if self.bare and self.straight:
            return Payload("", (views[0].clone(),), self.wants)
        return self.header.unpacked(views, copies=True)

    def _laid(self, slot: Slot) -> tuple[Tensor, ...]:
        made, start = [], slot.start
        for form in self.forms:
            shape = form.shape if form.stride is None else form.packed_shape
            dtype = form.torch_dtype
            flat = slot.segment.bytes[start : start + math.prod(shape) * dtype.itemsize]
            made.append(flat.view(dtype).view(shape))
            start += _padded(form)
        return tuple(made)


def told(number: int, payload: Payload) -> bytes:
    """What the receiver must know of payloads of this form."""
    return f"{number} {payload.header()}".encode()


def key_of(payload: Payload) -> tuple[object, ...]:
    """What payloads of one layout have in common, cheap to make and to compare."""
    if payload.structure == "":
        tensor = payload.leaves[0]
        return tensor.shape, tensor.dtype, payload.wants_grad, tensor.stride()
    leaves = tuple(
        [
            (leaf.shape, leaf.dtype, leaf.stride())
            if isinstance(leaf, Tensor)
            else constant_key(leaf)
            for leaf in payload.leaves
        ]
    )
    return payload.structure, leaves, payload.wants_grad, payload.shared


def _padded(form: TensorForm) -> int:
    """Bytes of a tensor, up to a whole line."""
    shape = form.shape if form.stride is None else form.packed_shape
    return -(-math.prod(shape) * form.torch_dtype.itemsize // LINE) * LINE
