"""What each part of a split backward computes, and what memory it holds."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from tests.grad.split_runs import Pair, Run, call, random
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from penstock.grad.split import input_grad, weight_grad


class Counted(torch.autograd.Function):
    """The identity; counts its backward calls by name."""

    @staticmethod
    def forward(ctx, x, calls, name):
        """x."""
        ctx.calls, ctx.name = calls, name
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        """The gradient."""
        ctx.calls[ctx.name] = ctx.calls.get(ctx.name, 0) + 1
        return grad, None, None


def test_no_node_between_weights_runs_twice():
    """Otherwise a split backward would cost up to twice a full one."""
    calls: dict[str, int] = {}

    def forward(m, x):
        h = Counted.apply(x, calls, "first")
        h = Counted.apply(m.a(h), calls, "between")
        h = h + Counted.apply(m.b(h), calls, "in a branch")
        return Counted.apply(h, calls, "last")

    run = Run.of(Pair(), forward, [random(3, 4)])
    _, pending = input_grad(run.roots, run.grads, run.inputs)
    assert calls == {"first": 1, "between": 1, "in a branch": 1, "last": 1}
    weight_grad(pending)
    assert calls == {"first": 1, "between": 1, "in a branch": 1, "last": 1}


def test_nodes_that_lead_only_to_weights_run_only_in_the_weight_part():
    """The path from a layer to a weight that is computed from others can be deferred to W."""
    calls: dict[str, int] = {}

    def forward(m, x):
        weight = Counted.apply(m.a.weight * 2, calls, "weight")
        return functional.linear(Counted.apply(x, calls, "input"), weight)

    run = Run.of(Pair(), forward, [random(3, 4)])
    _, pending = input_grad(run.roots, run.grads, run.inputs)
    assert calls == {"input": 1}
    weight_grad(pending)
    assert calls == {"input": 1, "weight": 1}


def test_the_input_part_leaves_the_weight_gradients_of_a_layer_undone():
    """The purpose of the split: a linear layer's I is one matrix product, its W the other."""

    def products(job):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
            result = job()
        return sum(
            event.count for event in profiler.key_averages() if event.key == "aten::mm"
        ), result

    run = Run.of(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)), call, [random(3, 4)])
    inputs, (_, pending) = products(lambda: input_grad(run.roots, run.grads, run.inputs))
    weights, _ = products(lambda: weight_grad(pending))
    assert (inputs, weights) == (2, 2)


class Holder:
    """An object that lives as long as the node that refers to it."""


class Holding(torch.autograd.Function):
    """The identity; its node refers to a `Holder`."""

    @staticmethod
    def forward(ctx, x, holders):
        """x."""
        ctx.holder = Holder()
        holders.append(weakref.ref(ctx.holder))
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        """The gradient."""
        return grad, None


@pytest.mark.parametrize(
    "forward",
    [
        lambda m, x, holders: Holding.apply(m.b(Holding.apply(m.a(x), holders)), holders),
        lambda m, x, holders: Holding.apply(m.a(Holding.apply(m.a(x), holders)), holders),
        lambda m, x, holders: (
            Holding.apply(m.a(x), holders),
            Holding.apply(m.b(torch.ones(2, 4)), holders),
        ),
    ],
    ids=["in series", "used twice", "off the path"],
)
@pytest.mark.parametrize("finished", [True, False], ids=["after W", "W never came"])
def test_nothing_keeps_the_graph_once_the_weight_part_is_done_or_dropped(forward, finished):
    """Activations are most of the memory; they must be freed at once, not by the garbage collector."""
    holders: list[weakref.ref[Holder]] = []
    gc.collect()
    gc.disable()
    try:
        run = Run.of(Pair(), lambda m, x: forward(m, x, holders), [random(3, 4)])
        _, pending = input_grad(run.roots, run.grads, run.inputs)
        run.roots.clear()
        assert any(ref() is not None for ref in holders)
        if finished:
            weight_grad(pending)
            assert pending.groups == []
        else:
            del pending
        assert [ref() is None for ref in holders] == [True, True]
    finally:
        gc.enable()


