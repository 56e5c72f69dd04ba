"""Strides of what is received: kernels are chosen by them, and others round differently."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from penstock.schedule.lower import Link, Message
from penstock.schedule.op import Kind
from penstock.transport.distributed import DistributedTransport
from penstock.transport.messages import header_key
from penstock.transport.payload import Header, Payload, TensorForm


@pytest.mark.parametrize("copies", [False, True])
@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(12.0).reshape(4, 3)[:, :2],
        torch.arange(24.0).reshape(2, 3, 4)[:, :, 1:].permute(0, 2, 1),
    ],
    ids=["gaps", "gaps and another order"],
)
def test_gaps_between_elements_are_restored(tensor, copies):
    """Only the elements are sent; the receiver's tensor has the sender's strides."""
    form = TensorForm.of(tensor, wants_grad=False)
    packed = form.packed(tensor).contiguous()
    assert packed.numel() == tensor.numel()
    received = form.unpacked(packed, copies=copies)
    assert torch.equal(received, tensor)
    assert received.stride() == tensor.stride()


def test_later_messages_are_packed_by_the_strides_that_were_announced():
    """The receiver reads no second header: it unpacks every message by the first one's strides."""
    headers = {}
    wire = SimpleNamespace(rank=0, store=SimpleNamespace(set=headers.__setitem__))
    transport = DistributedTransport(wire)
    message = Message(Kind.F, 0, 0)
    key = header_key("batch", Link(0, 1), message)
    values = torch.arange(6.0).reshape(2, 3)
    first, later = Payload.of(values), Payload.of(values.t().contiguous().t())
    transport._announce(key, message, first)
    (form,) = transport._announce(key, message, later)
    (text,) = headers.values()
    packed = form.packed(later.tensors[0]).contiguous()
    (received,) = Header.parse(text).unpacked([packed]).tensors
    assert torch.equal(received, values)
