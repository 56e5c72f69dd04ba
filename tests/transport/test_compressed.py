"""Boundaries in fewer bits."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import SettingError
from penstock.schedule.lower import Message
from penstock.schedule.op import Kind
from penstock.transport.compressed import (
    CompressedTransport,
    compress,
    decompress,
    dequantize,
    quantize,
)
from penstock.transport.in_process import Exchange, MemoryTransport
from penstock.transport.payload import Payload


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(1, 9), min_size=0, max_size=3), st.floats(-30, 30), st.integers(0, 9))
def test_eight_bits_are_off_by_at_most_half_a_step_of_the_rows_scale(shape, magnitude, seed):
    """A step is the row's largest number over 127."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 2.0**magnitude
    back = dequantize(quantize(x, "int8"), x.dtype, x.shape)
    rows = x if x.dim() else x.reshape(1)
    step = (rows.abs().amax(-1, keepdim=True) / 127).expand_as(rows).reshape(x.shape)
    assert back.shape == x.shape
    assert bool(((back - x).abs() <= step * 0.501).all())


def test_bfloat16_is_what_torch_makes_of_it():
    """Nothing of our own."""
    x = torch.randn(7, 300)
    assert torch.equal(dequantize(quantize(x, "bfloat16"), x.dtype, x.shape), x.bfloat16().float())


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_overflow_is_still_seen_on_the_other_side(bad):
    """A scaler that skips the step must hear of it."""
    x = torch.ones(4, 100)
    x[2, 5] = bad
    back = dequantize(quantize(x, "int8"), x.dtype, x.shape)
    assert not back[2].isfinite().all()
    assert back[[0, 1, 3]].isfinite().all()


@pytest.mark.parametrize("code", ["bfloat16", "int8"])
def test_everything_else_arrives_as_it_was(code):
    """Masks, numbers, small tensors, constants, and the nesting."""
    value = {
        "x": torch.randn(4, 100),
        "mask": torch.rand(4, 100) > 0.5,
        "ids": torch.arange(999),
        "few": torch.randn(3),
        "depth": 2,
        "none": None,
    }
    value["x"].requires_grad_(True)
    back = decompress(compress(Payload.of(value), code))
    assert back.wants_grad == Payload.of(value).wants_grad
    received = back.value()
    for name in ("mask", "ids", "few"):
        assert torch.equal(received[name], value[name])
    assert (received["depth"], received["none"]) == (2, None)
    torch.testing.assert_close(received["x"], value["x"].detach(), rtol=0.02, atol=0.03)


def test_what_a_gradient_has_lost_comes_with_the_next():
    """So the sum over micro-batches is off by what one message has lost, and not by as much for
    each.
    """
    exchange = Exchange()
    ends = [CompressedTransport(MemoryTransport(rank, exchange, 5.0), "int8") for rank in (0, 1)]
    grads = [torch.randn(8, 64, generator=torch.Generator().manual_seed(n)) for n in range(50)]
    total = torch.zeros(8, 64)
    plain = torch.zeros(8, 64)
    for number, grad in enumerate(grads):
        message = Message(Kind.B, 1, number)
        ends[1].send(0, message, Payload.flat([grad]), "form")
        total += ends[0].post(1, message, "form").wait().tensors[0]
        plain += dequantize(quantize(grad, "int8"), grad.dtype, grad.shape)
    expected = torch.stack(grads).sum(0)
    step = float(max(grad.abs().max() for grad in grads)) / 127
    assert float((total - expected).abs().max()) <= step
    assert float((plain - expected).abs().mean()) > 2 * float((total - expected).abs().mean())


def test_what_copies_exchange_is_not_touched():
    """Weights and their gradients stay exact."""
    exchange = Exchange()
    ends = [CompressedTransport(MemoryTransport(rank, exchange, 5.0), "int8") for rank in (0, 1)]
    x = torch.randn(5, 500)
    ends[0].send(1, Message(Kind.U, 0, 0), Payload.of(x), "form")
    assert torch.equal(ends[1].post(0, Message(Kind.U, 0, 0), "form").wait().tensors[0], x)


def test_an_unknown_code_is_refused():
    """By name."""
    with pytest.raises(SettingError, match="choose one of bfloat16, int8, or None"):
        quantize(torch.ones(2), "fp4")


def test_an_overflow_spoils_no_later_gradient():
    """A loss scaler skips the step of the overflow; its error of quantization must not come back."""
    exchange = Exchange()
    sender = CompressedTransport(MemoryTransport(0, exchange, 1.0), "int8")
    receiver = CompressedTransport(MemoryTransport(1, exchange, 1.0), "int8")
    gradient = torch.randn(2, 300)
    overflow = gradient.clone()
    overflow[0, 0] = torch.inf
    received = []
    for micro_batch, tensor in enumerate((overflow, gradient)):
        message = Message(Kind.B, 1, micro_batch)
        sender.send(1, message, Payload.of(tensor, (False,)), "")
        received.append(receiver.post(0, message, "").wait().value())
    assert not received[0].isfinite().all()
    torch.testing.assert_close(received[1], gradient, atol=0.03, rtol=0)


