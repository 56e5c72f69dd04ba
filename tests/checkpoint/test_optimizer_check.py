"""Optimizers whose state a checkpoint can hold, and those that are refused before a file is written."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.optim import ASGD, SGD, Adagrad, Adam, AdamW, RMSprop, Rprop

from penstock.checkpoint.optimizer_check import check_optimizer
from penstock.errors import SettingError


def parameters():
    """Return two parameters with gradients."""
    row = [nn.Parameter(torch.ones(3, 2)), nn.Parameter(torch.ones(2))]
    for parameter in row:
        parameter.grad = torch.ones_like(parameter)
    return row


def stepped(optimizer):
    """Return an optimizer that has made a step."""
    optimizer.step()
    return optimizer


def with_attribute(value, name="extra"):
    """Return an optimizer with a further attribute."""
    optimizer = SGD(parameters(), lr=0.1)
    setattr(optimizer, name, value)
    return optimizer


def with_state(value, key="extra"):
    """Return an optimizer with a further entry in the state of its first parameter."""
    optimizer = SGD(parameters(), lr=0.1)
    optimizer.state[optimizer.param_groups[0]["params"][0]][key] = value
    return optimizer


def with_entry(parameters_state=None, **entries):
    """Return an optimizer whose `.state` has entries by other keys, or another kind of value."""
    optimizer = SGD(parameters(), lr=0.1)
    if parameters_state is not None:
        optimizer.state[optimizer.param_groups[0]["params"][1]] = parameters_state
    optimizer.state.update(entries)
    return optimizer


class SharesState(SGD):
    """An optimizer that delegates its steps to another one, whose state it has."""

    def __init__(self, params):
        super().__init__(params, lr=0.1)
        self.base_optimizer = Adam(self.param_groups, lr=0.1)
        self.state = self.base_optimizer.state


class Renamed(SGD):
    """An optimizer whose own state_dict has the usual entries."""

    def state_dict(self):
        return dict(super().state_dict())


class InTables(SGD):
    """An optimizer of the library for 8-bit optimizers, with a table of constants."""

    def __init__(self, params):
        super().__init__(params, lr=0.1)
        self.name2qmap = {"dynamic": torch.zeros(256)}


InTables.__module__ = "bitsandbytes.optim.adamw"


class DerivedFromTables(InTables):
    """A class of the user derived from such an optimizer."""


def own_parameters():
    """Return an optimizer that lists its parameters in an attribute, and itself in another."""
    optimizer = SGD(parameters(), lr=0.1)
    optimizer.flat = list(optimizer.param_groups[0]["params"])
    optimizer.first = optimizer.flat[0]
    optimizer.itself = optimizer
    return optimizer


def with_hooks():
    """Return an optimizer with hooks, which torch keeps in attributes of the optimizer."""
    optimizer = SGD(parameters(), lr=0.1)
    optimizer._optimizer_step_pre_hooks[0] = torch.zeros(1)
    return optimizer


ACCEPTED = {
    "without a step": lambda: SGD(parameters(), lr=0.1),
    "momentum": lambda: stepped(SGD(parameters(), lr=0.1, momentum=0.9)),
    "adam": lambda: stepped(Adam(parameters(), amsgrad=True)),
    "adamw": lambda: stepped(AdamW(parameters(), foreach=False)),
    "adagrad": lambda: Adagrad(parameters()),
    "rmsprop": lambda: stepped(RMSprop(parameters(), momentum=0.5, centered=True)),
    "rprop": lambda: stepped(Rprop(parameters())),
    "asgd": lambda: stepped(ASGD(parameters())),
    "state of another": lambda: SharesState(parameters()),
    "own parameters": own_parameters,
    "hooks": with_hooks,
    "constants": lambda: InTables(parameters()),
    "derived constants": lambda: DerivedFromTables(parameters()),
    "own state_dict": lambda: stepped(Renamed(parameters(), momentum=0.9, lr=0.1)),
    "plain attribute": lambda: with_attribute([1, "text", None]),
    "parameter as state": lambda: with_state(nn.Parameter(torch.ones(2))),
    "number as state": lambda: with_state(3),
    "no dictionary as state": lambda: with_entry(parameters_state=[1]),
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_state_by_parameter_in_dense_tensors_and_plain_values_is_accepted(name):
    """All optimizers of torch keep theirs so; attributes may have constants and parameters."""
    check_optimizer(ACCEPTED[name]())


class ZeroRedundancyOptimizer(SGD):
    """A class of the same name as torch's, which needs a process group."""


class DerivedZero(ZeroRedundancyOptimizer):
    """A class of the user derived from torch's."""


class Fails(SGD):
    """An optimizer whose own state_dict fails."""

    def state_dict(self):
        raise ZeroDivisionError("no trust region")


class More(SGD):
    """An optimizer whose own state_dict has further entries."""

    def state_dict(self):
        return super().state_dict() | {"trust": 3, "damping": 1}


class Fewer(SGD):
    """An optimizer whose own state_dict leaves out the state of a parameter."""

    def state_dict(self):
        return super().state_dict() | {"state": {0: {}}}


class Without(SGD):
    """An optimizer whose own state_dict has no state."""

    def state_dict(self):
        return {"param_groups": []}


