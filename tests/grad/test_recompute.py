"""Recomputed layers give the same results as others, to the bit, and keep less memory."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from penstock.errors import RunError
from penstock.grad.recompute import Recomputing
from penstock.grad.split import input_grad, weight_grad

SHAPE = (6, 4, 5, 5)


@dataclass(frozen=True)
class Layer:
    """A layer's index and module."""

    index: int
    module: nn.Module


class Split(nn.Module):
    """Returns a dict with a tensor, a number, and one tensor twice."""

    def forward(self, x: Tensor) -> dict[str, Any]:
        return {"both": (x * 2, x.sin()), "count": 3, "again": [x, x]}


class Join(nn.Module):
    """Returns one tensor from that dict."""

    def forward(self, value: dict[str, Any]) -> Tensor:
        (a, b), (c, d) = value["both"], value["again"]
        assert c is d
        return a * b + value["count"] * c * d


class Add(nn.Module):
    """Changes its input in place."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.full((1,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        return x.add_(self.bias).mul_(2)


class Counted(nn.Module):
    """Its output depends on a buffer that counts its forwards; another of its buffers is replaced
    in each.
    """

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("last", torch.zeros(()), persistent=False)
        self.register_buffer("queue", torch.zeros(2**18))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.last = self.last + x.detach().mean()
        self.queue[int(self.calls)] = 1
        return x.sin() * self.calls.clone() + x * self.last + self.queue[:3].sum()


class Rising(nn.Module):
    """Its output depends on an attribute that counts its forwards."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen = torch.full((), float(self.calls))
        return (x * self.calls).sin()


class Square(torch.autograd.Function):
    """A user's autograd.Function that saves its input and its output."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x * x
        ctx.save_for_backward(x, y)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        x, y = ctx.saved_tensors
        return grad * (2 * x + 0 * y)


class Own(nn.Module):
    """Runs an autograd.Function."""

    def forward(self, x: Tensor) -> Tensor:
        return Square.apply(x.tanh())


class Checkpointed(nn.Module):
    """Uses torch's checkpoint inside."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Conv2d(4, 4, 1), nn.Tanh(), nn.Conv2d(4, 4, 1))

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=False)


def frozen() -> nn.Module:
    """Return a layer whose weight is not trained."""
    conv = nn.Conv2d(4, 4, 3, padding=1)
    conv.weight.requires_grad_(False)
    return conv


KINDS: dict[str, Callable[[], list[nn.Module]]] = {
    "conv": lambda: [nn.Conv2d(4, 4, 3, padding=1)],
    "norm": lambda: [nn.BatchNorm2d(4)],
    "relu in place": lambda: [nn.ReLU(inplace=True)],
    "tanh": lambda: [nn.Tanh()],
    "dropout": lambda: [nn.Dropout(0.3)],
    "structure": lambda: [Split(), Join()],
    "add in place": lambda: [Add()],
    "counted": lambda: [Counted()],
    "attribute": lambda: [Rising()],
    "rrelu": lambda: [nn.RReLU()],
    "own": lambda: [Own()],
    "checkpointed": lambda: [Checkpointed()],
    "frozen": lambda: [frozen()],
}


def run(layers, value, recomputed, call):
    """A single forward, whose backward runs some layers again."""
    return Recomputing(layers, recomputed).run(value, call)


def layers_of(kinds: list[str]) -> list[Layer]:
    """Return layers of these kinds in float64, numbered from 10."""
    torch.manual_seed(0)
    modules = [module.double() for kind in kinds for module in KINDS[kind]()]
    return [Layer(10 + index, module) for index, module in enumerate(modules)]


def unseeded(layer: Layer, value: Any) -> Any:
    """Run a layer."""
    return layer.module(value)


def seeded(layer: Layer, value: Any) -> Any:
    """Run a layer with the same random numbers each time, as a stage does."""
    torch.manual_seed(layer.index)
    return layer.module(value)


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


def test_a_forward_that_is_not_the_same_twice_is_refused():
    """Wrong gradients without an error would be worse."""

    class Growing(nn.Module):
        def __init__(self, how: str) -> None:
            super().__init__()
            self.how, self.runs = how, [0]

        def forward(self, x: Tensor) -> Tensor:
            self.runs[0] += 1
            if self.how == "fewer":
                return x.tanh() if self.runs[0] > 1 else x.tanh().sin()
            return x[: -self.runs[0]].tanh().sin()

    for how, message in (
        ("fewer", "it computed 1 of 2"),
        ("shape", "it computed one of shape .* for one of"),
    ):
        layers = [Layer(3, Growing(how)), Layer(4, nn.Identity())]
        out = run(layers, torch.randn(9, requires_grad=True), {3, 4}, unseeded)
        with pytest.raises(RunError, match=f"layers 3 to 4: recomputed .*{message}"):
            out.sum().backward()


