"""A split backward gives the gradients of a full backward, to the bit."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.grad.split_runs import Pair, Run, call, random
from torch import nn
from torch.nn import functional
from torch.nn.utils.parametrizations import spectral_norm, weight_norm
from torch.utils.checkpoint import checkpoint

from penstock.grad.split import PendingWeights, input_grad, weight_grad
from penstock.tracing.materialise import materialise
from penstock.tracing.traced_chain import chain
from penstock.zoo.catalogue import model, models


def same(first, second):
    """Return whether two gradients are equal to the bit, or both missing."""
    if first is None or second is None:
        return first is second
    return (
        torch.equal(first, second)
        if not first.is_sparse
        else torch.equal(first.to_dense(), second.to_dense())
    )


def assert_split_equals_whole(module, forward, inputs, keep=None):
    """Check gradients of inputs and weights to the bit; return the split run."""
    whole, parts = Run.of(module, forward, inputs, keep), Run.of(module, forward, inputs, keep)
    expected, grads = whole.whole(), parts.split()
    assert [i for i, pair in enumerate(zip(expected, grads, strict=True)) if not same(*pair)] == []
    ours, theirs = parts.weight_grads(), whole.weight_grads()
    assert [name for name in theirs if not same(ours[name], theirs[name])] == []
    return parts


SMALL = {
    "gpt": {"layers": 2, "width": 16, "heads": 2, "tokens": 6, "vocabulary": 11, "dropout": 0.1},
    "mlp": {"layers": 3},
}


#: Whose layers pass on several values each; tests/conformance/models.py has them.
OTHERS = {"gnmt", "gnmt16", "unet"}


def layers_of_the_zoo():
    """Return every layer of the small models that differs from the others in its repr, with a name
    and a real input.
    """
    layers = {}
    for name in sorted(models().keys() - OTHERS):
        traced = chain(model(name, device="meta", **SMALL.get(name, {"classes": 3, "image": 32})))
        shape = {"gpt": (2, 6), "mlp": (2, 64)}.get(name, (2, 3, 32, 32))
        value = torch.empty(
            shape, dtype=torch.int64 if name == "gpt" else torch.float32, device="meta"
        )
        for index, (layer, module) in enumerate(zip(traced, traced.modules, strict=True)):
            # The largest linear maps only differ by their sizes, and cost most of the time.
            if not (isinstance(module, nn.Linear) and module.weight.numel() > 10**7):
                layers.setdefault(
                    f"{module!r} of {tuple(value.shape)}",
                    (f"{name}:{layer.name}", traced, index, value),
                )
            value = module(value)
    return {name: (traced, index, value) for name, traced, index, value in layers.values()}


def test_split_equals_whole_on_every_layer_of_the_zoo():
    """Schedules that split the backward must train like those that do not. The models are made here
    and not while tests are collected, by every worker.
    """
    layers = layers_of_the_zoo()
    assert len(layers) > 50
    for name, (traced, index, value) in layers.items():
        (module,) = materialise(traced, [index], torch.device("cpu"), 0)
        layer_input = (
            random(*value.shape)
            if value.is_floating_point()
            else torch.arange(value.numel()).reshape(value.shape) % 11
        )
        try:
            assert_split_equals_whole(module, call, [layer_input])
        except AssertionError as error:
            error.add_note(f"layer {name}")
            raise


LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], Callable[..., Any]]] = {
    "linear": (lambda: nn.Linear(4, 3), (5, 4), call),
    "linear of tokens": (lambda: nn.Linear(4, 3), (2, 5, 4), call),
    "linear without bias": (lambda: nn.Linear(4, 3, bias=False), (5, 4), call),
    "bilinear": (lambda: nn.Bilinear(4, 4, 3), (5, 4), lambda m, x: m(x, x.exp())),
    "convolution": (lambda: nn.Conv2d(3, 4, 3, padding=1), (2, 3, 6, 6), call),
    "grouped convolution": (lambda: nn.Conv2d(4, 4, 3, groups=2, stride=2), (2, 4, 7, 7), call),
    "convolution of 1 dimension": (lambda: nn.Conv1d(3, 4, 3), (2, 3, 8), call),
    "transposed convolution": (lambda: nn.ConvTranspose2d(3, 4, 3), (2, 3, 4, 4), call),
    "batch norm": (lambda: nn.BatchNorm2d(3), (2, 3, 4, 4), call),
    "batch norm in evaluation": (lambda: nn.BatchNorm2d(3).eval(), (2, 3, 4, 4), call),
    "layer norm": (lambda: nn.LayerNorm(4), (2, 3, 4), call),
    "group norm": (lambda: nn.GroupNorm(2, 4), (2, 4, 3, 3), call),
    "RMS norm": (lambda: nn.RMSNorm(4), (2, 3, 4), call),
    "PReLU": (lambda: nn.PReLU(4), (3, 4), call),
    "embedding beside a path": (
        lambda: nn.Embedding(5, 4),
        (3, 4),
        lambda m, x: x * m(torch.tensor([1, 4, 1])),
    ),
    "sparse embedding": (
        lambda: nn.Embedding(5, 4, sparse=True),
        (3, 4),
        lambda m, x: x * m(torch.tensor([1, 4, 1])),
    ),
    "attention": (
        lambda: nn.MultiheadAttention(4, 2, dropout=0.1, batch_first=True),
        (2, 3, 4),
        lambda m, x: m(x, x, x),
    ),
    "fused attention": (
        lambda: nn.Linear(4, 12),
        (2, 5, 4),
        lambda m, x: functional.scaled_dot_product_attention(
            *m(x).unsqueeze(1).chunk(3, -1), is_causal=True
        ),
    ),
    "transformer layer": (
        lambda: nn.TransformerEncoderLayer(4, 2, 8, batch_first=True),
        (2, 3, 4),
        call,
    ),
    "LSTM": (lambda: nn.LSTM(4, 5, 2, batch_first=True), (2, 3, 4), lambda m, x: m(x)[0]),
    "LSTM with its states": (
        lambda: nn.LSTM(4, 5, batch_first=True),
        (2, 3, 4),
        lambda m, x: (m(x)[0], *m(x)[1]),
    ),
    "GRU both ways": (lambda: nn.GRU(4, 5, bidirectional=True), (3, 2, 4), lambda m, x: m(x)[0]),
    "LSTM cell": (lambda: nn.LSTMCell(4, 4), (2, 4), lambda m, x: m(x)),
    "weight norm": (lambda: weight_norm(nn.Linear(4, 3)), (2, 4), call),
    "spectral norm": (lambda: spectral_norm(nn.Linear(4, 3)), (2, 4), call),
    "no weights": (lambda: nn.Sequential(nn.Tanh(), nn.Dropout(0.3)), (3, 4), call),
    "identity": (nn.Identity, (3, 4), call),
}


@pytest.mark.parametrize("name", LAYERS)
def test_split_equals_whole_on_layers_of_torch(name):
    """Nodes lead to weights in many ways: transposes, expansions, norms of weights, fused kernels."""
    make, shape, forward = LAYERS[name]
    torch.manual_seed(0)
    assert_split_equals_whole(make(), forward, [random(*shape)])


def in_place(m, x):
    """Parts of an activation are overwritten, one of them by a weight."""
    h = m.a(x).clone()
    h[:, 1:3].mul_(2)
    h[0].copy_(m.b.bias)
    h[1].add_(m.b.bias)
    return h.relu_()


def doubled(m, x):
    """Hooks on an activation and on the output change gradients on their way."""
    h = m.a(x)
    h.register_hook(lambda grad: 2 * grad)
    out = m.b(h)
    out.register_hook(lambda grad: 3 * grad)
    return out


class Scaled(torch.autograd.Function):
    """x times a weight vector. Its context has an attribute `variable`, like nodes that accumulate
    a leaf's gradient.
    """

    @staticmethod
    def forward(ctx, x, weight):
        """x * weight."""
        ctx.save_for_backward(x, weight)
        ctx.variable = 3
        return x * weight

    @staticmethod
    def backward(ctx, grad):
        """Both products."""
        x, weight = ctx.saved_tensors
        return grad * weight, (grad * x).sum(0)


class Cut(torch.autograd.Function):
    """A function without a gradient."""

    @staticmethod
    def forward(ctx, x):
        """x."""
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        """Return no gradient."""


def checkpointed(m, x):
    """Two maps with dropout between, recomputed in the backward."""
    return checkpoint(lambda h: m.b(functional.dropout(m.a(h), 0.5)), x, use_reentrant=False)


GRAPHS: dict[str, Callable[..., Any]] = {
    "a residual": lambda m, x: x + m.b(m.a(x).relu()),
    "residuals one in another": lambda m, x: (x + m.a(x)) * (x + m.b(x + m.a(x))),
    "several outputs": lambda m, x: (m.a(x), m.b(x), x.exp()),
    "an output twice": lambda m, x: [m.a(x)] * 2,
    "the input as output": lambda m, x: (x, m.a(x)),
    "a view of the input as output": lambda m, x: (x.view(-1), m.a(x)),
    "a weight as output": lambda m, x: (m.a.weight, m.a(x)),
    "pieces": lambda m, x: torch.mul(*m.a(x).chunk(2, -1)).exp(),
    "an unused piece": lambda m, x: m.a(x).chunk(2, -1)[1],
    "an output that no input reaches": lambda m, x: (m.a(x), m.b(torch.ones(2, 4))),
    "no output that an input reaches": lambda m, x: m.b(torch.ones(2, 4)),
    "a sum with a weight of its own shape": lambda m, x: x[:4] + m.a.weight + m.b.weight,
    "a weight made of weights": lambda m, x: functional.linear(
        x, m.a.weight @ m.b.weight, m.a.bias
    ),
    "works in place": in_place,
    "hooks on activations": doubled,
    "a function of the user's": lambda m, x: Scaled.apply(m.a(x), m.b.bias).exp(),
    "a function that returns no gradient": lambda m, x: (Cut.apply(m.a(x)), m.b(x)),
    "nothing but a function that returns no gradient": lambda m, x: Cut.apply(m.a(x)),
    "checkpoints": checkpointed,
    "QR, with two outputs": lambda m, x: torch.linalg.qr(m.a(x)),
}


@pytest.mark.parametrize("name", GRAPHS)
def test_split_equals_whole_on_graphs_of_all_kinds(name):
    """Users write whatever autograd allows inside a layer. Regression: hooks on activations took
    effect twice.
    """
    torch.manual_seed(0)
    assert_split_equals_whole(Pair(), GRAPHS[name], [random(6, 4)])


@pytest.mark.parametrize(
    "forward",
    [
        lambda m, x: m.a(m.a(x).relu()),
        lambda m, x: m.a(m.b(m.a(m.b(x)))),
        lambda m, x: m.a(x) + m.a(2 * x),
        lambda m, x: (m.a(x), m.a(x.exp())),
        lambda m, x: functional.linear(m.a(x), m.a.weight.t(), m.b.bias),
        lambda m, x: m.a(x) + m.a(torch.ones(6, 4)),
        lambda m, x: (m.a(m.a(x)), m.b(torch.ones(2, 4))),
    ],
    ids=[
        "in series",
        "by turns",
        "side by side",
        "in two outputs",
        "and transposed",
        "on and off the path",
        "beside an output that no input reaches",
    ],
)
def test_a_weight_used_twice_gets_the_sum_of_both_uses(forward):
    """Tied layers in one stage; the order of the sum may differ, so equality is to float tolerance."""
    torch.manual_seed(0)
    module = Pair()
    whole, parts = (Run.of(module, forward, [random(6, 4)]) for _ in range(2))
    for expected, split_grad in zip(whole.whole(), parts.split(), strict=True):
        assert torch.allclose(expected, split_grad)
    for name, grad in whole.weight_grads().items():
        assert (grad is None) == (parts.weight_grads()[name] is None)
        assert grad is None or torch.allclose(grad, parts.weight_grads()[name])


@pytest.mark.parametrize("keep", [(True, False), (False, True), (False, False)])
@pytest.mark.parametrize(
    "forward",
    [
        lambda m, x: (m.a(x), m.b(x)),
        lambda m, x: (m.a(x), m.b(x).sum()),
        lambda m, x: (h := m.a(x), m.b(h)),
    ],
    ids=["apart", "a scalar", "in a row"],
)
def test_unused_outputs_have_no_part_in_the_backward(forward, keep):
    """The next stage sends None for them. Regression: a scalar among them was treated as a loss,
    with gradient 1.
    """
    assert_split_equals_whole(Pair(), forward, [random(3, 4)], keep)


def test_a_single_scalar_without_a_gradient_is_a_loss():
    """The last stage's output is the loss, for which no gradient is sent."""
    module, x = Pair(), random(3, 4).requires_grad_()
    twin, y = copy.deepcopy(module), x.detach().clone().requires_grad_()
    module.b(module.a(x)).pow(2).mean().backward()
    grads, pending = input_grad([twin.b(twin.a(y)).pow(2).mean()], [None], [y])
    weight_grad(pending)
    assert torch.equal(grads[0], x.grad)
    assert all(
        torch.equal(p.grad, q.grad)
        for p, q in zip(module.parameters(), twin.parameters(), strict=True)
    )