class Subclass(torch.Tensor):
    """A tensor that has more than its values."""


def with_foreign_key():
    """Return an optimizer with state by a tensor that is no parameter."""
    optimizer = SGD(parameters(), lr=0.1)
    optimizer.state[torch.zeros(3)] = {}
    return optimizer


TENSORS = (
    r"of SGD: it keeps tensors in its attribute 'extra', and not in SGD\.state\[parameter\]\. Store"
    " them there, or save the weights alone"
)
ANOTHER = (
    r"of SGD: part of it lies in another optimizer, the Adam in its attribute 'extra', and not in "
    r"SGD\.state\. Give optimizer= an optimizer that stores all of its state itself"
)
REFUSED = {
    "a tensor": (lambda: with_attribute(torch.zeros(2)), TENSORS),
    "a list": (lambda: with_attribute([None, torch.zeros(2)]), TENSORS),
    "a tuple": (lambda: with_attribute((1, torch.zeros(2))), TENSORS),
    "a dictionary": (lambda: with_attribute({"a": 1, "b": torch.zeros(2)}), TENSORS),
    "a foreign parameter": (lambda: with_attribute(nn.Parameter(torch.zeros(2))), TENSORS),
    "another optimizer": (lambda: with_attribute(Adam(parameters())), ANOTHER),
    "an optimizer as a private attribute": (
        lambda: with_attribute(Adam(parameters()), "_optimizer"),
        ANOTHER.replace("extra", "_optimizer"),
    ),
    "tensors as a private attribute": (
        lambda: with_attribute([torch.zeros(2)], "_states"),
        TENSORS.replace("extra", "_states"),
    ),
    "a list of optimizers": (lambda: with_attribute([0, Adam(parameters())]), ANOTHER),
    "optimizers by name": (lambda: with_attribute({"inner": Adam(parameters())}), ANOTHER),
    "zero": (
        lambda: ZeroRedundancyOptimizer(parameters(), lr=0.1),
        "of a ZeroRedundancyOptimizer: it is divided over the ranks, and lies in another optimizer",
    ),
    "derived from zero": (
        lambda: DerivedZero(parameters(), lr=0.1),
        "of a ZeroRedundancyOptimizer: it is divided over the ranks",
    ),
    "a text as key": (
        lambda: with_entry(calls={"count": 1}),
        r"of SGD: SGD\.state has the key 'calls', which is no parameter of its groups",
    ),
    "a tensor as key": (
        with_foreign_key,
        r"of SGD: SGD\.state has a tensor, which is no parameter of its groups\. Store state by ",
    ),
    "a sparse tensor": (
        lambda: with_state(torch.eye(2).to_sparse()),
        r"of SGD: it keeps a torch\.sparse_coo tensor as 'extra'; a file can hold dense tensors",
    ),
    "a subclass": (
        lambda: with_state(torch.ones(1).as_subclass(Subclass), "scale"),
        "of SGD: it keeps a Subclass as 'scale'; a file can hold dense tensors",
    ),
    "a state_dict that fails": (
        lambda: Fails(parameters(), lr=0.1),
        r"of Fails: its own state_dict\(\) failed with ZeroDivisionError\('no trust region'\)",
    ),
    "more in state_dict": (
        lambda: More(parameters(), lr=0.1),
        r"of More: its own state_dict\(\) has damping, trust besides\. Give optimizer= an",
    ),
    "less in state_dict": (
        lambda: stepped(Fewer(parameters(), lr=0.1, momentum=0.9)),
        r"of Fewer: its own state_dict\(\) has 1 entries of state, where Fewer\.state has 2\. Give",
    ),
    "no state in state_dict": (
        lambda: stepped(Without(parameters(), lr=0.1, momentum=0.9)),
        r"of Without: its own state_dict\(\) has 0 entries of state, where Without\.state has 2\. Give",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_state_anywhere_else_is_refused_with_its_place(name):
    """If it were left out silently, training would resume with other numbers."""
    make, message = REFUSED[name]
    with pytest.raises(SettingError, match=f"^a checkpoint cannot hold the state {message}"):
        check_optimizer(make())


class Shared(torch.Tensor):
    """Stands for a tensor that processes share, which needs a process group."""


def shared_parameter():
    """Return a parameter that processes share."""
    return nn.Parameter(torch.ones(3).as_subclass(Shared))


def test_state_of_a_shared_parameter_is_shared_alike_or_a_number(monkeypatch):
    """State in the form of the parameter is gathered from all processes; of one process it is not."""
    module = SimpleNamespace(DTensor=Shared)
    monkeypatch.setitem(sys.modules, "torch.distributed.tensor", module)
    parameter = shared_parameter()
    optimizer = SGD([parameter], lr=0.1)
    optimizer.state[parameter].update(
        moment=torch.ones(3).as_subclass(Shared), step=torch.tensor(2.0), count=4
    )
    check_optimizer(optimizer)
    optimizer.state[parameter]["factors"] = torch.ones(3)
    with pytest.raises(
        SettingError, match="'factors' of a parameter that processes share is of this process alone"
    ):
        check_optimizer(optimizer)
    other = SGD([parameter, *parameters()], lr=0.1)
    other.state[other.param_groups[0]["params"][1]]["factors"] = torch.ones(3)
    check_optimizer(other)