def test_stages_of_a_rank_do_not_share_what_their_gradients_have_lost():
    """Two stages may send gradients of one form to the same rank."""
    exchange = Exchange()
    sender = CompressedTransport(MemoryTransport(0, exchange, 1.0), "int8")
    receiver = CompressedTransport(MemoryTransport(1, exchange, 1.0), "int8")
    for stage in (1, 3):
        gradient = torch.randn(2, 300, generator=torch.Generator().manual_seed(stage))
        message = Message(Kind.B, stage, 0)
        sender.send(1, message, Payload.flat([gradient]), "form")
        received = receiver.post(0, message, "form").wait().tensors[0]
        alone = dequantize(quantize(gradient, "int8"), gradient.dtype, gradient.shape)
        assert torch.equal(received, alone)


@pytest.mark.parametrize(("elements", "dtype"), [(255, torch.float32), (256, torch.bfloat16)])
def test_tensors_of_256_elements_and_more_are_compressed(elements, dtype):
    """Scales and descriptions would outweigh what smaller ones save."""
    payload = compress(Payload.of(torch.randn(elements)), "bfloat16")
    assert payload.tensors[0].dtype is dtype


class Links:
    """A transport that records its calls."""

    def __init__(self):
        self.calls = []

    def __getattr__(self, method):
        def record(*args):
            self.calls.append((method, *args))
            return f"result of {method}"

        return record


def test_everything_else_is_left_to_the_transport_inside():
    """A release that is not passed on would hold the sends of a stream for ever."""
    links = Links()
    transport = CompressedTransport(links, "int8")
    assert transport.arrives_at_once(3) == "result of arrives_at_once"
    transport.release(5)
    transport.drain()
    assert links.calls == [("arrives_at_once", 3), ("release", 5), ("drain",)]
    payload = Payload.of(torch.ones(512))
    message = Message(Kind.U, 0, 0)
    assert transport.send(1, message, payload, "form") == "result of send"
    assert transport.post(1, message, "form") == "result of post"
    assert links.calls[3:] == [
        ("send", 1, message, payload, "form"),
        ("post", 1, message, "form"),
    ]


@pytest.mark.parametrize(
    ("code", "kind", "feeds_back"),
    [
        ("int8", Kind.B, True),
        ("int8", Kind.F, False),
        ("bfloat16", Kind.B, False),
        ("bfloat16", Kind.F, False),
    ],
)
def test_only_gradients_in_8_bits_bring_back_what_the_last_one_has_lost(code, kind, feeds_back):
    """An activation belongs to its own micro-batch, and bfloat16 rounds without a bias."""
    links = Links()
    transport = CompressedTransport(links, code)
    values = torch.linspace(0.1, 1.0, 512)
    for micro_batch in range(2):
        message = Message(kind, 1, micro_batch)
        transport.send(0, message, Payload.of(values.clone().requires_grad_()), "form")
    sent = [call[3].tensors for call in links.calls]
    same = all(torch.equal(a, b) for a, b in zip(*sent, strict=True))
    assert same is not feeds_back
    assert bool(transport._errors) is feeds_back
    assert not any(tensor.requires_grad for tensors in sent for tensor in tensors)


@pytest.mark.parametrize("peers", [(0, 0), (0, 2)])
def test_peers_do_not_share_what_their_gradients_have_lost(peers):
    """The error of a message to one belongs to no message to another."""
    links = Links()
    transport = CompressedTransport(links, "int8")
    for micro_batch, peer in enumerate(peers):
        values = torch.linspace(0.1, 1.0, 512)
        transport.send(peer, Message(Kind.B, 1, micro_batch), Payload.of(values), "form")
    sent = [call[3].tensors[0] for call in links.calls]
    assert torch.equal(*sent) == (peers[0] != peers[1])


def test_a_tensor_without_dimensions_has_a_scale_too():
    """It is a row of one element."""
    parts = quantize(torch.tensor(-3.0), "int8")
    assert [part.shape for part in parts] == [(1,), (1,)]
    restored = dequantize(parts, torch.float64, torch.Size([]))
    assert (restored.shape, restored.dtype) == ((), torch.float64)
    assert restored.item() == pytest.approx(-3.0)
    zeros = quantize(torch.zeros(2, 3), "int8")
    assert torch.equal(dequantize(zeros, torch.float32, torch.Size([2, 3])), torch.zeros(2, 3))


def test_the_error_before_an_overflow_is_forgotten_with_it():
    """It was part of the gradient that overflowed."""
    links = Links()
    transport = CompressedTransport(links, "int8")
    gradient = torch.linspace(0.1, 1.0, 512)
    for micro_batch, factor in enumerate((1.0, torch.inf, 1.0, 1.0)):
        transport.send(1, Message(Kind.B, 1, micro_batch), Payload.of(gradient * factor), "form")
    first, _, after, last = (call[3].tensors[0] for call in links.calls)
    assert torch.equal(first, after)
    assert not torch.equal(after, last)


