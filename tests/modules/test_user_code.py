"""Which modules run code of the user, and on which of their settings drawing depends."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.nn.utils.parametrizations import weight_norm

from penstock.modules.randomness import (
    draw_settings,
    has_dropout,
    may_draw,
    prove_no_draws,
    runs_user_code,
)


class Own(nn.Module):
    """A module of a user whose forward draws nothing."""

    def forward(self, x):
        """Return the input."""
        return x


class OtherStart(nn.Linear):
    """A linear map that only initialises its weights differently."""

    def reset_parameters(self):
        """Initialise the weights differently."""
        nn.init.ones_(self.weight)


class OtherKernel(nn.Conv1d):
    """A convolution whose forward is torch's, but not what that calls."""

    def _conv_forward(self, x, weight, bias):
        return super()._conv_forward(x, 2 * weight, bias)


def linear(change):
    """Return a linear map after a change."""
    layer = nn.Linear(1, 1)
    change(layer)
    return layer


HOOKS = {
    name: lambda layer, name=name: getattr(layer, name)(lambda *_: None)
    for name in (
        "register_forward_hook",
        "register_forward_pre_hook",
        "register_full_backward_hook",
        "register_full_backward_pre_hook",
    )
}
WEIGHT_HOOKS = {
    name: lambda layer, name=name: getattr(layer.bias, name)(lambda *_: None)
    for name in ("register_hook", "register_post_accumulate_grad_hook")
}


def replace_forward(layer):
    """Replace the forward of the object."""
    layer.forward = torch.relu


@pytest.mark.parametrize(
    "module",
    [
        nn.Linear(1, 1),
        nn.Linear(1, 1, bias=False),
        nn.Sequential(nn.Dropout(0.5), nn.LSTM(1, 1)),
        OtherStart(1, 1),
        weight_norm(nn.Linear(1, 1)),
    ],
    ids=lambda module: type(module).__name__,
)
def test_modules_of_torch_run_no_code_of_the_user(module):
    """Nor do subclasses whose forward is torch's."""
    assert not runs_user_code(module)


@pytest.mark.parametrize("change", [*HOOKS.values(), *WEIGHT_HOOKS.values(), replace_forward])
def test_hooks_and_replaced_forwards_are_code_of_the_user(change):
    """Of backwards and of weights, too; also deep inside."""
    assert runs_user_code(linear(change))
    assert runs_user_code(nn.Sequential(nn.ReLU(), nn.Sequential(linear(change))))


@pytest.mark.parametrize("module", [Own(), OtherKernel(1, 1, 1)])
def test_classes_of_the_user_are_code_of_the_user(module):
    """Also one that changes only what torch's forward calls."""
    assert runs_user_code(module)
    assert may_draw(module)


@pytest.mark.parametrize("draws", [True, False])
def test_a_layer_of_a_traced_model_knows_whether_it_draws(draws):
    """Its ops are known one by one, whatever its modules are. There is nothing to prove."""
    layer = nn.Sequential(nn.Dropout(0.0 if draws else 0.5), Own())
    layer.draws = draws
    assert may_draw(layer) is draws
    assert runs_user_code(layer) is draws
    assert prove_no_draws(layer) is None
    calm = nn.Sequential(Own())
    assert prove_no_draws(calm) is not None
    calm.draws = draws
    assert prove_no_draws(calm) is None


@pytest.mark.parametrize(
    "register", [register_module_forward_hook, register_module_forward_pre_hook]
)
def test_a_hook_on_all_modules_may_draw(register):
    """It runs in every forward, so that no module is known to draw nothing."""
    handle = register(lambda *_: None)
    try:
        assert may_draw(nn.Linear(1, 1))
        assert prove_no_draws(Own()) is None
    finally:
        handle.remove()
    assert not may_draw(nn.Linear(1, 1))
    assert prove_no_draws(Own()) is not None


def test_dropout_is_found_at_any_rate_and_depth():
    """Its rate may rise later."""
    assert has_dropout(nn.Sequential(nn.Sequential(nn.Dropout2d(0.0))))
    assert not has_dropout(nn.Sequential(nn.Linear(1, 1), nn.RReLU()))


def change_hook(model):
    """Register a hook."""
    model[0].register_forward_hook(lambda *_: None)


def change_pre_hook(model):
    """Register a hook that runs before the forward."""
    model[0].register_forward_pre_hook(lambda *_: None)


def change_rate(model):
    """Raise a dropout rate."""
    model[1].p = 0.5


def change_child(model):
    """Replace a layer by another one of its class."""
    model[0] = nn.Linear(1, 1)


def change_forward(model):
    """Replace the forward of one layer."""
    model[0].forward = torch.rand_like


def change_class(model):
    """Change the class of one layer."""
    model[0].__class__ = OtherStart


@pytest.mark.parametrize(
    "change",
    [change_hook, change_pre_hook, change_rate, change_child, change_forward, change_class],
)
def test_every_change_on_which_drawing_depends_is_noticed(change):
    """It may come between any two batches. The present modules are listed by the caller."""
    model = nn.Sequential(nn.Linear(1, 1), nn.Dropout(0.1))
    modules = list(model.modules())
    before = draw_settings(modules)
    assert draw_settings(modules) == before
    change(model)
    assert draw_settings(modules) != before
