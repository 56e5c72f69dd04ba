"""Strides of what is received: kernels are chosen by them, and others round differently."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from penstock.schedule.lower import Link, Message
from penstock.schedule.op import Kind
from penstock.transport.distributed import DistributedTransport
from penstock.transport.messages import header_key
from penstock.transport.payload import Header, Payload, TensorForm
from penstock.transport.wire import Wire


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


@pytest.mark.parametrize("copies", [False, True])
@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6.0).reshape(2, 3),
        torch.arange(6.0).reshape(2, 3).t(),
        torch.arange(3.0).expand(4, 3),
        torch.arange(3.0).reshape(3, 1).expand(3, 4),
        torch.arange(6.0).reshape(2, 1, 3).expand(2, 5, 3).transpose(0, 2),
        torch.arange(24.0).reshape(1, 2, 3, 4).to(memory_format=torch.channels_last),
        torch.arange(4.0)[:1].expand(1),
        torch.tensor(2.0),
        torch.tensor(2.0).expand(3),
        torch.empty(2, 0, 3).transpose(0, 2),
    ],
)
def test_every_layout_comes_back_with_its_values_and_strides(tensor, copies):
    """Distinct elements are sent once; a copy shares no memory with what was sent."""
    form = TensorForm.of(tensor, wants_grad=False)
    packed = form.packed(tensor).contiguous().clone()
    buffer = form.empty()
    assert (packed.shape, packed.dtype) == (buffer.shape, buffer.dtype)
    assert packed.numel() == len(set(tensor.flatten().tolist()))
    received = form.unpacked(packed, copies=copies)
    assert received.shape == tensor.shape
    assert torch.equal(received, tensor)
    if form.stride is not None:
        assert received.stride() == form.stride
    if packed.numel():
        packed.fill_(-7.0)
        changed = bool((received == -7.0).any())
        assert not (copies and changed)
        if form.stride is None or received.is_contiguous():
            assert changed is not copies, "without copies, nothing is copied for nothing"


def test_a_buffer_is_on_the_device_that_is_asked_for():
    """By default on the CPU, also where another device is torch's default."""
    form = TensorForm.of(torch.zeros(2, 3).t(), wants_grad=False)
    with torch.device("meta"):
        assert form.empty().device.type == "cpu"
    assert form.empty(torch.device("meta")).device.type == "meta"


def test_a_row_of_tensors_keeps_repeated_ones_and_wants_no_gradients():
    """Norms and updates: what is sent twice is two tensors at the receiver."""
    tensor = torch.ones(2, requires_grad=True)
    row = Payload.row([tensor, tensor])
    assert (row.structure, row.wants_grad, row.shared) == ("*", (False, False), ())
    (first, second) = row.tensors
    assert first is second is tensor
    assert row.nbytes == 16
    (left, right) = row.value()
    assert left is right is tensor


@pytest.mark.parametrize("gaps", [[None], [None, None], [0, None], [0], [0, 1], []])
def test_gradients_in_a_list_are_bare_only_if_there_is_exactly_one(gaps):
    """A bare tensor is the cheapest form; a gap must stay one."""
    gradients = [None if gap is None else torch.full((2,), float(gap)) for gap in gaps]
    payload = Payload.flat(gradients)
    assert payload.structure == ("" if gaps == [0] else "*")
    assert payload.leaves == tuple(gradients)
    assert payload.wants_grad == (False,) * sum(gap is not None for gap in gaps)
    forms = payload.forms()
    assert [form.wants_grad for form in forms] == list(payload.wants_grad)


def test_forms_say_which_tensor_wants_a_gradient():
    """Not all of them need one; a number of flags that does not fit is a mistake of the caller."""
    tensors = (torch.ones(1), torch.ones(2))
    assert [form.wants_grad for form in Payload("*", tensors, (True, False)).forms()] == [
        True,
        False,
    ]
    with pytest.raises(ValueError, match="shorter"):
        Payload("*", tensors, (True,)).forms()


@pytest.mark.parametrize("copies", [False, True])
def test_a_payload_is_copied_only_on_request_and_has_as_many_tensors_as_its_header(copies):
    """From a slot of shared memory, which the sender writes again; not from a buffer of its own."""
    payload = Payload.of([torch.ones(2), torch.zeros(3)])
    header = Header.parse(payload.header())
    buffers = [torch.ones(2), torch.zeros(3)]
    received = header.unpacked(buffers, copies=copies)
    shared = [a.data_ptr() == b.data_ptr() for a, b in zip(received.tensors, buffers, strict=True)]
    assert shared == [not copies] * 2
    assert header.unpacked(buffers).tensors[0].data_ptr() == buffers[0].data_ptr()
    for wrong in (buffers[:1], [*buffers, torch.ones(1)]):
        with pytest.raises(ValueError, match="argument"):
            header.unpacked(wrong)


@pytest.mark.parametrize("copies", [False, True])
@pytest.mark.parametrize(
    ("tensor", "needs_copy"),
    [
        (torch.arange(6.0).reshape(2, 3).t(), False),
        (torch.arange(24.0).reshape(1, 2, 3, 4).to(memory_format=torch.channels_last), False),
        (torch.arange(12.0).reshape(4, 3)[:, :2], True),
        (torch.arange(3.0).reshape(3, 1).expand(3, 4), False),
        (torch.arange(8.0).reshape(4, 1, 2).expand(4, 5, 2).permute(2, 1, 0), False),
        (torch.arange(8.0).reshape(2, 1, 4).permute(2, 1, 0), False),
    ],
)
def test_received_memory_is_used_as_it_is_where_its_strides_fit(tensor, needs_copy, copies):
    """A copy of each message would take time and memory. Strides of dimensions of one element, which
    `clone` keeps and a new buffer does not have, fit in any case.
    """
    form = TensorForm.of(tensor, wants_grad=False)
    packed = form.packed(tensor).contiguous().clone()
    for memory in (packed, form.empty().copy_(packed)):
        received = form.unpacked(memory, copies=copies)
        shares = received.untyped_storage().data_ptr() == memory.untyped_storage().data_ptr()
        assert shares is not (needs_copy or copies)
        assert (received.stride(), received.tolist()) == (form.stride, tensor.tolist())


def test_a_message_of_the_announced_form_is_sent_whatever_that_form_is(monkeypatch):
    """Of an expanded tensor only distinct elements are sent, every time alike."""
    sent, headers = [], []
    monkeypatch.setattr(dist, "isend", lambda tensor, **_: sent.append(tensor.flatten()))
    store = SimpleNamespace(set=lambda name, text: headers.append(name))
    wire = Wire(0, torch.device("cpu"), store, 5.0, "shared", [0, 1])
    transport = DistributedTransport(wire)
    for number in range(3):
        payload = Payload.of([torch.full((1, 2), float(number)).expand(3, 2)])
        assert transport.send(1, Message(Kind.F, 0, number), payload, "batch") == 8
    assert [tensor.tolist() for tensor in sent] == [[0.0] * 2, [1.0] * 2, [2.0] * 2]
    assert len(headers) == 1