def test_leaves_of_one_message_do_not_share_what_they_have_lost():
    """They may have one shape."""
    links = Links()
    transport = CompressedTransport(links, "int8")
    first, second = torch.linspace(0.1, 1.0, 512), torch.linspace(3.0, 5.0, 512)
    transport.send(1, Message(Kind.B, 1, 0), Payload.flat([first, second]), "form")
    alone = Links()
    CompressedTransport(alone, "int8").send(1, Message(Kind.B, 1, 0), Payload.of(second), "form")
    assert torch.equal(links.calls[0][3].tensors[2], alone.calls[0][3].tensors[0])


def test_gradients_of_several_shapes_do_not_share_what_they_have_lost():
    """Micro-batches may be uneven: the error of a shape comes back with the next one of that shape."""
    links = Links()
    transport = CompressedTransport(links, "int8")
    wide, narrow = torch.linspace(0.1, 1.0, 1024).reshape(2, 512), torch.linspace(2.0, 3.0, 512)
    for micro_batch, gradient in enumerate((wide, narrow, wide)):
        transport.send(1, Message(Kind.B, 1, micro_batch), Payload.of(gradient), "form")
    alone = Links()
    transport = CompressedTransport(alone, "int8")
    transport.send(1, Message(Kind.B, 1, 0), Payload.of(narrow), "form")
    transport.send(1, Message(Kind.B, 1, 1), Payload.of(wide), "form")
    transport.send(1, Message(Kind.B, 1, 2), Payload.of(wide), "form")
    sent, expected = ([call[3].tensors[0] for call in one.calls] for one in (links, alone))
    assert torch.equal(sent[0], expected[1])
    assert torch.equal(sent[1], expected[0])
    assert torch.equal(sent[2], expected[2])


@pytest.mark.parametrize("code", ["bfloat16", "int8"])
@pytest.mark.parametrize("value", [torch.ones(300), [torch.ones(300), 1], {"a": (torch.ones(2),)}])
def test_the_description_of_a_payload_arrives_as_it_was(code, value):
    """Nesting, who wants a gradient, and which tensors share memory at the sender."""
    payload = Payload.of(value)
    for wants_grad in (True, False):
        for shared in ((), ((0, 1), (2, 3))):
            sent = Payload(
                payload.structure, payload.leaves, (wants_grad,) * len(payload.tensors), shared
            )
            received = decompress(compress(sent, code))
            assert received.structure == sent.structure
            assert received.wants_grad == sent.wants_grad
            assert received.shared == shared
            assert len(received.leaves) == len(sent.leaves)
    for row in (
        Payload.row([torch.ones(300), torch.ones(2)]),
        Payload.flat([None, torch.ones(300)]),
    ):
        received = decompress(compress(row, code))
        assert received.structure == row.structure == "*"
        assert [type(leaf) for leaf in received.leaves] == [type(leaf) for leaf in row.leaves]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_compressed_tensors_have_their_dtype_and_shape_again(dtype):
    """A layer in half precision gets half precision."""
    x = torch.linspace(-1, 1, 600).reshape(2, 3, 100).to(dtype)
    for code in ("bfloat16", "int8"):
        (received,) = decompress(compress(Payload.of([x]), code)).tensors
        assert (received.dtype, received.shape) == (dtype, x.shape)
        torch.testing.assert_close(received.float(), x.float(), rtol=0.01, atol=0.01)


def test_the_largest_number_of_a_row_is_127_steps():
    """Both signs have the same range."""
    x = torch.tensor([[2.0, -1.0], [-0.5, 0.25]])
    integers, scale = quantize(x, "int8")
    assert integers.tolist() == [[127, -64], [-127, 64]]
    assert (integers.dtype, scale.dtype) == (torch.int8, torch.float32)
    assert scale.flatten().tolist() == pytest.approx([2 / 127, 0.5 / 127])


@pytest.mark.parametrize("kind", list(Kind))
def test_both_ends_of_a_link_compress_the_same_kinds(kind):
    """Activations that move to another rank come back as they were, as do all updates."""
    exchange = Exchange()
    sender = CompressedTransport(MemoryTransport(0, exchange, 1.0), "bfloat16")
    receiver = CompressedTransport(MemoryTransport(1, exchange, 1.0), "bfloat16")
    x = torch.linspace(0.1, 1.0, 512)
    message = Message(kind, 1, 0)
    sent_bytes = sender.send(1, message, Payload.of(x), "form")
    received = receiver.post(0, message, "form").wait().value()
    compressed = kind in (Kind.F, Kind.B)
    assert torch.equal(received, x.bfloat16().float() if compressed else x)
    assert sent_bytes == x.nbytes // 2 if compressed else x.nbytes


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("largest", [1.0, 1e-4, 1e-6])
def test_the_scale_of_half_precision_is_exact_also_for_small_gradients(dtype, largest):
    """A 127th of a small number has few bits in half precision, or none."""
    x = torch.stack([torch.linspace(-largest, largest, 300), torch.zeros(300)]).to(dtype)
    integers, scale = quantize(x, "int8")
    assert scale.dtype is torch.float32
    step = x[0].float().abs().max() / 127
    assert (integers * scale - x.float()).abs().max() <= 0.51 * step
    assert torch.equal(dequantize([integers, scale], dtype, x.shape)[1], x[1])
