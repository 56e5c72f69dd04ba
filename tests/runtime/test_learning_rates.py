"""Learning rates, parameter groups and schedulers over the optimizers of all stages."""

from __future__ import annotations

import pytest
import torch
from tests.runtime.against_plain import (
    batch,
    furthest,
    grouped,
    model,
    no_decay,
    pipeline,
    plain_step,
    same_state,
    sgd,
)
from torch import nn
from torch.optim import lr_scheduler

import penstock as ps
from penstock.errors import SettingError


@pytest.mark.parametrize("schedule", ["1f1b", "chimera", "interleaved"])
def test_learning_rates_set_by_hand_hold_for_all_stages(schedule):
    """Warm-up and decay are often written without a scheduler."""
    network, plain = model(), model()
    pipe = pipeline(network, schedule=schedule, parameter_groups=no_decay)
    optimizer = sgd(grouped(plain))
    assert pipe.learning_rates == [0.1, 0.02]
    for number in range(6):
        if number == 2:
            pipe.set_learning_rate(0.03)
            for group in optimizer.param_groups:
                group["lr"] = 0.03
        if number == 3:
            pipe.set_learning_rate([0.04, 0.05])
            optimizer.param_groups[0]["lr"], optimizer.param_groups[1]["lr"] = 0.04, 0.05
        if number == 4:
            for groups in (pipe.param_groups, optimizer.param_groups):
                for group in groups:
                    group["lr"] *= 0.5
                groups[0]["momentum"] = 0.5
        pipe.train_batch(*batch(number))
        plain_step(plain, optimizer, number)
    assert furthest(network, plain) < 1e-12
    assert pipe.learning_rates == [0.02, 0.025]
    same_state(pipe.optimizer_state_dict(), optimizer.state_dict())


def test_learning_rates_that_are_tensors_change_once_and_not_once_for_every_stage():
    """All stages' optimizers once shared one tensor, which each stage's scheduler multiplied."""
    network, plain = model(), model()
    rate, other = torch.tensor(0.1, dtype=torch.float64), torch.tensor(0.1, dtype=torch.float64)
    pipe = pipeline(
        network, optimizer=lambda params: torch.optim.Adam(params, lr=rate, foreach=False)
    )
    optimizer = torch.optim.Adam(plain.parameters(), lr=other, foreach=False)
    scheduler = pipe.scheduler(lambda optimizer: lr_scheduler.ExponentialLR(optimizer, 0.5))
    reference = lr_scheduler.ExponentialLR(optimizer, 0.5)
    for number in range(3):
        pipe.train_batch(*batch(number))
        plain_step(plain, optimizer, number)
        scheduler.step()
        reference.step()
    for groups in (pipe.param_groups, optimizer.param_groups):
        groups[0]["lr"] *= 0.5
    pipe.train_batch(*batch(3))
    plain_step(plain, optimizer, 3)
    assert pipe.learning_rates == pytest.approx([0.1 / 16])
    assert furthest(network, plain) < 1e-12


def test_groups_and_learning_rates_that_cannot_be_set_are_refused():
    """The messages have the numbers and what to do."""
    pipe = pipeline(model(), parameter_groups=no_decay)
    with pytest.raises(SettingError, match="3 learning rates for 2 parameter groups"):
        pipe.set_learning_rate([0.1, 0.2, 0.3])
    with pytest.raises(SettingError, match=r"0 or above and finite, not -0\.1"):
        pipe.set_learning_rate(-0.1)
    with pytest.raises(SettingError, match="belong to the stages and cannot be replaced"):
        pipe.param_groups[0]["params"] = []
    assert len(pipe.param_groups[1]["params"]) == 4
    with pytest.raises(SettingError, match="this pipeline has no optimizer"):
        pipeline(model(), optimizer=None).set_learning_rate(0.1)

    def by_count(params):
        return sgd([{"params": [p]} for p in params] if len(params) < 4 else params)

    with pytest.raises(SettingError, match=r"have 1 and 2 parameter groups.*parameter_groups="):
        pipeline(model(), balance=[4, 2, 2], optimizer=by_count).set_learning_rate(0.1)


def test_learning_rates_by_hand_reach_the_optimizers_of_all_copies_of_an_asynchronous_rule():
    """Copies of the weights that take turns have optimizers of their own."""
    pipe = pipeline(model(), schedule="avgpipe")
    pipe.set_learning_rate(0.0)
    pipe.param_groups[0]["weight_decay"] = 0.0
    before = pipe.state_dict()
    list(pipe.train([batch(number) for number in range(6)]))
    after = pipe.state_dict()
    assert all(torch.allclose(after[name], value, atol=1e-12) for name, value in before.items())


def test_a_scheduler_in_place_of_a_function_or_over_another_optimizer_is_refused():
    """It would change a learning rate that no stage uses."""
    pipe, other = pipeline(model()), sgd(model().parameters())
    with pytest.raises(SettingError, match=r"lambda optimizer: StepLR\(optimizer, \.\.\.\)"):
        pipe.scheduler(lr_scheduler.StepLR(other, 2))
    with pytest.raises(SettingError, match="of another one: it ignores its argument"):
        pipe.scheduler(lambda optimizer: lr_scheduler.StepLR(other, 2))


def test_two_schedulers_on_a_rank_without_parameters_share_a_learning_rate():
    """Each once had its own there, so that a rank without parameters had another learning rate than
    its neighbours.
    """
    network = nn.Sequential(nn.Linear(6, 4), nn.Tanh()).double()
    pipe = pipeline(network, balance=[1, 1])
    first = pipe._assembly.optimizers()
    assert pipe._assembly.optimizers()[0] is first[0]
    alone = ps.Pipeline(
        nn.Sequential(nn.Tanh(), nn.ReLU()),
        loss=lambda o, t: o.mean(),
        optimizer=torch.optim.SGD,
        balance=[1, 1],
        executor="threads",
    )
    one = alone.scheduler(lambda optimizer: lr_scheduler.ExponentialLR(optimizer, 0.5))
    two = alone.scheduler(lambda optimizer: lr_scheduler.ExponentialLR(optimizer, 0.1))
    one.step()
    two.step()
    assert alone.learning_rates == pytest.approx([0.001 * 0.5 * 0.1])
