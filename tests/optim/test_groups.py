"""Parameter groups: the same ones, in the same order, in every stage's optimizer."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from penstock.errors import SettingError
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
    mixed = named() | {"c.weight": nn.Parameter(torch.ones(1))}
    place = Groups.of(by_kind, mixed.items()).place
    assert place == {"a.weight": 0, "a.bias": 1, "b.bias": 1, "c.weight": 0, "b.weight": 2}


def test_a_dict_that_the_function_changes_between_its_calls_is_read_at_each_of_them():
    """Otherwise all parameters would be in one group, with the options of the last."""
    options = {}

    def one_dict(name, _):
        options["weight_decay"] = 0.0 if name.endswith("bias") else 0.1
        return options

    groups = Groups.of(one_dict, named().items())
    assert groups.options == ({"weight_decay": 0.1}, {"weight_decay": 0.0})
    assert groups.place == {"a.weight": 0, "a.bias": 1, "b.bias": 1, "b.weight": 0}


def test_groups_of_frozen_parameters_come_last_wherever_they_are():
    """A parameter that is trained later must not change the numbers of the groups before."""
    held = dict(reversed(named().items()))
    held["a.bias"].requires_grad_(False)
    held["whole"] = nn.Parameter(torch.ones(1, dtype=torch.int64), requires_grad=False)
    held["turn"] = nn.Parameter(torch.ones(1, dtype=torch.complex64))
    calls = []

    def options_of(name, parameter):
        calls.append((name, parameter))
        return by_kind(name, parameter)

    groups = Groups.of(options_of, held.items())
    assert groups.options == ({"weight_decay": 0.0}, {"lr": 0.5}, {"lr": 0.25})
    assert groups.place == {"b.bias": 0, "a.weight": 1, "turn": 1, "b.weight": 2, "a.bias": 2}
    order = ("b.bias", "a.weight", "turn", "b.weight", "a.bias")
    assert [name for name, _ in calls] == list(order)
    assert all(parameter is held[name] for name, parameter in calls)


@pytest.mark.parametrize(
    ("returned", "what"),
    [(None, "NoneType"), ([], "list"), ({"params": []}, "one with 'params'"), ("lr", "str")],
)
def test_what_is_no_dict_of_options_is_refused_with_the_parameter(returned, what):
    """torch would fail later, without the name."""
    with pytest.raises(SettingError) as refusal:
        Groups.of(lambda name, parameter: {} if name == "a.weight" else returned, named().items())
    assert str(refusal.value) == (
        "parameter_groups= is a function from a parameter's name and the parameter to a dict of "
        "options of its group, such as {'weight_decay': 0.0}; for a.bias it returned " + what
    )


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
