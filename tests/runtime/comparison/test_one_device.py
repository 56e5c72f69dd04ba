"""Plain training in the process of rank 0, against a loop over micro-batches in autograd."""

from __future__ import annotations

import random
from functools import partial

import pytest
import torch
from torch import nn

import penstock as ps
from penstock.batches.batch import make_batch
from penstock.modules.side_loss import side_loss
from penstock.runtime.comparison.one_device import OneDevice, _weighted_loss

CPU = torch.device("cpu")


class Sided(nn.Linear):
    """A layer with a side loss."""

    def forward(self, x):
        """Add the mean square of the output."""
        output = super().forward(x)
        side_loss(output.square().mean())
        return output


class InPlace(nn.Module):
    """A layer that changes its input."""

    def forward(self, x):
        """Add 1."""
        return x.add_(1)


def mean_square_in_place(output, target):
    """Return a loss, whose value is left in the output's place."""
    return output.sub_(target).square_().mean()


def one_device(modules, *, samples=7, loss=nn.functional.mse_loss, micro_batches=3):
    """Return the training of a model on one device, its data and its values."""
    pipe = ps.Pipeline(
        nn.Sequential(*modules),
        balance=[1] * len(modules),
        schedule="gpipe",
        micro_batches=micro_batches,
        loss=loss,
        executor="threads",
        device="cpu",
    )
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(samples, 3, generator=generator) for _ in range(2))
    batch = make_batch(x, y, micro_batches, step=4, training=True)
    values = {name: tensor.clone() for name, tensor in pipe.state_dict().items()}
    return OneDevice(pipe._assembly.placed, batch, pipe._training, CPU), x, y, values


def linear(values, x, layer):
    """Return the output of a linear layer with these values."""
    return nn.functional.linear(x, values[f"{layer}.weight"], values[f"{layer}.bias"])


def reference(values, parts, *, sided):
    """Return loss, gradients and outputs of a model of two linear layers, plainly."""
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in values.items()}
    samples = sum(len(x) for x, _ in parts)
    total, outputs = 0.0, []
    for x, y in parts:
        hidden = linear(leaves, x, 0)
        output = linear(leaves, torch.tanh(hidden), 2)
        loss = (output - y).square().mean() + (hidden.square().mean() if sided else 0.0)
        total = total + loss * len(x) / samples
        outputs.append(output.detach())
    total.backward()
    return float(total.detach()), {name: leaf.grad for name, leaf in leaves.items()}, outputs


@pytest.mark.parametrize("sided", [False, True])
@pytest.mark.parametrize("whole", [False, True])
def test_gradients_loss_and_outputs_are_those_of_plain_autograd(sided, whole):
    """By micro-batches of unlike sizes, or undivided; each run begins anew, and leaves the batch as
    it was.
    """
    modules = [(Sided if sided else nn.Linear)(3, 3), nn.Tanh(), nn.Linear(3, 3)]
    plain, x, y, values = one_device(modules)
    batch = plain.batch
    if whole:
        # The run before has outputs of more micro-batches.
        plain.train(values, whole=False)
        parts, train = [(x, y)], plain.train_whole
    else:
        parts = list(zip(batch.inputs, batch.targets, strict=True))
        train = partial(plain.train, whole=False)
    assert [len(part) for part, _ in parts] == ([7] if whole else [3, 2, 2])
    for factor in (1.0, 2.0):
        scaled = {name: tensor * factor for name, tensor in values.items()}
        loss, grads, outputs = reference(scaled, parts, sided=sided)
        train(scaled)
        assert plain.loss == pytest.approx(loss, rel=1e-6)
        assert not plain.drew
        torch.testing.assert_close(plain.grads(), grads)
        torch.testing.assert_close(plain.state(), scaled)
        assert list(plain.outputs) == list(range(len(parts)))
        torch.testing.assert_close(list(plain.outputs.values()), outputs)
        if not whole:
            assert plain.sides == sided
            torch.testing.assert_close(plain.output_leaves(), {"output": outputs})
    assert not batch.losses
    assert not batch.outputs
    assert all(module.weight.grad is None for module in (modules[0], modules[2]))


