"""Parameter groups: the same ones, in the same order, in every stage's optimizer."""

from __future__ import annotations

import torch
from torch import nn

from penstock.optim.groups import Groups


def named():
    """Return three trainable parameters and a frozen one."""
    parameters = {
        name: nn.Parameter(torch.ones(1)) for name in ("a.weight", "a.bias", "b.weight", "b.bias")
    }
    parameters["b.weight"].requires_grad_(False)
    return parameters


def by_kind(name, parameter):
    """Return options: biases do not decay, and frozen parameters have options of their own."""
    if not parameter.requires_grad:
        return {"lr": 0.25}
    return {"weight_decay": 0.0} if name.endswith("bias") else {"lr": 0.5}


def test_parameters_with_the_same_options_are_one_group_in_order_of_appearance():
    """The function is called for the whole model on every rank, so that all have the same groups;
    groups of frozen parameters come last.
    """
    groups = Groups.of(by_kind, named().items())
    assert groups.options == ({"lr": 0.5}, {"weight_decay": 0.0}, {"lr": 0.25})
    assert groups.place == {"a.weight": 0, "a.bias": 1, "b.bias": 1, "b.weight": 2}


def test_a_stage_has_all_groups_some_of_them_empty():
    """Schedulers with options per group depend on it."""
    held = named()
    groups = Groups.of(by_kind, held.items())
    groups.add_names({held["b.bias"]: "b.bias"})
    optimizer = groups.factory(lambda params: torch.optim.SGD(params, lr=0.1, weight_decay=0.3))(
        [held["b.bias"]]
    )
    assert [(len(g["params"]), g["lr"], g["weight_decay"]) for g in optimizer.param_groups] == [
        (0, 0.5, 0.3),
        (1, 0.1, 0.0),
        (0, 0.25, 0.3),
    ]
    held["b.bias"].grad = torch.ones(1)
    optimizer.step()
    assert torch.allclose(held["b.bias"], torch.tensor([0.9]))


def test_a_parameter_without_a_name_is_in_the_first_group():
    """A stand-in of a rank without parameters has the first group's learning rate."""
    groups = Groups.of(by_kind, named().items())
    groups.add_names({nn.Parameter(torch.ones(1)): "of another model"})
    stranger = nn.Parameter(torch.ones(1))
    optimizer = groups.factory(lambda params: torch.optim.SGD(params, lr=0.1))([stranger])
    assert [len(group["params"]) for group in optimizer.param_groups] == [1, 0, 0]
