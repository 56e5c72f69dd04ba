"""How much an optimizer keeps, from a name, a number, an optimizer or what makes one."""

from __future__ import annotations

import sys
from functools import partial

import pytest
import torch
from torch import nn

from penstock.cluster.cluster import Cluster, Device, Link
from penstock.errors import PlanError, SettingError
from penstock.search.catalogue import plan
from penstock.search.optimizer_kind import OptimizerKind, optimizer_kind

SGD, ADAM, RMSPROP = torch.optim.SGD, torch.optim.Adam, torch.optim.RMSprop


def weights():
    return [nn.Parameter(torch.zeros(64, 64))]


@pytest.mark.parametrize(
    ("optimizer", "name", "states"),
    [
        ("sgd", "SGD", 0),
        ("momentum", "SGD", 1),
        ("Adam", "Adam", 2),
        ("adamw", "AdamW", 2),
        ("adagrad", "Adagrad", 1),
        (2, "", 2),
        (0.5, "", 0.5),
        (SGD(weights(), lr=1), "SGD", 0),
        (SGD(weights(), lr=1, momentum=0.9), "SGD", 1),
        (ADAM(weights()), "Adam", 2),
        (ADAM(weights(), amsgrad=True), "Adam", 3),
        (RMSPROP(weights(), centered=True, momentum=0.9), "RMSprop", 3),
        (ADAM, "Adam", 2),
        (partial(SGD, lr=1, momentum=0.5), "SGD", 1),
        (lambda weights: torch.optim.NAdam(weights, lr=1.0), "NAdam", 2),
        (torch.optim.SparseAdam, "SparseAdam", 2),
        (torch.optim.Adafactor, "Adafactor", 0.01),
    ],
)
def test_names_numbers_optimizers_and_factories_say_how_much_is_kept(optimizer, name, states):
    """SGD keeps nothing, with momentum one number, Adam two, and each of torch's options that keeps
    more one more.
    """
    assert optimizer_kind(optimizer) == OptimizerKind(name, states)


class Keeping(torch.optim.Optimizer):
    """Keeps five numbers for each parameter."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 1.0})

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["held"] = torch.zeros(5, *parameter.shape)


def test_an_optimizer_of_one_s_own_is_measured():
    """What makes it can be tried on a parameter of its own; one that has stepped holds what it
    keeps; one that has not is not known.
    """
    assert optimizer_kind(Keeping) == OptimizerKind("Keeping", 5)
    stepped = Keeping(weights())
    with pytest.raises(SettingError, match="how much memory Keeping takes is not known before it"):
        optimizer_kind(stepped)
    stepped.step()
    assert optimizer_kind(stepped) == OptimizerKind("Keeping", 5)


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        ("adm", "'adm' takes is not known. Did you mean 'adam'"),
        (-1, "optimizer=-1 is how many numbers it keeps for each parameter: it must be 0 or more"),
        (True, "a number of states, an optimizer or a function that makes one, not bool"),
        (lambda parameters: 3, "could not make and step an optimizer"),
        (torch.optim.LBFGS, "could not make and step an optimizer over one parameter"),
    ],
)
def test_what_is_not_known_is_refused(optimizer, message):
    """A guess would be memory that is not there."""
    with pytest.raises(SettingError, match=message):
        optimizer_kind(optimizer)


def test_plans_hold_what_the_optimizer_keeps(profile_of):
    """By its name in the plan, in the memory by holder, and in whether it fits."""
    link = Link(0.0, 1e12)
    profile = profile_of([1.0, 1.0], parameters=1000, activation=1.0)
    cluster = Cluster("c", (Device("d", 10**6),) * 2, 1, link, link)
    plan_of = {
        optimizer: plan(profile, cluster, 16, optimizer=optimizer, stages=2, max_replicas=1)
        for optimizer in (None, "sgd", "momentum", "adam", 7)
    }
    held = {
        key: dict(chosen_plan.predicted.memory_parts[0]).get("optimizer", 0)
        for key, chosen_plan in plan_of.items()
    }
    assert held == {None: 1000, "sgd": 0, "momentum": 1000, "adam": 2000, 7: 7000}
    assert (plan_of["adam"].optimizer, plan_of["adam"].optimizer_states) == ("Adam", 2.0)
    assert plan_of["adam"].memory_limits == (10**6, 10**6)
    assert "optimizer Adam, 2 numbers per parameter" in str(plan_of["adam"])
    limit = plan_of["momentum"].predicted.peak_memory[0] + 10
    plan(profile, cluster, 16, optimizer="sgd", stages=2, max_replicas=1, memory_limit=limit)
    with pytest.raises(PlanError, match="needs"):
        plan(profile, cluster, 16, optimizer="adam", stages=2, max_replicas=1, memory_limit=limit)


@pytest.mark.parametrize(
    ("name", "states"),
    [
        ("nesterov", 1),
        ("nadam", 2),
        ("radam", 2),
        ("adamax", 2),
        ("sparseadam", 2),
        ("adadelta", 2),
        ("rmsprop", 1),
        ("rprop", 2),
        ("asgd", 1),
        ("adam", 2),
        ("adagrad", 1),
    ],
)
def test_the_numbers_of_a_name_are_those_that_torchs_class_keeps(name, states):
    """Measured after one step; learning-rate products and step counts do not count."""
    kind = optimizer_kind(name)
    assert kind.states == states
    make = getattr(torch.optim, kind.name)
    options = {"momentum": 0.9, "nesterov": True} if name == "nesterov" else {}
    options |= {"lr": 0.1} if name != "adadelta" else {}
    measured = optimizer_kind(partial(make, **options))
    assert (measured.name, measured.states) == (kind.name, pytest.approx(states, abs=0.01))


def groups(*options):
    """Groups of one parameter each."""
    return [{"params": weights(), **expected} for expected in options]


def test_one_group_with_an_option_is_enough():
    """Memory is planned for the group that keeps most; a fused step is one for all it holds."""
    assert optimizer_kind(SGD(groups({"momentum": 0.9}, {}), lr=1)).states == 1
    assert optimizer_kind(ADAM(groups({}, {"amsgrad": True}))).states == 3
    assert optimizer_kind(ADAM(groups({}, {"fused": True}))).fused
    assert not optimizer_kind(ADAM(groups({}, {}))).fused

    def factory(parameters):
        return SGD([{"params": parameters, "fused": True}, *groups({})], lr=1)

    assert optimizer_kind(factory) == OptimizerKind("SGD", 0, fused=True)


def test_a_number_is_finite_and_a_factory_must_return_an_optimizer():
    """Anything with a step is no optimizer; the message names its type."""

    class Stepping:
        def step(self):
            pass

    with pytest.raises(SettingError, match="returned Stepping, which is not a torch optimizer"):
        optimizer_kind(lambda _: Stepping())
    with pytest.raises(SettingError, match="optimizer=inf is how many numbers"):
        optimizer_kind(float("inf"))
    assert optimizer_kind(0) == OptimizerKind("", 0.0)
    with pytest.raises(SettingError, match="not NoneType"):
        optimizer_kind(None)


def test_a_factory_without_torch_is_refused(monkeypatch):
    """Planning works without torch: a name or a number is enough."""
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(SettingError, match="torch is not loaded"):
        optimizer_kind(lambda parameters: parameters)
    assert optimizer_kind("adam").states == 2
