"""The model's state under its own names, independent of the cut."""

from __future__ import annotations

import pytest
import torch
from tests.conformance.models import CASES, lengths_of, made
from tests.conformance.random_programs import random_schedule
from tests.conformance.reference import differences, layers_of
from torch import nn

import penstock as ps
from penstock.errors import SettingError


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("seed", [2, 5, 9])
def test_the_state_is_the_models_own_under_any_placement(name, seed):
    """Names, order of ranks and stages, buffers: none depends on the cut."""
    case = CASES[name]
    model, _, _ = made(case)
    schedule = random_schedule(seed, 4, 3, 2)
    pipe = ps.Pipeline(
        model,
        loss=case.loss,
        balance=lengths_of(len(layers_of(model)), 4),
        schedule=schedule,
        executor="threads",
    )
    state = pipe.state_dict()
    assert differences(state, dict(model.state_dict())) == []
    next(iter(state.values())).add_(1)
    assert differences(state, dict(model.state_dict())) != []  # it is a copy


def test_a_state_is_loaded_completely_or_not_at_all():
    """A partly loaded state would be a mixture of two models."""
    model, _, _ = made(CASES["mlp"])
    pipe = ps.Pipeline(model, loss=CASES["mlp"].loss, balance=[3, 4], executor="threads")
    before = pipe.state_dict()
    values = {name: tensor + 1 for name, tensor in before.items()}
    with pytest.raises(SettingError, match=r"it has no 'fc4\.bias'\. With strict=False"):
        pipe.load_state_dict(
            {name: tensor for name, tensor in values.items() if name != "fc4.bias"}
        )
    with pytest.raises(
        SettingError, match=r"fc3\.weight has shape \(2,\) in the state and \(16, 16\) in the model"
    ):
        pipe.load_state_dict({**values, "fc3.weight": torch.zeros(2)})
    assert differences(pipe.state_dict(), before) == []
    pipe.load_state_dict(values)
    assert differences(pipe.state_dict(), values) == []


def test_tied_weights_have_both_names_and_lists_of_modules_have_numbers():
    """As in torch's own state_dict of the same model."""
    layers = [nn.Linear(4, 4), nn.Linear(4, 4), nn.BatchNorm1d(4)]
    layers[1].weight = layers[0].weight
    pipe = ps.Pipeline(layers, loss=nn.MSELoss(), balance=[2, 1], executor="threads")
    assert list(pipe.state_dict()) == list(nn.Sequential(*layers).state_dict())
