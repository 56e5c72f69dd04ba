"""`Pipe` with `loss=`: its loss in the caller's graph, and losses without gradients."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from tests.pipe.scheduled import MODES, batch, grads_of, make_layers, make_pipe
from torch import nn
from torch.nn import functional

import penstock as ps
from penstock.errors import RunError, SettingError
from penstock.pipe.pipe import Pipe


@pytest.mark.parametrize("threads", [False, True])
def test_gradients_are_handed_on_as_autograd_does(threads):
    """Hooks see the whole batch's gradient once, times that of the loss; frozen layers get none."""
    plain, pipe = make_layers(), make_pipe(threads)
    x, y = batch(9)
    seen: list[torch.Tensor] = []
    pipe[0].weight.register_hook(seen.append)
    for model in (plain, pipe):
        model[2].weight.requires_grad_(False)
    for model, loss in ((plain, functional.mse_loss(plain(x), y)), (pipe, pipe(x, y))):
        (loss.exp() + model[0].weight.sum()).backward()
    torch.testing.assert_close(grads_of(pipe), grads_of(plain))
    assert pipe[2].weight.grad is None
    # One call of the hook, with both terms of the sum.
    torch.testing.assert_close(seen, [plain[0].weight.grad])
    for model in (plain, pipe):  # thawed between batches
        model[2].weight.requires_grad_()
    functional.mse_loss(plain(x), y).backward()
    pipe(x, y).backward()
    torch.testing.assert_close(grads_of(pipe), grads_of(plain))


def test_autograd_grad_and_backward_with_inputs_leave_the_rest_alone():
    """The gradients wait in the node; nothing is in `.grad` before the caller says so."""
    plain, pipe = make_layers(), make_pipe(None)
    x, y = batch(8)
    loss = pipe(x, y)
    assert grads_of(pipe) == [None] * 8
    weights = [pipe[0].weight, pipe[6].bias]
    expected = torch.autograd.grad(
        functional.mse_loss(plain(x), y), [plain[0].weight, plain[6].bias]
    )
    torch.testing.assert_close(torch.autograd.grad(loss, weights), expected)
    pipe(x, y).backward(inputs=[pipe[0].weight])
    assert [grad is None for grad in grads_of(pipe)] == [False] + [True] * 7


class Unused(nn.Linear):
    """A layer with a weight that it does not use."""

    def __init__(self) -> None:
        super().__init__(6, 6, dtype=torch.float64)
        self.spare = nn.Parameter(torch.ones(2))


@pytest.mark.parametrize("scale", [0.25, 1.0, 4.0])
def test_gradients_are_multiplied_by_that_of_the_loss(scale):
    """A weight that is not used has none."""
    layers = nn.Sequential(Unused(), nn.Tanh())
    plain, pipe = copy.deepcopy(layers), make_pipe(None, layers, balance=[1, 1])
    x, y = batch(8)
    (functional.mse_loss(plain(x), y) * scale).backward()
    (pipe(x, y) * scale).backward()
    torch.testing.assert_close(pipe[0].weight.grad, plain[0].weight.grad)
    assert pipe[0].spare.grad is None


def test_a_loss_has_one_backward_and_no_second_derivative():
    """As without loss=."""
    pipe = make_pipe(None)
    loss = pipe(*batch(8))
    with pytest.raises(RunError, match="create_graph"):
        torch.autograd.grad(loss, [pipe[0].weight], create_graph=True)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="a second time"):
        loss.backward()


def test_outputs_and_losses_without_gradients():
    """In evaluation and under no_grad the Pipe is the plain model; in training it says what to do."""
    plain, pipe = make_layers(), make_pipe(None)
    x, y = batch(8)
    with pytest.raises(SettingError, match=r"call model\(input, target\)"):
        pipe(x)
    with torch.no_grad():
        torch.testing.assert_close(pipe(x), plain(x))
        loss = pipe(x, y)
    torch.testing.assert_close(loss, functional.mse_loss(plain(x), y).detach())
    assert not loss.requires_grad
    torch.testing.assert_close(pipe.eval()(x), plain(x))


