"""What recomputed layers keep for their backward, and when it is freed."""

from __future__ import annotations

import gc
import weakref
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from tests.grad.recomputed_layers import (
    SHAPE,
    Layer,
    layers_of,
    run,
    seeded,
    unseeded,
)
from torch import Tensor, nn

from penstock.grad.recompute import Recomputing
from penstock.grad.split import input_grad, weight_grad


def kept_bytes(layers: list[Layer], recomputed: set[int], starts: set[int] = frozenset()) -> int:
    """Return the bytes in memory between a forward and its backward, without weights."""
    bytes_of: dict[int, int] = {}
    weight_memory = {
        tensor.untyped_storage().data_ptr()
        for layer in layers
        for tensor in layer.module.parameters()
    }

    def pack(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in weight_memory:
            bytes_of[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    x = torch.randn(SHAPE, dtype=torch.float64, requires_grad=True)
    recomputing = Recomputing(layers, recomputed, starts)
    recomputing.run(x, seeded)  # now it is known that they change nothing in place
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = recomputing.run(x, seeded)
    assert out.requires_grad
    return sum(bytes_of.values())


def test_a_segment_keeps_its_input_and_no_more():
    """Saved-tensor hooks around the layers, such as those that count or offload activations, see
    all that is kept.
    """
    layers = layers_of(["tanh", "tanh", "tanh", "tanh"])
    size = 8 * torch.Size(SHAPE).numel()
    assert kept_bytes(layers, set()) == 4 * size
    assert kept_bytes(layers, {10, 11, 12, 13}) == size
    assert kept_bytes(layers, {10, 11, 12, 13}, {12}) == 2 * size
    assert kept_bytes(layers, {11, 12}) == 2 * size, (
        "the first's output is the segment's input, and the last keeps its own"
    )


class Watched(torch.autograd.Function):
    """exp, which saves its output in memory whose lifetime is observed."""

    activations: ClassVar[list[weakref.ref[Any]]] = []
    peak: ClassVar[int] = 0

    @classmethod
    def live(cls) -> int:
        """Return how many outputs are alive."""
        return sum(ref() is not None for ref in cls.activations)

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        array = np.exp(x.numpy())
        Watched.activations.append(weakref.ref(array))
        y = torch.from_numpy(array)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        Watched.peak = max(Watched.peak, Watched.live())
        return grad * y


class Exp(nn.Module):
    """`Watched` as a layer."""

    def forward(self, x: Tensor) -> Tensor:
        return Watched.apply(x / 8)


@pytest.mark.parametrize(
    ("recomputed", "starts", "expected_alive", "expected_peak"),
    [
        (set(), set(), 8, 8),
        # The last result belongs to the caller. The whole segment comes back, its first forward's
        # last result is still there.
        (set(range(8)), set(), 1, 9),
        # Inputs of three segments; then each is restored alone, and releases an input that is not
        # saved.
        (set(range(8)), {2, 4, 6}, 4, 5),
        # Two segments of three between two that are kept: their inputs are kept anyway, or given.
        ({1, 2, 3, 5, 6, 7}, set(), 3, 6),
    ],
)
@pytest.mark.parametrize("split", [False, True], ids=["whole", "in two parts"])
def test_recomputed_tensors_are_freed_with_their_segment(
    monkeypatch, recomputed, starts, expected_alive, expected_peak, split
):
    """The peak is the saved memory plus the largest segment. A split backward needs all segments
    until its weight part.
    """
    monkeypatch.setattr(Watched, "activations", [])
    monkeypatch.setattr(Watched, "peak", 0)
    layers = [Layer(index, Exp()) for index in range(8)]
    x = torch.randn(10, dtype=torch.float64, requires_grad=True)
    recomputing = Recomputing(layers, recomputed, starts)
    recomputing.run(x, unseeded)
    assert Watched.live() == 0, "a forward without a backward leaves nothing"
    gc.disable()  # nor may a cycle keep anything until the collector comes
    out = recomputing.run(x, unseeded)
    assert Watched.live() == expected_alive
    if split:
        pending = input_grad([out], [torch.ones(10, dtype=torch.float64)], [x])[1]
        weight_grad(pending)
        assert Watched.peak >= expected_peak
    else:
        out.backward(torch.ones(10, dtype=torch.float64))
        assert Watched.peak == expected_peak
    del out
    assert Watched.live() == 0
    gc.enable()


def test_only_segments_that_the_backward_needs_are_recomputed():
    """Neither an unused output nor the ops after the last saved tensor are computed again."""
    calls = []

    class Ending(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x.exp()
            calls.append("saved")
            y = y + 1
            calls.append("behind")
            return y

    layers = [Layer(0, Ending()), Layer(1, Ending())]
    out = run(layers, torch.randn(3, requires_grad=True), {0, 1}, unseeded)
    calls.clear()
    out.sum().backward()
    assert calls == ["saved", "behind"], "the last op that saves ends it"


def test_what_the_backward_does_not_need_at_the_end_of_a_segment_is_not_computed_again():
    """Its slots are freed with its graph."""
    calls = []

    class Fork(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            used = x.exp()
            calls.append("used")
            unused = x.sin().exp()
            calls.append("unused")
            return used, unused

    out, unused = run([Layer(0, Fork())], torch.ones(3, requires_grad=True), {0}, unseeded)
    del unused
    calls.clear()
    out.sum().backward()
    assert calls == [], "it ends where the last tensor that is needed was saved"


def test_copies_of_buffers_are_freed_once_the_segment_has_run_again():
    """A graph that is kept for another backward does not hold them."""
    seen = []

    class Shifted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("shift", torch.ones(3))

        def forward(self, x: Tensor) -> Tensor:
            seen.append(weakref.ref(self.shift))
            return (x + self.shift).exp()

    module = Shifted()
    out = run([Layer(0, module)], torch.ones(3, requires_grad=True), {0}, unseeded).sum()
    out.backward(retain_graph=True)
    first, second = (ref() for ref in seen)
    assert first is module.shift
    assert second is None
