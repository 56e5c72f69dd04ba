"""A side loss counts by the samples of its micro-batch, also where the loss counts otherwise."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

import penstock as ps
from penstock.modules.side_loss import collecting_side_losses, side_loss


class Penalised(nn.Module):
    """A linear layer that adds the mean square of its output to the loss."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x):
        """Apply the layer."""
        output = self.linear(x)
        side_loss(output.square().mean())
        return output


def model():
    """Return two layers, the second with a side loss."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), Penalised())


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_ignored_targets_change_the_weight_of_the_loss_and_not_of_the_side_loss(schedule):
    """One micro-batch has 1 target of 4 that counts, the other all 4: the loss is weighed 1 : 4,
    the side losses by their samples, 1 : 1.
    """
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
    y = torch.tensor([0, -100, -100, -100, 1, 2, 0, 1])
    net = model()
    pipe = ps.Pipeline(
        net,
        balance=[1, 1],
        schedule=schedule,
        micro_batches=2,
        loss=functional.cross_entropy,
        executor="threads",
        device="cpu",
    )
    pipe.train_batch(x, y)
    plain = model()
    for part, weight in ((slice(0, 4), 1 / 5), (slice(4, 8), 4 / 5)):
        with collecting_side_losses() as side_losses:
            loss = functional.cross_entropy(plain(x[part]), y[part])
        (weight * loss + sum(side_losses) / 2).backward()
    for parameter, expected in zip(net.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, expected.grad)