def test_a_loss_without_gradients_is_one_number_too():
    """Of whatever shape; several numbers, or one of Python, are refused as in training."""
    x, y = batch(8)

    def evaluate(loss):
        with torch.no_grad():
            return make_pipe(None, loss=loss)(x, y)

    assert evaluate(lambda output, target: functional.mse_loss(output, target)[None]).shape == ()
    for loss in (lambda output, target: output, lambda output, target: 3.0):
        with pytest.raises(SettingError, match="the loss must be"):
            evaluate(loss)


def test_targets_are_moved_to_the_last_partition_for_a_loss_without_gradients(monkeypatch):
    """The caller has them in host memory."""
    devices = []
    output = torch.ones(4, 2, device="meta")
    monkeypatch.setattr(Pipe, "_output_of", lambda pipe, value: output)

    def loss_of(output, target):
        devices.append((output.device.type, target["y"][0].device.type))
        return output.sum()

    pipe = Pipe(nn.Sequential(nn.Linear(2, 2)), [1], devices=["meta"], loss=loss_of)
    with torch.no_grad():
        pipe(torch.ones(4, 2), {"y": [torch.ones(4)]})
    assert devices == [("meta", "meta")]


def test_gpipe_with_a_loss_is_called_either_way():
    """Its backwards can wait for the caller's loss."""
    plain, pipe = make_layers(), make_pipe(None, schedule="gpipe")
    x, y = batch(8)
    functional.mse_loss(plain(x), y).backward()
    functional.mse_loss(plain(x), y).backward()
    functional.mse_loss(pipe(x), y).backward()
    pipe(x, y).backward()
    torch.testing.assert_close(grads_of(pipe), grads_of(plain))


