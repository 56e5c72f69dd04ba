"""What an interpreter holds after a failed batch, and what it counts as its peak memory."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

import penstock as ps
from penstock.errors import StageFailed


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