def test_the_weight_part_frees_what_the_graph_has_saved():
    """Also where the caller still has the output."""
    run = Run.of(Pair(), lambda m, x: m.b(m.a(x)), [random(3, 4)])
    _, pending = input_grad(run.roots, run.grads, run.inputs)
    weight_grad(pending)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        torch.autograd.grad(run.roots, run.inputs, run.grads)


def test_an_error_in_the_backward_leaves_no_hook_behind():
    """The step is lost, but the next one must not be affected."""

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            raise ValueError("this backward fails")

    module, x = Pair(), random(3, 4).requires_grad_()
    h = Fails.apply(x)
    out = module.a(h)
    with pytest.raises(ValueError, match="this backward fails"):
        input_grad([out], [torch.ones(3, 4)], [x])
    before = torch.autograd.grad(out, h, torch.ones(3, 4), retain_graph=True)[0]
    assert torch.equal(before, torch.ones(3, 4) @ module.a.weight)


def test_an_error_in_the_weight_part_leaves_no_gradients_behind():
    """Those that were captured at a node would replace others that arrive there later."""
    x, weight = torch.ones(2, requires_grad=True), nn.Parameter(torch.ones(2))
    output = x + weight

    def fail(grad):
        raise KeyError

    _, pending = input_grad([output], [torch.ones(2)], [x])
    hook = weight.register_hook(fail)
    with pytest.raises(KeyError):
        weight_grad(pending)
    hook.remove()
    (grad,) = torch.autograd.grad(output, [weight], torch.full((2,), 5.0))
    assert grad.tolist() == [5.0, 5.0]


def test_reentrant_checkpoints_are_refused_by_torch_with_the_alternative():
    """They do not support a partial backward; torch's message names the other kind, which does."""
    run = Run.of(
        Pair(),
        lambda m, x: checkpoint(lambda h: m.b(m.a(h)), x, use_reentrant=True),
        [random(3, 4)],
    )
    with pytest.raises(RuntimeError, match="use_reentrant=False"):
        run.split()


def test_without_a_gradient_of_any_output_inputs_and_weights_have_none():
    """A stage may have outputs that nothing behind it uses."""
    x, weight = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)
    grads, pending = input_grad([x * weight, x + weight], [None, None], [x])
    assert grads == [None]
    weight_grad(pending)
    assert weight.grad is None


class TwoProducts(torch.autograd.Function):
    """x times a weight, and x times its square, of one node."""

    @staticmethod
    def forward(ctx, x, weight):
        """Return both."""
        ctx.save_for_backward(x, weight)
        return x * weight, x * weight.square()

    @staticmethod
    def backward(ctx, first, second):
        """Return the gradients of both inputs."""
        x, weight = ctx.saved_tensors
        return first * weight + second * weight.square(), first * x + second * 2 * weight * x


@pytest.mark.parametrize("used", [(0,), (1,), (0, 1)], ids=str)
def test_gradients_of_all_outputs_of_a_node_reach_its_weights(used):
    """Each by its place among the outputs; those that are not used have none."""
    grads = []
    for split in (False, True):
        x = torch.tensor([2.0, 3.0], requires_grad=True)
        weight = torch.tensor([5.0, 7.0], requires_grad=True)
        products = TwoProducts.apply(x, weight)
        outputs = [products[place] * (place + 1) for place in used]
        arrived = [torch.tensor([1.0, 10.0]) for _ in used]
        if split:
            (x_grad,), pending = input_grad(outputs, arrived, [x])
            weight_grad(pending)
        else:
            torch.autograd.backward(outputs, arrived)
            x_grad = x.grad
        grads.append((x_grad.tolist(), weight.grad.tolist()))
    assert grads[0] == grads[1]
