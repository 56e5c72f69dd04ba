"""Activation offload. There is no GPU here: the CPU stands for a device with memory of its own."""

from __future__ import annotations

import weakref
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from penstock.grad import offload
from penstock.grad.offload import offloading
from penstock.grad.saved_version import ChangedInPlace


def model():
    """Return layers that save large activations."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(64, 512),
        nn.GELU(),
        nn.Linear(512, 512),
        nn.Tanh(),
        nn.LayerNorm(512),
        nn.Linear(512, 8),
    )


def weights_of(net):
    """Return the start addresses of the weights' memory."""
    return frozenset(parameter.untyped_storage().data_ptr() for parameter in net.parameters())


def gradients(net, x, context):
    """Return the gradients of all parameters and the input."""
    net.zero_grad()
    leaf = x.detach().clone().requires_grad_(True)
    with context:
        out = net(leaf)
    out.square().mean().backward()
    return [leaf.grad, *(parameter.grad.clone() for parameter in net.parameters())]


def test_gradients_are_the_same_to_the_bit():
    """Copies preserve values."""
    net, x = model(), torch.randn(128, 64)
    expected = gradients(net, x, torch.enable_grad())
    offloaded = gradients(net, x, offloading(weights_of(net), lambda tensor: True))
    assert all(torch.equal(one, other) for one, other in zip(offloaded, expected, strict=True))


def test_activations_of_layers_are_freed_and_weights_are_not_copied():
    """Offloading must free the device's memory."""
    net, x = model(), torch.randn(128, 64)
    activations = []
    for layer in net:
        layer.register_forward_hook(lambda _m, _i, out: activations.append(weakref.ref(out)))
    copied = []
    with offloading(
        weights_of(net), lambda tensor: copied.append(tensor.untyped_storage().data_ptr()) or True
    ):
        out = net(x)
    assert [ref() is None for ref in activations] == [True] * 5 + [False]
    assert weights_of(net) & set(copied), "they were asked for"
    del out


def test_on_the_cpu_offload_moves_nothing():
    """The CPU has no device memory."""
    net, x = model(), torch.randn(128, 64)
    with offloading(weights_of(net)):
        out = net(x)
    saved = out.grad_fn.next_functions[1][0]
    assert not isinstance(saved, offload._Offloaded)


def test_a_tensor_that_is_saved_twice_is_offloaded_once_unless_it_changed():
    """A tensor is identified by address and version."""
    x = torch.randn(200, 200, requires_grad=True)
    copies = []
    original = offload._Offloaded.__init__

    def counting(self, tensor):
        copies.append(tensor)
        original(self, tensor)

    offload._Offloaded.__init__ = counting
    try:
        with offloading(frozenset(), lambda tensor: True):
            a = x * 2
            loss = (a * a).sum() + (a * 3 * a).sum()
        loss.backward()
    finally:
        offload._Offloaded.__init__ = original
    assert len(copies) == 2
    torch.testing.assert_close(x.grad, 4 * 2 * x.detach() * 4)


@pytest.mark.parametrize("share", [0.25, 0.5, 0.75, 1.0])
def test_a_share_of_the_bytes_is_moved(share):
    """At most that share, and less by no more than the largest tensor; gradients stay the same."""
    net, x = model(), torch.randn(64, 64)
    moved = {}

    def moves(tensor):
        """Count a tensor that may be moved, once."""
        moved[tensor.data_ptr()] = tensor.nbytes
        return True

    expected = gradients(net, x, nullcontext())
    before = offload._Offloaded.__init__
    copied = []

    def note(self, tensor):
        """Count a tensor that is moved."""
        copied.append(tensor.nbytes)
        before(self, tensor)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(offload._Offloaded, "__init__", note)
        actual = gradients(net, x, offloading(weights_of(net), moves, share))
    sizes = [nbytes for address, nbytes in moved.items() if address not in weights_of(net)]
    assert share * sum(sizes) - max(sizes) <= sum(copied) <= share * sum(sizes)
    assert copied
    assert all(map(torch.equal, actual, expected))


