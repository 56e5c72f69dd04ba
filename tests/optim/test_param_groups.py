"""Parameter groups of several stages, read and written like those of one optimizer."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.optim import SGD

from penstock.errors import SettingError
from penstock.optim.param_groups import (
    parameter_groups_of,
    separate_tensors,
    set_learning_rates,
)


def optimizers(lr=0.1, count=2):
    """Return optimizers of two groups each."""
    return [
        SGD(
            [
                {"params": [nn.Parameter(torch.ones(1))], "lr": lr},
                {"params": [nn.Parameter(torch.ones(2))], "lr": lr, "momentum": 0.5},
            ],
            lr=0.1,
        )
        for _ in range(count)
    ]


def test_a_group_reads_the_first_stage_and_writes_to_all():
    """Its parameters are those of all stages."""
    stages = optimizers()
    first, second = parameter_groups_of(stages)
    assert second["momentum"] == 0.5
    assert [len(p) for p in second["params"]] == [2, 2]
    assert [id(p) for p in first["params"]] == [
        id(stage.param_groups[0]["params"][0]) for stage in stages
    ]
    second["momentum"] = 0.75
    assert [stage.param_groups[1]["momentum"] for stage in stages] == [0.75, 0.75]
    assert [stage.param_groups[0]["momentum"] for stage in stages] == [0, 0]
    second["extra"] = 1
    del second["extra"]
    assert all("extra" not in stage.param_groups[1] for stage in stages)
    with pytest.raises(KeyError):
        del second["extra"]
    assert set(second) == set(stages[0].param_groups[1])
    assert len(second) == len(stages[0].param_groups[1])
    assert "params" not in repr(second)
    with pytest.raises(SettingError, match="cannot be replaced"):
        second["params"] = []


def test_optimizers_with_other_numbers_of_groups_have_none_in_common():
    """The message has the numbers."""
    one = SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    with pytest.raises(SettingError, match="1 and 2 parameter groups"):
        parameter_groups_of([*optimizers(), one])


@pytest.mark.parametrize(("rates", "expected"), [(0.5, [0.5, 0.5]), ([0.25, 0.0], [0.25, 0.0])])
def test_learning_rates_are_one_for_all_or_one_for_each_group(rates, expected):
    """On every stage."""
    stages = optimizers()
    set_learning_rates(parameter_groups_of(stages), rates)
    for stage in stages:
        assert [group["lr"] for group in stage.param_groups] == expected


@pytest.mark.parametrize(
    "rates", [[0.1], [0.1, 0.2, 0.3], -0.1, float("inf"), float("nan"), [0.1, -1e-9]]
)
def test_learning_rates_that_are_none_change_nothing(rates):
    """Too few, too many, negative or not finite."""
    stages = optimizers()
    with pytest.raises(SettingError, match="learning rate"):
        set_learning_rates(parameter_groups_of(stages), rates)
    assert all(group["lr"] == 0.1 for stage in stages for group in stage.param_groups)


def test_an_optimizer_without_learning_rates_is_refused():
    """Before any group has a new one."""
    (stage,) = optimizers(count=1)
    del stage.param_groups[1]["lr"]
    with pytest.raises(SettingError, match="no option lr"):
        set_learning_rates(parameter_groups_of([stage]), 0.5)
    assert stage.param_groups[0]["lr"] == 0.1


def test_a_rate_that_is_a_tensor_keeps_its_memory():
    """A captured graph reads it; and no two stages share one, which schedulers would change twice."""
    rate = torch.tensor(0.1)
    stages = optimizers(lr=rate)
    separate_tensors(stages)
    first, second = (stage.param_groups[0]["lr"] for stage in stages)
    assert first is rate
    assert second is not rate
    assert stages[0].param_groups[1]["lr"] is rate, "within an optimizer it stays shared"
    set_learning_rates(parameter_groups_of(stages), 0.5)
    assert [stage.param_groups[0]["lr"] for stage in stages] == [first, second]
    assert first is stages[0].param_groups[0]["lr"]
    assert [float(first), float(second)] == [0.5, 0.5]
    plain = optimizers()
    given = torch.tensor(0.25)
    parameter_groups_of(plain)[0]["lr"] = given
    values = [stage.param_groups[0]["lr"] for stage in plain]
    assert [float(value) for value in values] == [0.25, 0.25]
    assert values[0] is not values[1]
    assert all(value is not given for value in values)


def test_options_that_differ_between_stages_are_read_from_the_first():
    """A user may have written them to one stage's optimizer."""
    stages = optimizers(count=3)
    for number, stage in enumerate(stages):
        stage.param_groups[0]["lr"] = float(number)
    first, _ = parameter_groups_of(stages)
    assert first["lr"] == 0.0


def test_a_rate_that_requires_a_gradient_can_be_set():
    """A differentiable optimizer has such rates; the write is no part of a graph."""
    rate = torch.tensor(0.1, requires_grad=True)
    (stage,) = optimizers(count=1)
    stage.param_groups[0]["lr"] = rate
    parameter_groups_of([stage])[0]["lr"] = 0.5
    assert stage.param_groups[0]["lr"] is rate
    assert (rate.item(), rate.grad_fn) == (0.5, None)
