"""Trainable weights that a loss refers to beside the model's, wherever they are."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn

from penstock.errors import SettingError
from penstock.losses.parameters import check_loss, check_training
from penstock.tracing.traced_chain import chain

GLOBAL = nn.Parameter(torch.ones(3))
FROZEN = nn.Parameter(torch.ones(3), requires_grad=False)


@pytest.fixture
def model():
    """A model of one layer."""
    return nn.Sequential(nn.Linear(2, 3))


def by_global(output, target):
    """It reads a global variable."""
    return (output * GLOBAL).sum()


def by_call(output, target):
    """It calls a function that reads one, within a comprehension."""
    return sum(by_global(part, target) for part in output)


def by_frozen(output, target):
    """What it reads is not trained."""
    return (output * FROZEN).sum()


class Holder:
    """An object with a weight, a method and an own call."""

    def __init__(self, weight) -> None:
        self.weights = {"w": [weight]}

    def loss(self, output, target):
        """Use it."""

    def __call__(self, output, target):
        """Use it."""


def weight():
    """A trainable tensor of two numbers."""
    return torch.ones(2, requires_grad=True)


def enclosed():
    """A function that reads a variable of the enclosing one."""
    held = weight()
    return lambda output, target: (output * held).sum()


def with_default(output, target, scale=(weight(),), *, more=None):
    """A weight in a default."""


def with_keyword(output, target, *, scale=weight()):
    """A weight in a keyword's default."""


@functools.wraps(by_global)
def wrapping(output, target):
    """It wraps one with a weight."""


REFUSED = {
    "module": (
        nn.Linear(2, 1),
        r"^loss= has 2 trainable weights of its own, the first \(weight\) of",
    ),
    "global": (
        by_global,
        r"^by_global, which is .* refers to GLOBAL, which has 1 trainable weight ",
    ),
    "call": (by_call, "refers to GLOBAL, which has"),
    "closure": (enclosed(), r"refers to held, which has .* the first \(a tensor\) of shape \(2,\)"),
    "default": (with_default, "refers to a default, which has"),
    "keyword": (with_keyword, "refers to a default, which has"),
    "wrapped": (wrapping, "refers to GLOBAL, which has"),
    "partial": (functools.partial(max, weight()), "^an argument of loss= has"),
    "partial keyword": (functools.partial(max, key=weight()), "^key of loss= has"),
    "partial function": (functools.partial(by_global, 1), "GLOBAL"),
    "object": (Holder(weight()), r"^loss\.weights has 1 trainable weight"),
    "list": (functools.partial(max, [{"a": (weight(),)}]), "^an argument of loss= has"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_weights_that_no_stage_would_train_are_refused_with_their_place(model, name):
    """Before anything runs."""
    loss, words = REFUSED[name]
    with pytest.raises(SettingError, match=words):
        check_loss(chain(model), loss)


def test_frozen_weights_and_those_of_the_model_are_none(model):
    """Nor what torch's own functions refer to, results of computations, and empty variables."""
    layer = model[0]
    derived = weight() * 2

    def shares(output, target):
        return output * layer.weight + derived

    def unbound(output, target):
        return later

    for loss in (
        by_frozen,
        shares,
        unbound,
        nn.functional.mse_loss,
        nn.MSELoss(),
        Holder(FROZEN),
        functools.partial(max, model, layer.bias),
    ):
        check_loss(chain(model), loss)
    later = 1


def test_containers_are_followed_to_a_depth_and_circles_end(model):
    """Four steps from the loss."""

    def nested(depth):
        value = weight()
        for _ in range(depth):
            value = [value]
        return functools.partial(max, value)

    check_loss(chain(model), nested(4))
    with pytest.raises(SettingError, match="has 1 trainable weight"):
        check_loss(chain(model), nested(3))
    circle = []
    circle.append(circle)
    check_loss(chain(model), functools.partial(max, circle))


def test_a_loss_must_be_a_function_and_the_optimizer_is_checked_first(model):
    """Both messages quote what was given."""
    with pytest.raises(SettingError, match=r"to a number, not 3$"):
        check_loss(chain(model), 3)
    with pytest.raises(SettingError, match=r"not 'adam'$"):
        check_training(chain(model), 3, "adam")
    with pytest.raises(SettingError, match=r"to a number, not 3$"):
        check_training(chain(model), 3, torch.optim.Adam)
