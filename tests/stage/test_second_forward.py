"""A stage compares the forward that it recomputes for the backward with the first one."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import penstock as ps
from penstock.errors import RunError


class Counting(nn.Module):
    """A layer whose output depends on the number of its calls, which no one restores."""

    def __init__(self, last_call_alike: int) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.calls = [0]
        self.last_call_alike = last_call_alike

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        """Double the output after the calls that are alike."""
        self.calls[0] += 1
        factor = 1 if self.calls[0] <= self.last_call_alike else 2
        return self.linear(value) * factor


def pipeline_with(layer: nn.Module) -> ps.Pipeline:
    """Return a pipeline of two stages that recompute all; the first has the layer."""
    return ps.Pipeline(
        nn.Sequential(layer, nn.Linear(4, 4)),
        balance=(1, 1),
        schedule="gpipe",
        micro_batches=2,
        loss=nn.functional.mse_loss,
        recompute="always",
        executor="threads",
        device="cpu",
    )


def test_a_forward_that_comes_to_something_else_is_refused():
    """Calls 1 and 2 are the forwards, and calls 3 and 4 recompute them."""
    x = torch.randn(4, 4)
    with pytest.raises(RunError, match="recomputed for the backward, the forward made"):
        pipeline_with(Counting(last_call_alike=2)).train_batch(x, x)
    assert pipeline_with(Counting(last_call_alike=4)).train_batch(x, x).isfinite()
