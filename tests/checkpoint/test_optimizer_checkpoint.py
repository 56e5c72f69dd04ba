"""State of optimizers and weight rules by the names of parameters: it is saved as a copy, and
restored into any stage that has the parameter.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from tests.conformance.reference import differences
from torch import nn
from torch.optim import SGD, Adam, AdamW

from penstock.checkpoint.optimizer_checkpoint import (
    Facts,
    names_of,
    optimizer_state,
    restore_optimizer,
    restore_rule,
    rule_state,
)
from penstock.errors import SettingError
from penstock.optim.update import Update


class Model(nn.Module):
    """Two layers with a common weight, a frozen bias, and a convolution in channels_last."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a = nn.Linear(3, 3)
        self.b = nn.Linear(3, 3)
        self.b.weight = self.a.weight
        self.b.bias.requires_grad_(False)
        self.c = nn.Conv2d(2, 2, 2, bias=False).to(memory_format=torch.channels_last)


def stage_of(model, factory):
    """Return what is read of a stage: its layers, and its update."""
    layers = [SimpleNamespace(name=name, module=module) for name, module in model.named_children()]
    parameters = list(model.parameters())
    return SimpleNamespace(layers=layers, update=Update.make(parameters, factory))


def adam(params):
    """Adam with another learning rate for biases."""
    return Adam(
        [
            {"params": [p for p in params if p.dim() > 1], "lr": 0.02},
            {"params": [p for p in params if p.dim() < 2], "betas": (0.5, 0.25)},
        ],
        lr=0.1,
        amsgrad=True,
    )


def trained(factory=adam, steps=2):
    """Return a stage after some steps."""
    stage = stage_of(Model(), factory)
    for number in range(steps):
        for parameter in stage.update.parameters:
            parameter.grad = torch.full_like(parameter, 0.5 + number)
        stage.update.step()
    return stage


def facts_of(raw):
    """Return plain state as it comes back from a file."""
    return {name: Facts(**fields) for name, fields in raw.items()}


def below(prefix, tensors):
    """Return entries by the rest of their names."""
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}


# -- saving --------------------------------------------------------------------------------------


def test_parameters_have_the_first_of_their_names_frozen_ones_included():
    """They may be trained later; parameters that another stage steps are none of this one."""
    stage = stage_of(Model(), adam)
    names = list(names_of(stage).values())
    assert names == ["a.weight", "a.bias", "b.bias", "c.weight"]
    stage.update = Update.make(
        stage.update.candidates, adam, borrowed=[stage.layers[0].module.weight]
    )
    assert list(names_of(stage).values()) == ["a.bias", "b.bias", "c.weight"]


@pytest.mark.parametrize("prefix", ["", "copy-2/"])
def test_state_is_saved_by_prefix_parameter_and_key(prefix):
    """Groups have their numbers and options; a parameter without state has facts all the same."""
    stage = trained()
    tensors, facts = optimizer_state(stage, prefix)
    keys = ("step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq")
    state = stage.update.optimizer.state
    expected = {
        f"{prefix}optimizer/{name}/{key}": state[parameter][key]
        for parameter, name in names_of(stage).items()
        for key in keys
        if name != "b.bias"
    }
    assert differences(tensors, expected) == []
    assert list(facts) == [
        f"{prefix}{name}" for name in ("a.weight", "c.weight", "a.bias", "b.bias")
    ]
    assert [row["group"] for row in facts.values()] == [0, 0, 1, 1]
    assert {row["kind"] for row in facts.values()} == {"torch.optim.adam.Adam"}
    weight, bias = facts[f"{prefix}a.weight"], facts[f"{prefix}b.bias"]
    assert (weight["options"]["lr"], weight["options"]["betas"]) == (0.02, (0.9, 0.999))
    assert (bias["options"]["lr"], bias["options"]["betas"]) == (0.1, (0.5, 0.25))
    assert "params" not in weight["options"]
    assert (weight["state"], bias["state"]) == ({}, {})


def test_what_is_saved_is_a_dense_copy_of_its_moment():
    """Training goes on while the copy is written."""
    stage = trained()
    tensors, _ = optimizer_state(stage, "")
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    for parameter in stage.update.parameters:
        parameter.grad = torch.ones_like(parameter)
    stage.update.step()
    assert differences(tensors, before) == []
    assert all(tensor.is_contiguous() and not tensor.requires_grad for tensor in tensors.values())