@pytest.mark.parametrize(
    ("share", "moved"),
    [(1.0, [0, 1, 2, 3, 4, 5]), (0.5, [1, 3, 5]), (1 / 3, [2, 5]), (2 / 3, [1, 2, 4, 5])],
)
def test_the_share_is_met_exactly_and_spread_evenly(monkeypatch, share, moved):
    """Of equal tensors: all of them, every second or third one; so much that nothing is left over."""
    places = []
    memory = torch.zeros(6, 32768)
    original = offload._Offloaded.__init__

    def note(self, tensor):
        """Note the number of a tensor that is moved."""
        places.append(round((tensor.data_ptr() - memory.data_ptr()) / memory[0].nbytes))
        original(self, tensor)

    monkeypatch.setattr(offload._Offloaded, "__init__", note)
    weight = torch.ones(32768, requires_grad=True)
    with offloading(frozenset({weight.untyped_storage().data_ptr()}), lambda _: True, share):
        products = [weight * row for row in memory]
    assert places == moved
    sum(product.sum() for product in products).backward()
    assert not weight.grad.any()


def test_a_tensor_that_changes_between_two_uses_is_moved_again():
    """The second use needs the new values, whatever became of the first."""
    x = torch.randn(200, 200, requires_grad=True)
    with offloading(frozenset(), lambda tensor: True):
        a = x * 2
        dropped = (a * a).sum()
        a.add_(1)
        loss = (a * a).sum()
    loss.backward()
    torch.testing.assert_close(x.grad, 4 * (2 * x.detach() + 1))
    assert dropped.requires_grad


@pytest.fixture
def moved(monkeypatch):
    """The tensors that are moved to host memory."""
    tensors = []
    original = offload._Offloaded.__init__

    def note(self, tensor):
        """Note a tensor."""
        tensors.append(tensor)
        original(self, tensor)

    monkeypatch.setattr(offload._Offloaded, "__init__", note)
    return tensors


