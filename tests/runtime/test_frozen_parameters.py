"""Parameters that are frozen and thawed while a pipeline trains, against plain PyTorch."""

from __future__ import annotations

import pytest
import torch
from tests.runtime.against_plain import (
    SCHEDULES,
    batch,
    furthest,
    model,
    pipeline,
    plain_step,
    same_state,
    sgd,
)
from torch import nn
from torch.nn import functional

import penstock as ps
from penstock.errors import SettingError

CHANGES = {
    "a layer thawed, one frozen": ((0,), (6,)),
    "whole stages thawed": ((2, 4, 6), (0,)),
    "thawed and frozen again": ((0, 2, 4), (2,)),
}


OPTIONS = {
    "plain": {},
    "recompute": {"recompute": "always"},
    "norm": {"clip_grad_norm": 0.05},
    "value": {"clip_grad_value": 0.01},
}


def changes_and_options():
    """Schedules, tied weights, changes and options, of which any two meet."""
    for row, schedule in enumerate(SCHEDULES):
        for column, options in enumerate(OPTIONS):
            tied = bool((row + column // 2) % 2)
            change = list(CHANGES)[(row + column) % len(CHANGES)]
            name = f"{schedule}-{'tied' if tied else 'apart'}-{change}-{options}"
            yield pytest.param(schedule, tied, change, options, id=name)


@pytest.mark.parametrize(("schedule", "tied", "change", "options"), [*changes_and_options()])
def test_layers_frozen_and_thawed_while_training_are_trained_as_in_plain_pytorch(
    schedule, tied, change, options
):
    """Gradual unfreezing: layers that were frozen at first were never trained, 18 % off."""
    network, plain = model(tied), model(tied)
    frozen, later = CHANGES[change]

    def set_flags(layers, flag):
        for index in layers:
            network[index].requires_grad_(flag)
            plain[index].requires_grad_(flag)

    set_flags(frozen, False)
    chosen = OPTIONS[options]
    pipe, optimizer = pipeline(network, schedule=schedule, **chosen), sgd(plain.parameters())
    clips = {
        "norm": lambda parameters: torch.nn.utils.clip_grad_norm_(parameters, 0.05),
        "value": lambda parameters: torch.nn.utils.clip_grad_value_(parameters, 0.01),
    }
    for number in range(4):
        if number == 1:
            set_flags(frozen, True)
            set_flags(later, False)
        if number == 3:
            set_flags(later, True)
        pipe.train_batch(*batch(number))
        plain_step(plain, optimizer, number, clip=clips.get(options, lambda parameters: None))
    assert furthest(network, plain) < 1e-12
    same_state(pipe.optimizer_state_dict(), optimizer.state_dict())
    assert pipe.compare_with_one_device(*batch(9)).relative < 1e-6


def test_accumulated_gradients_of_layers_frozen_in_between_are_used():
    """Plain PyTorch steps with all gradients that exist."""
    network, plain = model(), model()
    pipe, optimizer = pipeline(network, accumulate=2), sgd(plain.parameters())
    for number in range(6):
        network[2].requires_grad_(number % 3 == 0)
        plain[2].requires_grad_(number % 3 == 0)
        x, y = batch(number)
        pipe.train_batch(x, y)
        (functional.cross_entropy(plain(x), y) / 2).backward()
        if number % 2:
            optimizer.step()
            optimizer.zero_grad()
    assert furthest(network, plain) < 1e-12


def test_layers_of_a_model_on_the_meta_device_are_thawed_by_the_model_and_by_the_pipeline():
    """The stages have parameters other than the model's there."""
    with torch.device("meta"):
        network = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 4), nn.Linear(4, 4))
    network.requires_grad_(False)
    pipe = ps.Pipeline(
        network, loss=functional.cross_entropy, optimizer=sgd, balance=[1, 1, 1], executor="threads"
    )
    x, y = batch()
    before = pipe.state_dict()
    network[2].requires_grad_(True)
    dict(pipe.named_parameters())["0.weight"].requires_grad_(True)
    pipe.train_batch(x.float(), y)
    after = pipe.state_dict()
    changed = [name for name, value in before.items() if not torch.equal(value, after[name])]
    assert changed == ["0.weight", "2.weight", "2.bias"]


@pytest.mark.parametrize("schedule", ["1f1b", "chimera"])
def test_a_checkpoint_has_the_state_of_what_was_thawed(schedule, tmp_path):
    """The state is saved by name, and loaded under another cut."""
    network, plain = model(tied=True), model(tied=True)
    network[0].requires_grad_(False)
    plain[0].requires_grad_(False)
    pipe, optimizer = pipeline(network, schedule=schedule), sgd(plain.parameters())
    for number in range(4):
        network[0].requires_grad_(number > 1)
        plain[0].requires_grad_(number > 1)
        pipe.train_batch(*batch(number))
        plain_step(plain, optimizer, number)
    pipe.save(tmp_path)
    other = model(tied=True, seed=3)
    again = pipeline(other, balance=[3, 3, 1, 1])
    again.load(tmp_path)
    again.train_batch(*batch(4))
    plain_step(plain, optimizer, 4)
    assert furthest(other, plain) < 1e-12
    same_state(again.optimizer_state_dict(), optimizer.state_dict())


def test_thawing_under_an_asynchronous_schedule_is_refused():
    """Its weight versions are those of the parameters that were trained at first."""
    network = model()
    network[0].requires_grad_(False)
    pipe = pipeline(network, schedule="pipedream")
    list(pipe.train([batch(0), batch(1)]))
    network[0].weight.requires_grad_(True)
    with pytest.raises(
        SettingError, match=r"^0\.weight had requires_grad=False .* pipedream is asyn"
    ):
        pipe.train_batch(*batch(2))
    network[0].weight.requires_grad_(False)
    network[2].requires_grad_(False)
    list(pipe.train([batch(2)]))
