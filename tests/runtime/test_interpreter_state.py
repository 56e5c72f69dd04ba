"""What an interpreter holds after a failed batch, and what it counts as its peak memory."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from tests.runtime.scripted import (
    Ranks,
    replica_group,
)
from torch import nn

import penstock as ps
from penstock.errors import StageFailed
from penstock.runtime.interpreter import Interpreter


class FailsOnNegative(nn.Module):
    """A layer that raises for negative input."""

    def forward(self, x):
        """Return the input."""
        if bool((x < 0).any()):
            raise ValueError("negative")
        return x


@pytest.fixture
def replicated():
    """A pipeline of one stage with two replicas."""
    torch.manual_seed(0)
    pipe = ps.Pipeline(
        nn.Sequential(FailsOnNegative(), nn.Linear(4, 4)),
        balance=(2,),
        schedule=ps.Schedule.parse("0F0 0B0 0U1\n0F1 0B1 0U1"),
        loss=nn.functional.mse_loss,
        optimizer=lambda parameters: torch.optim.Adam(parameters, lr=0.1),
        accumulate=2,
        executor="threads",
        device="cpu",
    )
    yield pipe
    pipe.close()


def test_gradients_that_replicas_set_aside_for_a_failed_batch_are_dropped(replicated):
    """They would be added to the sum of a later batch, a second time."""
    good, bad = torch.ones(4, 4), -torch.ones(4, 4)
    replicated.train_batch(good, good)
    with pytest.raises(StageFailed, match="negative"):
        replicated.train_batch(bad, bad)
    for interpreter in replicated._assembly.interpreters.values():
        assert interpreter.replicas[0]._previous is None


def test_peak_memory_has_the_states_of_all_optimizers_of_a_weight_rule(replicated):
    """Elastic averaging has an optimizer per replica of the weights."""
    parameter = nn.Parameter(torch.zeros(10))
    parameter.grad = torch.ones(10)
    more = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)
    more.step()
    interpreter = replicated._assembly.interpreters[0]

    def peak_bytes(optimizers):
        """Return the peak with a rule that has these optimizers besides the stage's."""
        rule = SimpleNamespace(held_bytes=lambda: 0, more_optimizers=lambda: optimizers)
        return interpreter.peak_bytes({0: rule})

    assert peak_bytes([more, more]) - peak_bytes([]) == 2 * 10 * 4


def test_peak_memory_is_the_sum_of_all_that_a_rank_holds():
    """A tensor of two stages counts once, the newest of a rule's versions are the parameters."""
    ranks = Ranks("0F0 1F0 1B0 0B0")
    interpreter: Interpreter = ranks.interpreters[0]
    log = ranks.logs[0]
    tied, weight, other, buffer = (nn.Parameter(torch.zeros(size)) for size in (3, 5, 7, 11))
    optimizer = SimpleNamespace(state={weight: {"step": 1, "momentum_buffer": torch.ones(5)}})
    for index, tensors, trained, borrowed in (
        (0, [weight, tied, buffer], [weight, tied], []),
        (1, [other, tied], [other], [tied]),
    ):
        stage = interpreter.stages[index]
        stage.tensors = lambda tensors=tensors: tensors
        stage.update.parameters, stage.update.borrowed = trained, borrowed
    interpreter.stages[0].update.optimizer = optimizer
    interpreter.activation_meter.take(1000)
    interpreter.activation_meter.give(1000)
    weights, gradients, momentum = 4 * (3 + 5 + 7 + 11), 4 * (3 + 5 + 7), 4 * 5
    held = 1000 + weights + gradients + momentum
    assert interpreter.peak_bytes({}) == held
    interpreter.replicas = {0: replica_group(log, 0, 10_000), 1: replica_group(log, 1, 20_000)}
    interpreter.parallel = {1: SimpleNamespace(gathered_bytes=100_000)}
    assert interpreter.peak_bytes({}) == held + 130_000
    # Two versions of the stage's one parameter of 7 numbers.
    rule = SimpleNamespace(held_bytes=lambda: 2 * 28, more_optimizers=lambda: [optimizer])
    assert interpreter.peak_bytes({1: rule}) == held + 130_000 + 28 + momentum
    # A weight that the rank only uses has a gradient, too, which goes to the rank of its home.
    interpreter.replicas = interpreter.parallel = {}
    interpreter.stages[0].update.parameters = [weight]
    assert interpreter.peak_bytes({}) == held
    interpreter.stages[1].update.borrowed = []
    assert interpreter.peak_bytes({}) == held - 4 * 3


def test_of_shared_layers_only_the_parts_of_this_process_count_as_memory():
    """Weights and gradients; the whole layers are on no process."""
    ranks = Ranks("0F0 0B0")
    interpreter: Interpreter = ranks.interpreters[0]
    stage = interpreter.stages[0]
    part = SimpleNamespace(elem=torch.zeros(3), nbytes=4 * 12)
    stage.tensors = lambda: [part]
    stage.update.parameters, stage.update.borrowed = [part], [part]
    assert interpreter.peak_bytes({}) == 4 * (3 + 3)
