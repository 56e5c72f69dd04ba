"""Recomputed layers give the same results as others, to the bit."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tests.grad.recomputed_layers import (
    KINDS,
    SHAPE,
    Layer,
    Rising,
    layers_of,
    run,
    seeded,
    unseeded,
)
from torch import Tensor, nn

from penstock.grad.recompute import Recomputing
from penstock.grad.split import input_grad, weight_grad


@dataclass
class Result:
    """Everything that one step of several micro-batches computes."""

    outputs: list[Tensor] = field(default_factory=list)
    inputs: list[Tensor | None] = field(default_factory=list)
    grads: dict[str, Tensor] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)


def step(
    layers: list[Layer], forward: Callable[[Tensor], Tensor], split: bool, wants_grad: bool = True
) -> Result:
    """Run three forwards and then their backwards, in the order of GPipe."""
    result, running = Result(), []
    for number in range(3):
        x = torch.randn(
            SHAPE, dtype=torch.float64, generator=torch.Generator().manual_seed(number)
        ).requires_grad_(wants_grad)
        out = forward(x * 1.0 if wants_grad else x.clone())  # a leaf must not be changed in place
        result.outputs.append(out.detach().clone())
        running.append((x, out))
    for x, out in running:
        if not out.requires_grad:
            continue
        grad = torch.randn(SHAPE, dtype=torch.float64, generator=torch.Generator().manual_seed(9))
        leaves = [x] if wants_grad else []
        if split:
            grads, pending = input_grad([out], [grad], leaves)
            weight_grad(pending)
            result.inputs += grads
        else:
            torch.autograd.backward([out], [grad])
            result.inputs += [leaf.grad for leaf in leaves]
    for layer in layers:
        result.grads |= {
            f"{layer.index}.{name}": p.grad
            for name, p in layer.module.named_parameters()
            if p.grad is not None
        }
        result.buffers |= {
            f"{layer.index}.{name}": b.clone() for name, b in layer.module.named_buffers()
        }
    return result


def same(a: Result, b: Result) -> None:
    """Check equality to the bit."""
    assert a.grads.keys() == b.grads.keys()
    pairs = [*zip(a.outputs, b.outputs, strict=True), *zip(a.inputs, b.inputs, strict=True)]
    pairs += [(a.grads[name], b.grads[name]) for name in a.grads] + [
        (a.buffers[name], b.buffers[name]) for name in a.buffers
    ]
    for one, other in pairs:
        assert (one is None) is (other is None)
        assert one is None or torch.equal(one, other)


@settings(max_examples=30, deadline=None)
@given(
    st.data(),
    st.lists(st.sampled_from(list(KINDS)), min_size=1, max_size=6),
    st.booleans(),
    st.booleans(),
)
def test_a_step_leaves_what_it_leaves_when_nothing_runs_again(data, kinds, split, wants_grad):
    """Outputs, gradients of inputs and weights, and buffers; with all or some layers recomputed;
    full and split backwards.
    """
    plain = layers_of(kinds)
    again = copy.deepcopy(plain)
    indices = [layer.index for layer in plain]
    recomputed = data.draw(st.sets(st.sampled_from(indices)))
    starts = data.draw(st.sets(st.sampled_from(sorted(recomputed)))) if recomputed else set()
    recomputing = Recomputing(again, recomputed, starts)

    def straight(value: Any) -> Any:
        for layer in plain:
            value = seeded(layer, value)
        return value

    try:
        expected = step(plain, straight, split, wants_grad)
    except RuntimeError as error:
        # A layer changes in place what the one before has saved, which no working model does.
        assume("modified by an inplace operation" not in str(error))
        raise
    same(expected, step(again, lambda value: recomputing.run(value, seeded), split, wants_grad))


@pytest.mark.parametrize("split", [False, True], ids=["whole", "in two parts"])
def test_a_segment_runs_again_once_whatever_the_backward(split):
    """A split backward traverses the graph several times; torch's checkpoint would run again each
    time.
    """
    layers = layers_of(["conv", "norm", "tanh", "conv", "tanh", "conv"])
    calls: list[int] = []

    def counted(layer: Layer, value: Any) -> Any:
        calls.append(layer.index)
        return seeded(layer, value)

    x = torch.randn(SHAPE, dtype=torch.float64, requires_grad=True)
    out = run(layers, x, {11, 12, 14}, counted)
    assert calls == [10, 11, 12, 13, 14, 15]
    calls.clear()
    if split:
        weight_grad(input_grad([out], [torch.ones_like(out)], [x])[1])
    else:
        out.backward(torch.ones_like(out))
    assert calls == [14, 11, 12], "the last segment first, each once"


def test_hooks_are_left_as_they_were_when_a_layer_fails():
    """A layer's own error is raised, in the forward and in the backward."""
    layers = layers_of(["tanh", "tanh"])

    def call(layer: Layer, value: Any) -> Any:
        if failing and layer.index == 11:
            raise ValueError("no more")
        return layer.module(value)

    x = torch.randn(SHAPE, dtype=torch.float64, requires_grad=True)
    failing = True
    with pytest.raises(ValueError, match="no more"):
        run(layers, x, {10, 11}, call)
    failing = False
    out = run(layers, x, {10, 11}, call)
    failing = True
    with pytest.raises(ValueError, match="no more"):
        out.sum().backward()
    y = x.tanh()
    y.sum().backward()