def test_of_several_outputs_those_without_a_gradient_have_no_part():
    """Also numbers: only a single one is a loss."""
    weight, x = nn.Parameter(torch.tensor(2.0)), torch.tensor(3.0, requires_grad=True)
    outputs = [x * weight, x * weight * weight]
    grads, pending = input_grad(outputs, [None, torch.tensor(10.0)], [x])
    weight_grad(pending)
    assert (grads[0].item(), weight.grad.item()) == (40.0, 120.0)
    assert input_grad([], [], [x]) == ([None], PendingWeights())
    assert input_grad([torch.stack([x * weight])], [None], [x]) == ([None], PendingWeights())


def test_inputs_that_reach_no_output_have_no_gradient():
    """A mask or an encoder's state may be unused by a stage; its gradient is None, not zeros."""
    run = assert_split_equals_whole(
        Pair(),
        lambda m, x, y, z: m.a(x) * z,
        [random(3, 4), random(3, 4, seed=1), random(3, 4, seed=2)],
    )
    grads, _ = input_grad([run.module.a(run.inputs[0])], [torch.ones(3, 4)], run.inputs)
    assert [grad is None for grad in grads] == [False, True, True]


def test_without_inputs_that_require_gradients_all_work_is_in_the_weight_part():
    """The first stage takes data or tokens: its I is empty, and its W does all the work."""
    module = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    run = Run.of(module, call, [torch.tensor([[1, 2, 6]])])
    assert run.inputs == []
    grads, pending = input_grad(run.roots, run.grads, [])
    assert grads == []
    assert set(run.weight_grads().values()) == {None}
    weight_grad(pending)
    whole = Run.of(module, call, [torch.tensor([[1, 2, 6]])])
    whole.whole()
    assert all(same(grad, whole.weight_grads()[name]) for name, grad in run.weight_grads().items())