@pytest.mark.parametrize(
    ("value", "count"),
    [
        (torch.ones(offload.SMALLEST // 4), 1),
        (torch.ones(offload.SMALLEST // 4 - 1), 0),
        (torch.ones(offload.SMALLEST // 8, dtype=torch.float64), 1),
        (torch.ones(1, 4).expand(offload.SMALLEST, 4), 0),
        (torch.ones(4, offload.SMALLEST).t(), 1),
        (torch.ones(1, offload.SMALLEST).as_strided((1, offload.SMALLEST), (0, 1)), 1),
    ],
    ids=["smallest", "smaller", "bytes", "expanded", "transposed", "one row"],
)
def test_tensors_are_moved_if_a_copy_is_worth_it(moved, value, count):
    """From a number of bytes on; a copy of an expanded tensor would be larger than the tensor."""
    scale = torch.full((), 2.0, dtype=value.dtype, requires_grad=True)
    with offloading(frozenset(), lambda _: True):
        product = scale * value
    assert len(moved) == count
    product.sum().backward()
    assert float(scale.grad) == value.sum()


def test_parts_of_weights_stay(moved):
    """Wherever in the weight's memory they begin."""
    weight = torch.ones(4, offload.SMALLEST, requires_grad=True)
    scale = torch.ones((), requires_grad=True)
    with offloading(frozenset({weight.untyped_storage().data_ptr()}), lambda _: True):
        products = [scale * part for part in weight]
    assert moved == []
    sum(product.sum() for product in products).backward()
    assert float(scale.grad) == 4 * offload.SMALLEST


def test_sparse_tensors_and_those_that_are_not_asked_for_stay(moved):
    """The function tells which are on a device."""
    asked = []
    weight = torch.ones(200, 100, requires_grad=True)
    with offloading(frozenset(), asked.append):
        torch.sparse.mm(torch.eye(200).to_sparse(), weight)
        weight.exp()
    assert moved == []
    assert all(tensor.layout is torch.strided for tensor in asked)
    assert [tensor.shape for tensor in asked] == [(200, 100)]


def test_a_copy_on_the_device_is_shared_while_it_is_used_and_then_freed():
    """Several nodes read it during one backward; the host keeps its own."""
    tensor = torch.randn(offload.SMALLEST)
    offloaded = offload._Offloaded(tensor)
    first = offloaded.fetch()
    assert first is not tensor
    assert first.data_ptr() != tensor.data_ptr()
    assert offloaded.fetch() is first
    address = weakref.ref(first)
    del first
    assert address() is None
    again = offloaded.fetch()
    assert torch.equal(again, tensor)
    assert again.device == tensor.device


@pytest.mark.parametrize("large", [False, True])
def test_a_saved_tensor_that_is_changed_in_place_is_refused(large):
    """Whether it was moved or not: saved-tensor hooks switch off autograd's own check."""
    x = torch.ones(offload.SMALLEST if large else 3, requires_grad=True)
    with offloading(frozenset(), lambda _: True):
        y = x.exp()
    with torch.no_grad():
        y.add_(1)
    with pytest.raises(ChangedInPlace, match="is at version 1; expected version 0"):
        y.sum().backward()


def test_strides_of_a_moved_tensor_are_kept(moved):
    """Kernels may sum in another order for other strides."""
    value = torch.randn(300, 200).t()
    scale = torch.ones((), requires_grad=True)
    seen = []
    with offloading(frozenset(), lambda _: True):
        product = scale * value
    product.grad_fn.register_prehook(lambda _: seen.append(product.grad_fn._saved_other.stride()))
    product.sum().backward()
    assert len(moved) == 1
    assert seen == [value.stride()]


@pytest.mark.parametrize(("device", "expected"), [("cpu", False), ("meta", False)])
def test_host_memory_is_no_memory_of_a_device(device, expected):
    """Nor are tensors without memory."""
    assert offload.has_own_memory(torch.ones(2, device=device)) is expected
    assert offload.has_own_memory(SimpleNamespace(device=torch.device("cuda", 1)))


@pytest.mark.parametrize("shape", [(200, 200), (40000, 1)])
def test_a_matrix_and_its_transpose_are_two_tensors(shape):
    """They have one address, and other strides or another shape."""
    values = torch.randn(shape)
    grads = []
    for context in (nullcontext(), offloading(frozenset(), lambda _: True)):
        x = values.clone().requires_grad_()
        with context:
            y = x * 1
            result = (y.sin() * 2).sum() + (y.t().sin() * torch.arange(float(shape[0]))).sum()
        result.backward()
        grads.append(x.grad)
    torch.testing.assert_close(*grads)


def test_views_of_two_dtypes_are_two_tensors():
    """They have one address, shape and strides, and other values."""
    numbers = torch.arange(float(offload.SMALLEST)) + 1
    words = numbers.view(torch.int32)
    scales = [torch.ones((), requires_grad=True) for _ in range(2)]
    with offloading(frozenset(), lambda _: True):
        products = [scale * value for scale, value in zip(scales, (numbers, words), strict=True)]
    sum(product.sum() for product in products).backward()
    for scale, value in zip(scales, (numbers, words), strict=True):
        torch.testing.assert_close(scale.grad, value.float().sum())


def test_memory_of_moved_tensors_is_held_until_the_forward_ends():
    """Another tensor at the same address would be taken for the one that was moved."""
    x = torch.ones(offload.SMALLEST, requires_grad=True)
    with offloading(frozenset(), lambda _: True):
        product = x * 2
        storage = weakref.ref(product.untyped_storage())
        result = product.sin()
        del product
        assert storage() is not None
    assert storage() is None
    result.sum().backward()
    torch.testing.assert_close(x.grad, 2 * torch.full_like(x, 2.0).cos())
