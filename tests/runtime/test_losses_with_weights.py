"""Losses and layers with weights that no stage trains: refused, or trained as in plain PyTorch."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from tests.runtime.against_plain import (
    batch,
    furthest,
    model,
    pipeline,
    plain_step,
    sgd,
)
from torch import nn
from torch.nn import functional

from penstock.errors import RunError, SettingError


class Margin(nn.Module):
    """A loss with trainable class centres."""

    def __init__(self):
        super().__init__()
        self.centres = nn.Parameter(torch.eye(4, dtype=torch.float64))

    def forward(self, output, target):
        """Return the loss."""
        return functional.cross_entropy(output @ self.centres, target)


MARGIN = Margin()


def by_global(output, target):
    """A loss that uses a global variable, as in scripts."""
    return helper(output, target)


def helper(output, target):
    """A function that the loss calls."""
    return sum(part(output, target) for part in [MARGIN])


def in_closure():
    """A loss that uses a variable of its closure."""
    margin = Margin()
    return lambda output, target: margin(output, target) + 0


def learnt_scale():
    """A loss with a trainable tensor that belongs to no module."""
    scale = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    return lambda output, target: functional.cross_entropy(output * scale.exp(), target)


LOSSES = {
    "module": Margin,
    "method": lambda: Margin().forward,
    "closure": in_closure,
    "global": lambda: by_global,
    "partial": lambda: functools.partial(
        lambda output, target, by: by(output, target), by=Margin()
    ),
    "tensor": learnt_scale,
}


@pytest.mark.parametrize("kind", LOSSES)
def test_a_loss_with_weights_of_its_own_is_refused_when_the_pipeline_is_made(kind):
    """These weights would silently not be trained."""
    with pytest.raises(
        SettingError, match=r"1 trainable weight of its own.* no stage would train it"
    ):
        pipeline(model(), loss=LOSSES[kind]())


def test_a_loss_module_with_frozen_weights_or_buffers_is_accepted():
    """Such as class weights, or a teacher that is not trained."""
    margin = Margin().requires_grad_(False)
    margin.register_buffer("weight", torch.arange(1.0, 5.0, dtype=torch.float64))
    network, plain = model(), model()
    pipe, optimizer = pipeline(network, loss=margin), sgd(plain.parameters())
    pipe.train_batch(*batch())
    plain_step(plain, optimizer, 0, loss=margin)
    assert furthest(network, plain) < 1e-12


class Trainer:
    """An object with methods that are losses, and with the model among its attributes."""

    def __init__(self, network):
        self.model, self.margin, self.late = network, Margin(), False

    def with_margin(self, output, target):
        """A loss with weights that are not the model's."""
        return self.margin(output, target)

    def with_penalty(self, output, target):
        """A loss with the model's weights, as hand-written regularisation."""
        penalty = sum(parameter.square().sum() for parameter in self.model.parameters())
        return functional.cross_entropy(output, target) + 0.1 * penalty

    def with_late_penalty(self, output, target):
        """The same, but only after some batches."""
        if self.late:
            return self.with_penalty(output, target)
        return functional.cross_entropy(output, target)

    def with_own_penalty(self, output, target):
        """A loss with the weights of the last stage."""
        return functional.cross_entropy(output, target) + 0.1 * self.model[6].weight.square().sum()


@pytest.mark.parametrize("options", [{}, {"recompute": "always"}], ids=["kept", "recomputed"])
@pytest.mark.parametrize(
    ("method", "message"),
    [
        ("with_margin", r"trainable weight of shape \(4, 4\) that is not the model's"),
        ("with_penalty", r"the loss uses \d\.\w+, which is not a parameter of the last stage, 3"),
        ("with_late_penalty", r"the loss uses \d\.\w+, which is not a parameter of the last stage"),
    ],
)
def test_a_loss_that_turns_out_to_use_other_weights_is_refused_before_a_step(
    method, message, options
):
    """In processes their gradients would be lost, and the penalty would be of old weights."""
    network = model()
    trainer = Trainer(network)
    pipe = pipeline(network, loss=getattr(trainer, method), **options)
    before: dict[str, torch.Tensor] = {}

    def train():
        for number in range(4):
            before.update(copy.deepcopy(network.state_dict()))
            trainer.late = number >= 2
            pipe.train_batch(*batch(number))

    with pytest.raises(RunError, match=message):
        train()
    assert all(torch.equal(before[name], value) for name, value in network.state_dict().items())


@pytest.mark.parametrize(
    ("balance", "method"), [([2, 2, 2, 2], "with_own_penalty"), ([8], "with_penalty")]
)
def test_a_penalty_on_the_weights_of_the_last_stage_is_trained(balance, method):
    """They are on the rank that computes the loss."""
    network, plain = model(), model()
    pipe = pipeline(
        network, loss=getattr(Trainer(network), method), balance=balance, schedule="gpipe"
    )
    optimizer, loss = sgd(plain.parameters()), getattr(Trainer(plain), method)
    for number in range(3):
        pipe.train_batch(*batch(number))
        plain_step(plain, optimizer, number, loss=loss)
    assert furthest(network, plain) < 1e-12


class Hidden(nn.Module):
    """A layer that uses another layer's weight without registering it."""

    def __init__(self, other):
        super().__init__()
        self.other = [other]

    def forward(self, x):
        """Run the layer."""
        return x @ self.other[0].weight.T


@pytest.mark.parametrize("options", [{}, {"recompute": "always"}], ids=["kept", "recomputed"])
def test_a_layer_with_an_unregistered_weight_of_another_stage_is_refused(options):
    """The gradient would be lost where ranks are processes."""
    network = model()
    network[4] = Hidden(network[2])
    with pytest.raises(
        RunError, match=r"a layer of stage 2 uses 2\.weight, a parameter of another"
    ):
        pipeline(network, **options).train_batch(*batch())
    plain = copy.deepcopy(network)
    pipe = pipeline(network, balance=[2, 4, 2], **options)
    pipe.train_batch(*batch())
    plain_step(plain, sgd(plain.parameters()), 0)
    assert furthest(network, plain) < 1e-12