@pytest.mark.parametrize("mixed", [False, True], ids=["whole", "mixed"])
@pytest.mark.parametrize("inside", [False, True], ids=["forward alone", "backward too"])
def test_mixed_precision_of_the_recompute_is_that_of_the_forward(mixed, inside):
    """A backward may run outside autocast or under another dtype; the second forward uses that of
    the first.
    """
    dtypes = []
    for recomputed in (set(), {0, 1, 2}):
        torch.manual_seed(0)
        layers = [Layer(0, nn.Linear(8, 8)), Layer(1, nn.Tanh()), Layer(2, nn.Linear(8, 8))]
        x = torch.randn(4, 8, requires_grad=True)
        with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
            out = run(layers, x, recomputed, unseeded)
        assert out.dtype is (torch.bfloat16 if mixed else torch.float32)
        with torch.autocast("cpu", torch.float16) if inside else nullcontext():
            out.float().sum().backward()
        dtypes.append([x.grad, *(p.grad for layer in layers for p in layer.module.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*dtypes, strict=True))


class Squared(nn.Module):
    """A layer that takes a number."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 4))

    def forward(self, factor: float) -> Tensor:
        """Return a multiple of the square of the weight."""
        return (self.weight @ self.weight).sin() * factor


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("recomputed", [set(), {0}])
def test_mixed_precision_is_repeated_where_no_tensor_arrives(recomputed, dtype):
    """A layer may compute with its weights alone."""
    layer = Layer(0, Squared())
    with torch.autocast("cpu", dtype):
        out = run([layer], 2.0, recomputed, unseeded)
    assert out.dtype is dtype
    out.float().sum().backward()
    expected = 2 * 8 * torch.full((4, 4), 4.0).to(dtype).cos()
    torch.testing.assert_close(layer.module.weight.grad, expected.float(), rtol=0.02, atol=0)


def test_without_gradients_layers_run_once_and_keep_nothing():
    """Evaluation has no overhead."""
    layers = layers_of(["conv", "tanh"])
    with torch.no_grad():
        out = run(layers, torch.randn(SHAPE, dtype=torch.float64), {10, 11}, seeded)
    assert out.grad_fn is None


class AddsToSecond(nn.Module):
    """A layer that changes the second of two inputs in place."""

    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        """Return the sum of all."""
        return pair[0].sum() + pair[1].add_(1).sum()


def test_without_gradients_inputs_may_share_memory_and_change():
    """Nothing has to be repeated."""
    base = torch.ones(4)
    with torch.no_grad():
        out = run([Layer(0, AddsToSecond())], (base[:3], base[1:]), {0}, unseeded)
    assert float(out) == 3 + 6


def test_segments_begin_at_gaps_and_where_they_are_told_to():
    """Indices of other stages mean nothing here."""
    order = []

    def call(layer: Layer, value: Tensor) -> Tensor:
        order.append(layer.index)
        return value.exp()

    layers = [Layer(index, nn.Identity()) for index in range(3, 9)]
    recomputing = Recomputing(layers, [12, 8, 7, 5, 4, 3, 0], [30, 8, 5, 1])
    x = torch.full((2,), -3.0, requires_grad=True)
    out = recomputing.run(x, call)
    assert order == [3, 4, 5, 6, 7, 8]
    order.clear()
    out.sum().backward()
    # From the last segment to the first: 8; 7; 5; 3 and 4. Layer 6 keeps what it has saved.
    assert order == [8, 7, 5, 3, 4]
    order.clear()
    with torch.no_grad():
        recomputing.run(x, call)
    assert order == [3, 4, 5, 6, 7, 8]


@pytest.mark.parametrize("behind", [False, True])
@pytest.mark.parametrize("count_before", [0, 12])
def test_an_op_that_fills_a_tensor_after_saving_it_is_not_interrupted(behind, count_before):
    """The noise of rrelu: with half of it the gradients would be wrong. Nor is it compared before
    it is complete, wherever it is among the saved tensors.
    """
    module = nn.Sequential(*[nn.Identity() if n % 2 else Exp() for n in range(count_before)])
    modules = [module, nn.RReLU(), *[nn.Identity()] * behind]
    layers = [Layer(index, part) for index, part in enumerate(modules)]
    grads = []
    for recomputed in (set(), set(range(len(layers)))):
        leaf = torch.full((50,), -1.0, requires_grad=True)
        run(layers, leaf, recomputed, seeded).sum().backward()
        grads.append(leaf.grad)
    assert torch.equal(*grads)
    assert len(set(grads[0].tolist())) > 40


class Exp(nn.Module):
    """A layer that saves two tensors, and whose output is negative."""

    def forward(self, x: Tensor) -> Tensor:
        """Return minus the exponential of the hyperbolic tangent."""
        return -x.tanh().exp()


class Branches(nn.Module):
    """A layer with two outputs."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return both."""
        return x.exp(), x.exp().sin()


@pytest.mark.parametrize("dropped", [0, 1])
def test_a_segment_runs_again_for_what_is_left_of_its_graph(dropped):
    """What an output that was dropped has saved is not needed, and comes before or behind."""
    x = torch.full((3,), 0.5, requires_grad=True)
    outputs = list(run([Layer(0, Branches())], x, {0}, unseeded))
    del outputs[dropped]
    outputs[0].sum().backward()
    factor = 1.0 if dropped else math.cos(math.exp(0.5))
    torch.testing.assert_close(x.grad, torch.full((3,), 0.5).exp() * factor)


def test_second_forwards_see_and_leave_attributes_as_the_first_ones_did():
    """Of several micro-batches in flight each has its own count; it goes up once for each."""
    results = []
    for recomputed in (set(), {0}):
        module = Rising()
        leaves = [torch.ones(3, requires_grad=True) for _ in range(3)]
        outputs = [run([Layer(0, module)], leaf, recomputed, unseeded) for leaf in leaves]
        for out in reversed(outputs):
            out.sum().backward()
        assert module.calls == 3
        results.append(torch.stack([leaf.grad for leaf in leaves]))
    assert torch.equal(*results)