def test_a_saved_tensor_that_is_changed_in_place_is_refused_as_in_torch():
    """torch rejects such a model without recomputation; with it there is no other check."""

    class Wrong(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x.exp()
            y.add_(1)  # exp's backward needs it as it was
            return y.sin()

    layers = [Layer(0, Wrong())]
    for recomputed, error in (
        (set(), "modified by an inplace operation"),
        ({0}, "layer 0: one of the variables .* modified by an inplace operation"),
    ):
        out = run(layers, torch.randn(3, requires_grad=True), recomputed, unseeded)
        with pytest.raises(RuntimeError, match=error):
            out.sum().backward()


def test_an_input_that_a_later_layer_changes_is_refused():
    """A later layer changes the segment's input through an alias, which the second forward would
    read.
    """
    layers = [Layer(0, nn.Tanh()), Layer(1, nn.Tanh())]
    x = torch.randn(3, requires_grad=True) * 1
    recomputing = Recomputing(layers, {0, 1})
    recomputing.run(x, unseeded)  # now it is known that they change nothing
    out = recomputing.run(x, unseeded)
    x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_a_layer_that_traverses_its_autograd_graph_is_refused():
    """Its saved tensors are needed before its forward is done."""

    class Penalty(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.autograd.grad(x.tanh().sum(), x, create_graph=True)[0]

    with pytest.raises(
        RunError, match="layer 5: the forward runs a backward through its own graph"
    ):
        run([Layer(5, Penalty())], torch.randn(3, requires_grad=True), {5}, unseeded)


@pytest.mark.parametrize("inside", [False, True], ids=["forward alone", "backward too"])
def test_mixed_precision_of_the_recompute_is_that_of_the_forward(inside):
    """A backward may run outside autocast or under another dtype; the second forward uses that of
    the first.
    """
    dtypes = []
    for recomputed in (set(), {0, 1, 2}):
        torch.manual_seed(0)
        layers = [Layer(0, nn.Linear(8, 8)), Layer(1, nn.Tanh()), Layer(2, nn.Linear(8, 8))]
        x = torch.randn(4, 8, requires_grad=True)
        with torch.autocast("cpu", torch.bfloat16):
            out = run(layers, x, recomputed, unseeded)
        assert out.dtype is torch.bfloat16
        with torch.autocast("cpu", torch.float16) if inside else nullcontext():
            out.float().sum().backward()
        dtypes.append([x.grad, *(p.grad for layer in layers for p in layer.module.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*dtypes, strict=True))


def test_without_gradients_layers_run_once_and_keep_nothing():
    """Evaluation has no overhead."""
    layers = layers_of(["conv", "tanh"])
    with torch.no_grad():
        out = run(layers, torch.randn(SHAPE, dtype=torch.float64), {10, 11}, seeded)
    assert out.grad_fn is None


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


class Scaled(nn.Module):
    """Several saved tensors, of which a list that no one restores changes one or the last."""

    def __init__(self, which: int) -> None:
        super().__init__()
        self.which, self.factor = which, [1.0]

    def forward(self, x: Tensor) -> Tensor:
        """Save the factor's products in order."""
        for place in range(3):
            factor = self.factor[0] if place == self.which else 1.0
            x = (x * factor).sin()
        return x


@pytest.mark.parametrize("which", [0, 1, 2])
def test_all_saved_tensors_are_compared_in_forwards_1_2_4_8_and_the_last_one_in_all(which):
    """What differs reaches the last one in general; here each is computed from the input."""

    class Separate(Scaled):
        def forward(self, x: Tensor) -> Tensor:
            outputs = []
            for place in range(3):
                factor = self.factor[0] if place == self.which else 1.0
                outputs.append((x * factor).sin())
            return torch.stack(outputs).sum(0)

    module = Separate(which)
    recomputing = Recomputing([Layer(2, module)], {2})
    refused, texts = [], []
    for number in range(1, 10):
        module.factor[0] = 1.0
        out = recomputing.run(torch.ones(4, requires_grad=True), unseeded)
        module.factor[0] = 2.0
        try:
            out.sum().backward()
        except RunError as error:
            texts.append(str(error))
            refused.append(number)
    assert refused == ([*range(1, 10)] if which == 2 else [1, 2, 4, 8])
    for text in texts:
        assert text.startswith("layer 2: recomputed for the backward, its forward differs from")
        assert "it computed other values, which differ by" in text


def test_second_forwards_are_not_compared_where_weights_may_change():
    """They may read newer weights; other shapes are refused all the same."""
    module = Scaled(2)
    recomputing = Recomputing([Layer(2, module), Layer(3, nn.Tanh())], {2})
    recomputing.allow_weight_changes()
    out = recomputing.run(torch.ones(4, requires_grad=True), unseeded)
    module.factor[0] = 2.0
    out.sum().backward()
    out = recomputing.run(torch.ones(4, requires_grad=True), unseeded)
    module.factor[0] = torch.ones(2, 4)
    with pytest.raises(
        RunError, match=r"layer 2: .* one of shape \(2, 4\) and torch.float32 for o"
    ):
        out.sum().backward()


@pytest.mark.parametrize("differs", [False, True])
def test_comparisons_are_read_later_where_the_host_must_not_wait(differs):
    """Each with its message; the backward goes on."""
    added = []
    checks = SimpleNamespace(deferring=True, add=lambda *check: added.append(check))
    module = Scaled(1)
    recomputing = Recomputing([Layer(2, module)], {2}, checks=checks)
    x = torch.ones(4, requires_grad=True)
    out = recomputing.run(x, unseeded)
    module.factor[0] = 2.0 if differs else 1.0
    out.sum().backward()
    assert added
    assert any(bool(failed) for failed, _ in added) is differs
    assert all("layer 2: recomputed" in text and "other values" in text for _, text in added)
    added.clear()
    checks.deferring = False
    module.factor[0] = 1.0
    recomputing.run(x, unseeded).sum().backward()
    assert added == []


@pytest.mark.parametrize("first_run", [True, False])
def test_a_segment_must_not_change_one_of_two_inputs_that_share_memory(first_run):
    """The second forward has each in a memory of its own; in whichever forward it begins."""

    class Adds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.changes = first_run

        def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
            if self.changes:
                pair[1].add_(1)
            return pair[0].sum() * pair[1].sum()

    module = Adds()
    recomputing = Recomputing([Layer(2, module), Layer(3, nn.Tanh())], {2, 3})

    def run_once() -> Tensor:
        base = torch.ones(4, requires_grad=True) * 1
        return recomputing.run((base[:3], base[1:]), unseeded)

    if not first_run:
        run_once().backward()
        module.changes = True
    with pytest.raises(RunError, match=r"^layers 2 to 3: two of the input tensors share memory"):
        run_once()
    separate = torch.ones(3, requires_grad=True)
    module.changes = False
    recomputing.run((separate * 1, separate * 1), unseeded).backward()
    assert separate.grad is not None


def test_inputs_are_copied_by_the_mode_of_the_layers():
    """What changes its input in training alone must have a copy there, and only there."""

    class Adds(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x.add_(1) if self.training else x + 1).sin()

    module = Adds()
    recomputing = Recomputing([Layer(0, module)], {0})
    for training in (False, True, False, True):
        module.train(training)
        for _ in range(2):
            x = torch.full((3,), 0.5, requires_grad=True)
            recomputing.run(x * 1, unseeded).sum().backward()
            torch.testing.assert_close(x.grad, torch.full((3,), 1.5).cos())


def test_a_tensor_that_occurs_twice_in_the_input_is_one_tensor_again():
    """And constants and structure are those of the first forward."""
    seen = []

    class Takes(nn.Module):
        def forward(self, value: dict[str, Any]) -> Tensor:
            seen.append(value)
            return (value["pair"][0] * value["pair"][1]).sin() * value["factor"]

    x = torch.ones(3, requires_grad=True)
    mask = torch.tensor([True, False, True])
    value = {"pair": (x * 2,) * 2, "factor": 3, "mask": mask, "none": None}
    run([Layer(0, Takes())], value, {0}, unseeded).sum().backward()
    first, second = seen
    assert first is value
    assert second.keys() == value.keys()
    assert second["pair"][0] is second["pair"][1]
    assert second["pair"][0].requires_grad
    assert not second["mask"].requires_grad
    assert (second["factor"], second["none"]) == (3, None)
    torch.testing.assert_close(x.grad, (4 * torch.ones(3)).cos() * 24)


def test_segments_begin_at_gaps_and_where_they_are_told_to():
    """Indices of other stages mean nothing here."""
    order = []

    def call(layer: Layer, value: Tensor) -> Tensor:
        order.append(layer.index)
        return value.exp()

    layers = [Layer(index, nn.Identity()) for index in range(3, 9)]
    recomputing = Recomputing(layers, {0, 3, 4, 5, 7, 8, 12}, {1, 5, 8, 30})
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


@pytest.mark.parametrize("behind", [False, True])
def test_an_op_that_fills_a_tensor_after_saving_it_is_not_interrupted(behind):
    """The noise of rrelu: with half of it the gradients would be wrong."""
    module = nn.RReLU()
    modules = [module, nn.Identity()] if behind else [module]
    layers = [Layer(index, part) for index, part in enumerate(modules)]
    grads = []
    for recomputed in (set(), set(range(len(layers)))):
        x = -torch.ones(50, requires_grad=True)
        leaf = x.detach().requires_grad_()
        run(layers, leaf, recomputed, seeded).sum().backward()
        grads.append(leaf.grad)
    assert torch.equal(*grads)
    assert len(set(grads[0].tolist())) > 40


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