@pytest.mark.parametrize(
    "frozen",
    [
        ("a.weight",),
        ("a.bias", "b.bias"),
        ("b.weight", "b.bias"),
        ("a.weight", "a.bias", "b.weight", "b.bias"),
    ],
)
def test_frozen_weights_get_no_gradient(frozen):
    """Fine-tuning trains some layers; gradients still flow through the others."""
    module = Pair()
    for name in frozen:
        module.get_parameter(name).requires_grad_(False)
    run = assert_split_equals_whole(module, lambda m, x: m.b(m.a(x).relu()), [random(3, 4)])
    assert {name for name, grad in run.weight_grads().items() if grad is None} == set(frozen)


def test_the_input_part_computes_no_weight_gradients():
    """W may come much later, after other micro-batches; until then `.grad` must not change."""
    run = Run.of(Pair(), lambda m, x: m.b(m.a(x)), [random(3, 4)])
    input_grad(run.roots, run.grads, run.inputs)
    assert set(run.weight_grads().values()) == {None}


def test_micro_batches_add_up_whatever_runs_between_their_two_parts():
    """Zero-bubble schedules run W after the forward and I of later micro-batches, and out of order."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.BatchNorm1d(4), nn.Linear(4, 2))
    twin = copy.deepcopy(module)
    inputs = [random(3, 4, seed=m) for m in range(4)]
    for x in inputs:
        twin(x.requires_grad_()).pow(2).mean().backward()
    pending, order = {}, []
    for m, x in enumerate(inputs):
        leaf = x.detach().clone().requires_grad_()
        grads, pending[m] = input_grad([module(leaf).pow(2).mean()], [None], [leaf])
        assert torch.equal(grads[0], x.grad)
        if m % 2:
            for earlier in (m - 1, m):
                weight_grad(pending.pop(earlier))
                order.append(earlier)
    assert order == [0, 1, 2, 3]
    for name, parameter in twin.named_parameters():
        assert torch.equal(parameter.grad, module.get_parameter(name).grad), name


def test_hooks_on_weights_run_once():
    """Libraries for gradient clipping and sharding register hooks on weights; a full backward runs
    them once.
    """
    calls = []

    def forward(m, x):
        for name, parameter in m.named_parameters():
            parameter.register_hook(lambda grad, name=name: calls.append(name) or 2 * grad)
        return m.b(m.a(x))

    assert_split_equals_whole(Pair(), forward, [random(3, 4)])
    assert sorted(calls) == sorted(2 * ["a.weight", "a.bias", "b.weight", "b.bias"])


def test_hooks_of_modules_take_effect_once():
    """A full backward hook may change the gradients."""
    module = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    module[0].register_full_backward_hook(lambda _module, given, _arrived: (2 * given[0],))
    module[2].register_full_backward_pre_hook(lambda _module, arrived: (3 * arrived[0],))
    assert_split_equals_whole(module, call, [random(3, 4)])


def test_gradients_share_no_memory_with_each_other_or_with_what_arrived():
    """An in-place change of one gradient must change no other, nor a gradient that is still being
    sent.
    """
    run = Run.of(Pair(), lambda m, x: x + m.a.bias + m.b.bias + m.a.weight, [random(4, 4)])
    run.split()
    grads = [grad for grad in (*run.weight_grads().values(), run.grads[0]) if grad is not None]
    assert len({grad.untyped_storage().data_ptr() for grad in grads}) == len(grads) == 4