@pytest.mark.parametrize("threads", [False, True])
def test_a_loss_that_ignores_targets_is_that_of_the_whole_batch(threads):
    """Micro-batches count as many tokens as they have."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 4))
    pipe = make_pipe(
        threads, copy.deepcopy(plain), balance=[1, 2], loss=nn.CrossEntropyLoss(ignore_index=0)
    )
    x, y = torch.randn(8, 5), torch.tensor([0, 0, 0, 1, 2, 3, 0, 2])
    expected, loss = functional.cross_entropy(plain(x), y, ignore_index=0), pipe(x, y)
    torch.testing.assert_close(loss, expected)
    expected.backward()
    loss.backward()
    torch.testing.assert_close(grads_of(pipe), grads_of(plain))
    with torch.no_grad():
        torch.testing.assert_close(pipe(x, y), expected.detach())


def test_a_loss_that_cannot_be_divided_is_refused():
    """Its micro-batches would add up to another number."""
    pipe = make_pipe(None, loss=lambda output, target: (output - target).square().mean().sqrt())
    with pytest.raises(SettingError):
        pipe(*batch(8))


class Penalty(nn.Module):
    """A layer with a loss of its own."""

    def forward(self, x):
        """Call it."""
        ps.side_loss(x.square().mean())
        return x


@pytest.mark.parametrize("mode", MODES)
def test_side_losses_are_part_of_the_loss(mode):
    """As in ps.Pipeline."""
    plain = make_layers()
    layers = make_layers()
    layers.insert(2, Penalty())
    pipe = make_pipe(None, layers, balance=[2, 3, 2, 2], checkpoint=mode)
    x, y = batch(8)
    expected = functional.mse_loss(plain(x), y) + plain[:2](x).square().mean()
    loss = pipe(x, y)
    torch.testing.assert_close(loss, expected)
    expected.backward()
    loss.backward()
    torch.testing.assert_close(grads_of(pipe), grads_of(plain))
    assert float(pipe.side_loss) == 0
    with torch.no_grad():
        torch.testing.assert_close(pipe(x, y), expected.detach())


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda pipe: pickle.loads(pickle.dumps(pipe))])
def test_copies_run_for_themselves(clone):
    """A Pipe that has run can be copied and pickled."""
    pipe = make_pipe(None)
    pipe(*batch(8))
    other = clone(pipe)
    other(*batch(8)).backward()
    assert grads_of(pipe) == [None] * 8
    pipe(*batch(8)).backward()
    torch.testing.assert_close(grads_of(other), grads_of(pipe))


def test_the_loss_is_no_part_of_the_model():
    """Checkpoints stay those of the layers."""
    pipe = make_pipe(None, loss=nn.CrossEntropyLoss(weight=torch.ones(6)))
    assert list(pipe.state_dict()) == list(Pipe(make_layers(), [2, 2, 2, 2]).state_dict())


@pytest.mark.parametrize("gradients", [True, False])
def test_a_loss_may_return_a_sum_and_a_count(gradients):
    """Micro-batches then count by their counts, with gradients and without."""

    def weighted(output, target):
        weights = (target > 0).double()
        return ((output - target).square() * weights).sum(), weights.sum()

    plain, pipe = make_layers(), make_pipe(None, loss=weighted)
    x, y = batch(9)
    total, count = weighted(plain(x), y)
    with torch.set_grad_enabled(gradients):
        loss = pipe(x, y)
    torch.testing.assert_close(loss.detach(), (total / count).detach())
    assert loss.requires_grad == gradients
    if gradients:
        (total / count).backward()
        loss.backward()
        torch.testing.assert_close(grads_of(pipe), grads_of(plain))


def test_a_frozen_model_has_a_loss_without_a_graph():
    """Nothing is run backwards for it, so that its loss need not be divisible."""

    def root(output, target):
        return functional.mse_loss(output, target).sqrt()

    plain, pipe = make_layers(), make_pipe(None, loss=root)
    x, y = batch(8)
    pipe.requires_grad_(False)
    loss = pipe(x, y)
    assert not loss.requires_grad
    torch.testing.assert_close(loss, root(plain(x), y).detach())


def test_inputs_and_targets_may_be_nested():
    """As for a Pipeline; the loss gets the structure of the targets."""

    class Both(nn.Module):
        def forward(self, pair):
            return {"sum": pair["a"] + pair["b"][0]}

    def loss_of(output, target):
        return functional.mse_loss(output["sum"], target[0]["y"])

    layers = nn.Sequential(Both(), Select(), make_layers(2), Wrap())
    pipe = make_pipe(None, layers, loss=loss_of, balance=[2, 2])
    plain = make_layers(2)
    x, y = batch(8)
    expected = functional.mse_loss(plain(2 * x), y)
    for gradients in (False, True):
        with torch.set_grad_enabled(gradients):
            loss = pipe({"a": x, "b": (x,)}, [{"y": y}])
        torch.testing.assert_close(loss.detach(), expected.detach())
    loss.backward()
    expected.backward()
    torch.testing.assert_close(grads_of(pipe), grads_of(plain))


class Select(nn.Module):
    """Takes the sum."""

    def forward(self, value):
        """Return it."""
        return value["sum"]


class Wrap(nn.Module):
    """Names the output."""

    def forward(self, value):
        """Return it in a dict."""
        return {"sum": value}


def test_autocast_to_float16_is_refused_where_it_is_switched_on():
    """Its gradients would underflow; a context that is switched off says nothing."""
    pipe = make_pipe(None)
    x, y = batch(8)
    with torch.autocast("cpu", torch.float16, enabled=False):
        pipe(x, y)
    with (
        torch.autocast("cpu", torch.float16),
        pytest.raises(SettingError, match="needs a scaled loss"),
    ):
        pipe(x, y)


def test_inputs_that_require_a_gradient_are_refused_wherever_they_are():
    """Leaves, and results of an op that is trained, also in a nested input."""
    pipe = make_pipe(None)
    x, y = batch(8)
    leaf = x.clone().requires_grad_()
    for value in (leaf, leaf * 2, [x, {"mask": leaf * 2}]):
        with pytest.raises(SettingError, match=r"an input of shape \(8, 6\) requires a gradient"):
            pipe(value, y)
    with torch.no_grad():
        assert not pipe(leaf, y).requires_grad
