"""How tensors lie in a slot, and when two payloads lie the same way."""

from __future__ import annotations

import pytest
import torch

from penstock.shared_memory.arena import Arena
from penstock.shared_memory.segment import LINE
from penstock.transport.layout import Layout, key_of
from penstock.transport.payload import Payload


@pytest.fixture
def slot():
    """Room for a little."""
    arena = Arena()
    yield arena.take(arena.pool(10_000))
    arena.close()


def layout_of(value, number=0):
    """As both sides make it."""
    return Layout.parse(number, Payload.of(value).header().encode())


def test_tensors_lie_one_after_another_each_at_a_line_of_its_own(slot):
    """As torch's own do: kernels are quicker on them, and some give other roundings elsewhere."""
    value = [
        torch.ones(3, dtype=torch.int8),
        torch.empty(0),
        torch.ones(17),
        torch.tensor(1.5, dtype=torch.float64),
    ]
    layout = layout_of(value)
    views = layout.views(slot)
    assert layout.nbytes == (1 + 0 + 2 + 1) * LINE
    assert [(view.shape, view.dtype) for view in views] == [
        (tensor.shape, tensor.dtype) for tensor in value
    ]
    assert [
        view.data_ptr() - slot.segment.bytes.data_ptr() - slot.start
        for view in views
        if view.numel()
    ] == [0, 64, 192]
    assert layout.views(slot) is views


def test_views_of_many_layouts_are_not_all_kept(slot):
    """Shapes that depend on the data may never come again."""
    for number in range(200):
        layout_of(torch.ones(number), number).views(slot)
    assert len(slot.views) <= 64


def test_a_payload_is_filled_as_it_was():
    """Constants are in the layout, tensors are not."""
    value = {"a": (None, torch.ones(2), 3), "b": [torch.zeros(1, requires_grad=True)]}
    mine = Payload.of(value)
    assert layout_of(value).header.filled(mine.tensors) == mine


@pytest.mark.parametrize("other", [
    torch.ones(2, 4, 3, 3, dtype=torch.float64),
    torch.ones(2, 4, 9),
    torch.ones(2, 4, 3, 3).requires_grad_(),
    torch.ones(2, 4, 3, 3).to(memory_format=torch.channels_last),
    [torch.ones(2, 4, 3, 3)],
    (torch.ones(2, 4, 3, 3), None),
    (torch.ones(2, 4, 3, 3), 0),
    (torch.ones(2, 4, 3, 3), False),
    (torch.ones(2, 4, 3, 3), 0.0),
    (torch.ones(2, 4, 3, 3), -0.0),
    (torch.ones(2, 4, 3, 3).to(memory_format=torch.channels_last), None),
])  # fmt: skip
def test_what_differs_in_anything_but_its_numbers_lies_differently(other):
    """Each of these would else be read as another of them."""
    others = [
        torch.ones(2, 4, 3, 3),
        (torch.zeros(2, 4, 3, 3), 1),
        (torch.zeros(2, 4, 3, 3), True),
        [torch.ones(2, 4, 3, 3), None],
    ]
    mine = key_of(Payload.of(other))
    assert mine == key_of(Payload.of(other))
    assert all(mine != key_of(Payload.of(value)) for value in others)


@pytest.mark.parametrize("tensor", [
    torch.arange(6.0).reshape(2, 3).t(),
    torch.arange(24.0).reshape(2, 3, 4).permute(1, 2, 0),
    torch.arange(48.0).reshape(2, 4, 3, 2).to(memory_format=torch.channels_last),
    torch.arange(3.0).expand(4, 3),
    torch.arange(6.0).reshape(2, 1, 3).transpose(0, 2).expand(3, 5, 2),
    torch.arange(12.0).reshape(3, 4)[:, :2],
    torch.tensor(2.0).expand(3),
    torch.arange(5.0).reshape(1, 5).expand(1, 5),
    torch.arange(6.0).reshape(2, 3).to(torch.bfloat16).t(),
    torch.ones(3, 2, dtype=torch.complex64).t().conj(),
])  # fmt: skip
def test_a_tensor_comes_out_of_a_slot_with_the_strides_that_it_had(slot, tensor):
    """Kernels are chosen by strides, and others round otherwise; what an expanded tensor repeats
    lies there once.
    """
    layout = layout_of(tensor)
    layout.put(slot, [tensor])
    (received,) = layout.take(slot, None).tensors
    assert received.stride() == tensor.stride()
    assert torch.equal(received, tensor)
    assert layout.nbytes <= LINE * -(-tensor.untyped_storage().nbytes() // LINE)


@pytest.mark.parametrize(
    "value", [torch.ones(3), [torch.ones(3), torch.ones(2)], [torch.ones(2, 3).t(), torch.ones(2)]]
)
def test_neither_a_slot_nor_what_comes_out_of_it_is_part_of_a_graph(slot, value):
    """A slot is written again and again: a graph of all messages would never be freed."""
    for tensor in Payload.of(value).tensors:
        tensor.requires_grad_()
    payload, layout = Payload.of(value), layout_of(value)
    for _ in range(2):
        layout.put(slot, payload.tensors)
    assert not any(view.requires_grad for view in layout.views(slot))
    received = layout.take(slot, None)
    assert not any(tensor.requires_grad for tensor in received.tensors)
    assert received.wants_grad == (True,) * len(payload.tensors)
    assert all(map(torch.equal, received.tensors, payload.tensors))


@pytest.mark.parametrize(
    "tensor",
    [torch.arange(400.0).reshape(4, 100)[:, :2], torch.arange(9.0).as_strided((4, 3), (2, 1))],
)
def test_wide_gaps_and_overlaps_become_contiguous(slot, tensor):
    """Their memory would be many times what is in them, or cannot be copied as it is."""
    layout = layout_of(tensor)
    layout.put(slot, [tensor])
    (received,) = layout.take(slot, None).tensors
    assert received.is_contiguous()
    assert torch.equal(received, tensor)
