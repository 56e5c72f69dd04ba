"""The layout of a payload's tensors in a slot. Sender and receiver refer to a layout by its
number once the sender has announced it.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from penstock.shared_memory.arena import Pool, Slot
from penstock.shared_memory.segment import LINE
from penstock.transport.payload import Header, Payload, TensorForm

#: Layouts whose views a slot caches.
_MAX_CACHED_VIEWS = 64


class Layout:
    """The form of a payload and the offsets of its tensors in a slot.

    Attributes:
        number: by which messages refer to it.
        header: all of the payload but the tensors' contents.
        bare: whether the payload is a single tensor that is not nested.
        contiguous: whether all tensors are contiguous at the receiver, so that the slot's views
            need no change of strides.
        nbytes: bytes of a slot's contents.
        pool: the sender's slots for it; None at the receiver.
    """

    __slots__ = ("bare", "contiguous", "forms", "header", "nbytes", "number", "pool", "wants_grad")

    def __init__(self, number: int, header: Header) -> None:
        self.number, self.header, self.forms = number, header, header.forms
        self.wants_grad = tuple([form.wants_grad for form in self.forms])
        self.bare = header.structure == ""
        self.contiguous = all(form.stride is None for form in self.forms)
        self.nbytes = sum(_padded_bytes(form) for form in self.forms)
        self.pool: Pool | None = None

    @classmethod
    def parse(cls, number: int, description: bytes) -> Layout:
        """Return the layout that `Payload.header` describes, under a number."""
        return cls(number, Header.parse(description.decode()))

    def views(self, slot: Slot) -> tuple[Tensor, ...]:
        """Return the tensors in a slot as views of its memory, from the slot's cache if they are
        there.
        """
        views = slot.views.get(self.number)
        if views is None:
            if len(slot.views) >= _MAX_CACHED_VIEWS:
                slot.views.clear()
            with torch.inference_mode(mode=False):
                views = slot.views[self.number] = self._make_views(slot)
        return views

    def put(self, slot: Slot, tensors: tuple[Tensor, ...] | list[Tensor]) -> None:
        """Copy the tensors of a payload into a slot."""
        views = slot.views.get(self.number)
        if views is None:
            views = self.views(slot)
        if self.bare and self.contiguous:
            tensor = tensors[0]
            views[0].copy_(tensor.detach() if tensor.requires_grad else tensor)
            return
        if self.contiguous:
            for view, tensor in zip(views, tensors, strict=True):
                view.copy_(tensor.detach() if tensor.requires_grad else tensor)
            return
        for form, view, tensor in zip(self.forms, views, tensors, strict=True):
            view.copy_(form.packed(tensor.detach()))

    def take(self, slot: Slot, device: torch.device | None) -> Payload:
        """Copy the payload out of a slot.

        Args:
            slot: that holds a message of this layout.
            device: where to put the tensors, if not on the CPU.
        """
        views = slot.views.get(self.number)
        if views is None:
            views = self.views(slot)
        if device is not None:
            return self.header.unpacked([view.to(device) for view in views])
        # Copies: the sender uses the slot again as soon as the message is read.
        if self.bare and self.contiguous:
            return Payload("", (views[0].clone(),), self.wants_grad)
        return self.header.unpacked(views, copies=True)

    def _make_views(self, slot: Slot) -> tuple[Tensor, ...]:
        """Return tensors over the slot's memory, each starting at a cache line."""
        views, start = [], slot.start
        for form in self.forms:
            shape = form.packed_shape
            dtype = form.torch_dtype
            flat = slot.segment.bytes[start : start + math.prod(shape) * dtype.itemsize]
            views.append(flat.view(dtype).view(shape))
            start += _padded_bytes(form)
        return tuple(views)


def key_of(payload: Payload) -> tuple[object, ...]:
    """Return a hashable key that is equal for payloads of one layout. It is made for every message,
    so it must be cheap.
    """
    if payload.structure == "":
        tensor = payload.leaves[0]
        return tensor.shape, tensor.dtype, payload.wants_grad, tensor.stride()
    return payload.form()


def _padded_bytes(form: TensorForm) -> int:
    """Return the bytes of a tensor, rounded up to whole cache lines."""
    nbytes = math.prod(form.packed_shape) * form.torch_dtype.itemsize
    return -(-nbytes // LINE) * LINE
