"""Hooks of modules and of parameters: whether there are any, and their copies."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from penstock.modules.hooks import copy_tensor_hooks, copy_weight_hooks, has_hooks, hooked


def double(grad):
    """Return twice the gradient."""
    return 2 * grad


def gradient(weight):
    """Return the gradient of the sum of a weight."""
    weight.sum().backward()
    return weight.grad


@pytest.mark.parametrize(
    "register",
    [
        "register_forward_hook",
        "register_forward_pre_hook",
        "register_full_backward_hook",
        "register_full_backward_pre_hook",
    ],
)
def test_a_module_has_the_hooks_of_its_own(register):
    """Those of its submodules run by themselves."""
    model = nn.Sequential(nn.Linear(1, 1))
    assert has_hooks(model) is False
    handle = getattr(model[0], register)(lambda *_: None)
    assert (has_hooks(model), has_hooks(model[0])) == (False, True)
    handle.remove()
    assert has_hooks(model[0]) is False


def test_the_hooks_of_a_copy_are_those_of_its_source():
    """All of them, in their order: `copy.deepcopy` copies none."""
    source = torch.ones(2, requires_grad=True)
    source.register_hook(double)
    source.register_hook(lambda grad: grad + 1)
    copied = copy.deepcopy(source)
    copy_tensor_hooks(source, copied)
    assert gradient(copied).tolist() == [3.0, 3.0]
    assert source.grad is None


def test_a_copy_that_has_hooks_keeps_these():
    """They may be those of the source already, and must not run twice."""
    source, copied = (torch.ones(1, requires_grad=True) for _ in range(2))
    source.register_hook(double)
    copy_tensor_hooks(source, copied)
    copy_tensor_hooks(source, copied)
    assert gradient(copied).tolist() == [2.0]


def test_frozen_copies_and_sources_without_hooks_get_none():
    """torch refuses a hook on a tensor that needs no gradient."""
    source = torch.ones(1, requires_grad=True)
    copied, frozen = torch.ones(1, requires_grad=True), torch.ones(1)
    copy_tensor_hooks(source, copied)
    source.register_hook(double)
    copy_tensor_hooks(source, frozen)
    assert (copied._backward_hooks, frozen._backward_hooks) == (None, None)
    assert gradient(copied).tolist() == [1.0]


def test_weights_get_the_hooks_of_the_weights_of_their_names():
    """By module in order; a copy may have fewer parameters, but there is one for each module."""
    first, second = nn.Linear(1, 1), nn.Linear(1, 1)
    second.weight.register_hook(double)
    second.bias.register_hook(double)
    copies = [nn.Linear(1, 1), nn.Linear(1, 1, bias=False)]
    copy_weight_hooks([first, second], copies)
    assert hooked(copies) == ["weight"]
    assert hooked(copies[:1]) == []
    assert gradient(copies[1].weight).tolist() == [[2.0]]
    with pytest.raises(ValueError, match="shorter"):
        copy_weight_hooks([first, second], copies[:1])


def test_hooked_parameters_are_named_whatever_the_kind_of_hook():
    """Before and after the gradient is accumulated."""
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    assert hooked([model]) == []
    model[0].bias.register_post_accumulate_grad_hook(lambda parameter: None)
    model[1].weight.register_hook(double)
    assert hooked([model]) == ["0.bias", "1.weight"]
    assert hooked([model[1], model[0]]) == ["weight", "bias"]