def test_plain_values_are_saved_as_they_are_and_scalar_options_as_numbers():
    """Numbers, texts, flags and lists of these; other options are no part of a file."""
    stage = stage_of(Model(), lambda params: AdamW(params, lr=torch.tensor(0.25), foreach=False))
    (group,) = stage.update.optimizer.param_groups
    group.update(
        schedule=("warm", [1, None, True]), hook=print, mixed=[1, print], rates=torch.ones(2)
    )
    parameter = stage.layers[0].module.weight
    plain = {"count": 3, "mode": "fast", "flag": False, "best": None, "past": [1.5, (2,)]}
    stage.update.optimizer.state[parameter] = plain | {"moment": torch.ones(3, 3)}
    tensors, facts = optimizer_state(stage, "")
    assert list(tensors) == ["optimizer/a.weight/moment"]
    assert facts["a.weight"]["state"] == plain
    options = facts["a.bias"]["options"]
    assert (options["lr"], type(options["lr"])) == (0.25, float)
    assert options["schedule"] == ("warm", [1, None, True])
    assert not {"params", "hook", "mixed", "rates"} & options.keys()


@pytest.mark.parametrize(
    ("value", "kind"),
    [({"a": 1}, "dict"), ([torch.ones(1)], "list"), (1j, "complex"), (print, "b")],
)
def test_a_value_that_files_cannot_hold_is_refused_with_its_place(value, kind):
    """Training would resume without it."""
    stage = stage_of(Model(), lambda params: SGD(params, lr=0.1))
    stage.update.optimizer.state[stage.layers[1].module.bias] = {"history": value}
    with pytest.raises(
        SettingError,
        match=rf"^SGD keeps a {kind}\w* as 'history' of b\.bias: a checkpoint can hold tensors and "
        "plain numbers$",
    ):
        optimizer_state(stage, "")


def test_a_stage_without_an_optimizer_has_no_state():
    """A user may update by hand."""
    assert optimizer_state(stage_of(Model(), None), "copy-1/") == ({}, {})


# -- restoring -----------------------------------------------------------------------------------


def test_a_restored_optimizer_continues_to_the_bit_with_state_of_its_own():
    """In the memory format of the parameters; two stages may restore the same tensors."""
    saved = trained()
    tensors, facts = optimizer_state(saved, "")
    tensors = below("optimizer/", tensors)
    others = [trained(steps=1), stage_of(Model(), adam)]
    for other in others:
        for target, source in zip(other.update.candidates, saved.update.candidates, strict=True):
            target.data.copy_(source.data)
        optimizer = other.update.optimizer
        for group in optimizer.param_groups:
            group.update(lr=7.0, betas=(0.1, 0.1))
        restore_optimizer(optimizer, names_of(other), tensors, facts_of(facts))
        again, facts_again = optimizer_state(other, "")
        assert differences(below("optimizer/", again), tensors) == []
        assert facts_again == facts
        moment = optimizer.state[other.layers[2].module.weight]["exp_avg"]
        assert moment.is_contiguous(memory_format=torch.channels_last)
        assert not moment.requires_grad
    for stage in (saved, *others):
        for parameter in stage.update.parameters:
            parameter.grad = torch.full_like(parameter, -0.25)
        stage.update.step()
        for parameter, expected in zip(
            stage.update.candidates, saved.update.candidates, strict=True
        ):
            assert torch.equal(parameter, expected)


def test_parameters_without_saved_state_begin_anew_and_keep_their_options():
    """Such as those that were frozen, or that another optimizer trained."""
    stage = trained(lambda params: SGD(params, lr=0.1, momentum=0.9))
    names = names_of(stage)
    tensors, facts = optimizer_state(stage, "")
    remaining = {"c.weight": facts_of(facts)["c.weight"]}
    moments = below("optimizer/", tensors)
    restore_optimizer(stage.update.optimizer, names, moments, remaining)
    state = stage.update.optimizer.state
    assert [names[parameter] for parameter in state] == ["c.weight"]
    restore_optimizer(stage.update.optimizer, names, {}, {"c.weight": Facts({"lr": 0.5}, {})})
    assert stage.update.optimizer.param_groups[0]["lr"] == 0.5
    assert len(state) == 0
    restore_optimizer(stage.update.optimizer, names, {}, {})
    assert stage.update.optimizer.param_groups[0]["lr"] == 0.5


