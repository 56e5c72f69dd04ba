"""What a recomputation must repeat, and what is refused: other values, inputs changed in place."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.grad.recomputed_layers import Layer, run, unseeded
from torch import Tensor, nn

from penstock.errors import RunError
from penstock.grad.recompute import Recomputing


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


class AddsOne(nn.Module):
    """A layer that changes its input in place."""

    def forward(self, x: Tensor) -> Tensor:
        """Add 1."""
        return x.add_(1)


class Exponential(nn.Module):
    """A layer that saves its output."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the exponential."""
        return x.exp()


@pytest.mark.parametrize("recomputed", [set(), {0}])
def test_a_saved_output_that_a_later_layer_changes_is_refused_as_in_torch(recomputed):
    """That layer is not recomputed, and does not run again."""
    layers = [Layer(0, Exponential()), Layer(1, AddsOne())]
    out = run(layers, torch.ones(3, requires_grad=True), recomputed, unseeded)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


class Spoiling(torch.autograd.Function):
    """A function whose backward changes in place what it has saved."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Double."""
        ctx.save_for_backward(x * 1)
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        """Double the gradient."""
        ctx.saved_tensors[0].mul_(2)
        return grad * 2


class Spoiled(nn.Module):
    """A layer of that function."""

    def forward(self, x: Tensor) -> Tensor:
        """Run it."""
        return Spoiling.apply(x)


@pytest.mark.parametrize("recomputed", [set(), {0}])
def test_a_recomputed_tensor_that_a_backward_changes_is_refused_in_the_next_one(recomputed):
    """As in torch; the first backward has run."""
    x = torch.ones(3, requires_grad=True)
    out = run([Layer(0, Spoiled())], x, recomputed, unseeded).sum()
    out.backward(retain_graph=True)
    assert x.grad is not None
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward()


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
    recomputing = Recomputing(
        [Layer(1, module), Layer(2, module), Layer(3, nn.Tanh())], {1, 2}, {2}
    )
    recomputing.allow_weight_changes()
    out = recomputing.run(torch.ones(4, requires_grad=True), unseeded)
    module.factor[0] = 2.0
    out.sum().backward()
    module.factor[0] = 1.0
    out = recomputing.run(torch.ones(4, requires_grad=True), unseeded)
    module.factor[0] = torch.ones(2, 4)
    with pytest.raises(
        RunError, match=r"layer 2: .* one of shape \(2, 4\) and torch.float32 for o"
    ):
        out.sum().backward()


def test_a_saved_tensor_of_another_dtype_is_refused_in_every_forward():
    """Also in those whose saved tensors are not compared."""

    class Cast(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.dtypes = [torch.float32]

        def forward(self, x: Tensor) -> Tensor:
            return x.to(self.dtypes[0]).exp().float().sin()

    module = Cast()
    recomputing = Recomputing([Layer(2, module)], {2})
    for _ in range(3):
        module.dtypes[0] = torch.float32
        out = recomputing.run(torch.ones(4, requires_grad=True), unseeded)
        module.dtypes[0] = torch.float64
        with pytest.raises(RunError, match=r"one of shape \(4,\) and torch.float64 for one of"):
            out.sum().backward()


@pytest.mark.parametrize("saved_between", [2, 12])
def test_a_tensor_that_is_changed_after_it_was_saved_is_refused_for_the_change(saved_between):
    """Before or after its fingerprint is due, the two forwards do not differ."""

    class Late(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            early = x.exp()
            later = early
            for _ in range(saved_between):
                later = later.sin()
            early.add_(1)
            return later.sin()

    out = run([Layer(0, Late())], torch.ones(3, requires_grad=True), {0}, unseeded)
    with pytest.raises(RunError, match="modified by an inplace operation"):
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


@pytest.mark.parametrize("changed", [0, 1])
def test_each_input_that_a_layer_changes_in_place_is_copied(changed):
    """In every forward, whichever of several inputs it is."""

    class Adds(nn.Module):
        def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
            pair[changed].add_(1)
            return (pair[0] * pair[1]).sin()

    recomputing = Recomputing([Layer(0, Adds())], {0})
    for _ in range(3):
        leaves = [torch.full((3,), value, requires_grad=True) for value in (0.5, 2.0)]
        recomputing.run(tuple(leaf * 1 for leaf in leaves), unseeded).sum().backward()
        first, second = (0.5, 3.0) if changed else (1.5, 2.0)
        factor = torch.full((3,), first * second).cos()
        torch.testing.assert_close(leaves[0].grad, factor * second)
        torch.testing.assert_close(leaves[1].grad, factor * first)


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


@pytest.mark.parametrize("wants_grad", [False, True])
def test_a_restored_input_wants_a_gradient_if_the_first_one_did(wants_grad):
    """A layer may do other things with it, and kernels save other tensors."""
    flags = []
    module = nn.Linear(3, 3)
    module.register_forward_pre_hook(lambda _, inputs: flags.append(inputs[0].requires_grad))
    x = torch.ones(2, 3, requires_grad=wants_grad)
    run([Layer(0, module)], x, {0}, unseeded).sum().backward()
    assert flags == [wants_grad] * 2


class Picking(nn.Module):
    """A layer that picks elements by indices, which no one restores."""

    def __init__(self) -> None:
        super().__init__()
        self.indices = [torch.tensor([0, 1])]

    def forward(self, x: Tensor) -> Tensor:
        """Return the exponentials of the elements."""
        return x.gather(0, self.indices[0]).exp()


def test_indices_that_differ_are_refused_although_the_values_are_equal():
    """Gradients would go to other elements."""
    module = Picking()
    out = run([Layer(0, module)], torch.ones(4, requires_grad=True), {0}, unseeded)
    module.indices[0] = torch.tensor([2, 3])
    with pytest.raises(RunError, match="it computed other values"):
        out.sum().backward()


class FailingOnce(nn.Module):
    """A layer that fails in its second call."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = [0]

    def forward(self, x: Tensor) -> Tensor:
        """Return the exponential, unless this is the second call."""
        self.calls[0] += 1
        if self.calls[0] == 2:
            raise KeyError("second")
        return x.exp()


def test_a_backward_after_a_failed_recomputation_is_refused():
    """The input of the segment is gone; autograd may be asked to go on nevertheless."""
    x = torch.ones(2, requires_grad=True)
    output = run([Layer(4, FailingOnce())], x, {4}, unseeded).sum()
    with pytest.raises(KeyError, match="second"):
        output.backward(retain_graph=True)
    with pytest.raises(
        RunError, match=r"^layer 4: .* of the tensors saved then it computed nothing"
    ):
        output.backward()
    assert x.grad is None