@pytest.mark.parametrize("whole", [False, True])
def test_layers_and_losses_may_work_in_place(whole):
    """Inputs stay as they are, and outputs are those before the loss."""
    modules = [InPlace(), nn.Linear(3, 3)]
    plain, x, _, values = one_device(modules, loss=mean_square_in_place)
    before = x.clone()
    for _ in range(2):
        if whole:
            plain.train_whole(values)
        else:
            plain.train(values, whole=False)
        outputs = torch.cat(list(plain.outputs.values()))
        torch.testing.assert_close(outputs, linear(values, before + 1, 1))
    assert torch.equal(x, before)


def test_random_numbers_are_noticed_in_the_run_that_draws_them():
    """Each layer and micro-batch has its own, the same in every run."""
    plain, _, _, values = one_device([nn.Linear(3, 3), nn.Dropout(0.5)])
    plain.train(values, whole=False)
    assert plain.drew
    first = {number: output.clone() for number, output in plain.outputs.items()}
    plain.train(values, whole=False)
    assert all(torch.equal(plain.outputs[number], output) for number, output in first.items())
    dropped = {tuple((output[:2] == 0).flatten().tolist()) for output in first.values()}
    assert len(dropped) > 1
    plain.placed.traced.modules[1].eval()
    plain.train(values, whole=False)
    assert not plain.drew


def test_sparse_gradients_are_dense_and_missing_ones_zero():
    """So that they are compared like all others."""
    modules = [nn.Embedding(5, 3, sparse=True), nn.Linear(3, 3)]
    pipe = ps.Pipeline(
        nn.Sequential(*modules),
        balance=[1, 1],
        schedule="gpipe",
        micro_batches=2,
        loss=lambda output, target: output.sum() * 0 + modules[0].weight.new_ones(()),
        executor="threads",
        device="cpu",
    )
    batch = make_batch(torch.tensor([1, 2]), torch.ones(2), 2, step=0, training=True)
    plain = OneDevice(pipe._assembly.placed, batch, pipe._training, CPU)
    plain.train(dict(pipe.state_dict()), whole=False)
    assert {name: grad.is_sparse for name, grad in plain.grads().items()} == {
        "0.weight": False,
        "1.weight": False,
        "1.bias": False,
    }
    plain.modules[1].weight.grad = None
    assert plain.grads()["1.weight"].tolist() == [[0.0] * 3] * 3


@pytest.mark.parametrize(("weight", "share"), [(0.25, 0.25), (0.5, 0.25)])
def test_side_losses_have_the_share_of_samples_and_the_loss_its_weight(weight, share):
    """These are equal unless the loss has weights of its own."""
    loss, sides = torch.tensor(8.0), [torch.tensor(2.0), torch.tensor(3.0)]
    assert float(_weighted_loss(loss, sides, weight, share)) == 8 * weight + 5 * share
    assert float(_weighted_loss(loss, [], weight, share)) == 8 * weight


class RunningSum(nn.Module):
    """Sums the tokens up to each one, and may drop some."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, x):
        """Sum the whole sequence."""
        return self.forward_slice(x, None)[0]

    def forward_slice(self, x, past):
        """Go on from the sum of the slices before."""
        x = nn.functional.dropout(x, self.rate)
        total = x.cumsum(1) + (0 if past is None else past)
        return total, total[:, -1:]


@pytest.mark.parametrize("rate", [0.0, 0.5])
def test_slices_of_a_sequence_continue_the_state_of_their_layer(rate):
    """With random numbers only slices can be compared: each has masks of its own."""
    pipe = ps.Pipeline(
        [nn.Linear(3, 3), RunningSum(rate), nn.Linear(3, 3), RunningSum(rate)],
        balance=[2, 2],
        schedule=ps.schedule("terapipe", 2, 2, slices=3),
        loss=nn.functional.mse_loss,
        executor="threads",
    )
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(4, 6, 3, generator=generator) for _ in range(2))
    comparison = pipe.compare_with_one_device(x, y)
    assert comparison.relative < 1e-5


class HostNoise(nn.Module):
    """Multiplies by a number of Python's generator."""

    def forward(self, x):
        """Draw it."""
        return x * random.random()


def test_numbers_of_pythons_generator_are_noticed_too():
    """They differ between the undivided batch and its micro-batches as those of torch do."""
    plain, _, _, values = one_device([nn.Linear(3, 3), HostNoise()])
    plain.train(values, whole=False)
    assert plain.drew