def test_plain_state_comes_back_beside_tensors_and_counters_stay_on_the_host():
    """A counter of a parameter of one number has its shape, and its own dtype."""
    parameter = nn.Parameter(torch.ones(()))
    optimizer = SGD([parameter], lr=0.1)
    plain = {"count": 3, "mode": "fast"}
    tensors = {"x.y/step": torch.tensor(4, dtype=torch.int64), "x.y/past": torch.ones(2)}
    facts = {"x.y": Facts({}, plain)}
    restore_optimizer(optimizer, {parameter: "x.y"}, tensors, facts)
    state = optimizer.state[parameter]
    assert state.keys() == {"count", "mode", "step", "past"}
    assert (state["count"], state["mode"], state["step"].item()) == (3, "fast", 4)
    assert state["step"].dtype is torch.int64
    state["past"].zero_()
    state["step"].zero_()
    state["count"] = 9
    assert (tensors["x.y/past"].sum(), tensors["x.y/step"], plain["count"]) == (2, 4, 3)


def test_options_come_back_where_the_group_has_them_and_tensors_stay_tensors():
    """An option of another version of torch would be an unknown one here."""
    parameter = nn.Parameter(torch.ones(2))
    rate = torch.tensor(0.5, dtype=torch.float64)
    optimizer = AdamW([parameter], lr=rate, foreach=False)
    saved = {"lr": 0.125, "betas": [0.5, 0.75], "eps": 1e-3, "unknown": 1, "params": [1]}
    restore_optimizer(optimizer, {parameter: "w"}, {}, {"w": Facts(saved, {})})
    (group,) = optimizer.param_groups
    assert (group["lr"].item(), group["lr"].dtype) == (0.125, torch.float64)
    assert (tuple(group["betas"]), group["eps"]) == ((0.5, 0.75), 1e-3)
    assert "unknown" not in group
    assert group["params"] == [parameter]
    assert rate.item() == 0.5


# -- weight rules --------------------------------------------------------------------------------


class Rule:
    """A weight rule with state by parameter, and numbers."""

    def __init__(self, state=None, facts=None):
        self.rows, self.numbers = state or {}, facts or {}

    def state(self):
        """Return tensors by key, one for each parameter."""
        return self.rows

    def facts(self):
        """Return numbers by key."""
        return self.numbers

    def load_state(self, state):
        """Note what is loaded."""
        self.rows = state

    def load_facts(self, facts):
        """Note what is loaded."""
        self.numbers = facts


@pytest.mark.parametrize("prefix", ["", "copy-1/"])
def test_state_of_a_rule_comes_back_by_parameter_with_gaps_and_numbers_in_full(prefix):
    """A number of updates has more digits than a float32; a tensor of each parameter is a copy."""
    stage = stage_of(Model(), adam)
    weight, bias, convolution = stage.update.parameters
    trend = [torch.rand(3, 3), None, torch.rand_like(convolution)]
    count = [None, torch.tensor([1, 2, 3]), None]
    age = [torch.tensor(4.0), None, None]
    numbers = {"updates": 2.0**24 + 1, "rate": 0.1}
    saved = rule_state(stage, Rule({"trend": trend, "count": count, "age": age}, numbers), prefix)
    assert list(saved) == [
        f"{prefix}weights/{name}"
        for name in (
            *("a.weight/trend", "c.weight/trend", "a.bias/count", "a.weight/age"),
            *("updates", "rate"),
        )
    ]
    assert all(tensor.is_contiguous() for tensor in saved.values())
    trend[0].zero_()
    other = Rule()
    restore_rule(stage, other, below(f"{prefix}weights/", saved))
    assert other.numbers == numbers
    assert other.rows.keys() == {"trend", "count", "age"}
    assert other.rows["age"][0].item() == 4.0
    loaded = other.rows["trend"]
    assert [tensor is None for tensor in loaded] == [False, True, False]
    assert torch.equal(loaded[0], saved[f"{prefix}weights/a.weight/trend"])
    assert loaded[0].sum() > 0
    assert torch.equal(loaded[2], trend[2])
    assert loaded[2].is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(other.rows["count"][1], torch.tensor([1, 2, 3]))
    loaded[0].zero_()
    assert saved[f"{prefix}weights/a.weight/trend"].sum() > 0
    assert (weight.shape, bias.shape) == ((3, 3), (3,))


def test_state_of_other_parameters_is_not_taken():
    """Of a stage with other layers; a rule without saved state is told so."""
    stage = stage_of(Model(), adam)
    rule = Rule({"old": []}, {"updates": 3})
    restore_rule(stage, rule, {"aa.weight/trend": torch.ones(3, 3), "weight/trend": torch.ones(1)})
    assert (rule.rows, rule.numbers) == ({}, {})
    assert rule_state(stage, Rule(), "") == {}
