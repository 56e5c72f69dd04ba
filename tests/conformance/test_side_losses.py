"""Losses of inner layers count, wherever those layers stand."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import penstock as ps
from penstock.errors import StageFailed
from penstock.modules.side_loss import collecting_side_losses, side_loss


class Gate(nn.Module):
    """A layer with a loss of its own, as mixtures of experts have."""

    def __init__(self, width):
        super().__init__()
        self.gate = nn.Linear(width, 3)
        self.mix = nn.Linear(width, width)

    def forward(self, x):
        """The mean square of the gate is to be small."""
        weights = self.gate(x).softmax(-1)
        side_loss(0.1 * (weights.mean(0) ** 2).sum())
        return torch.tanh(self.mix(x)) * weights.amax(-1, keepdim=True)


def model():
    """Gates in the first, an inner and the last stage."""
    torch.manual_seed(0)
    return nn.Sequential(Gate(6), nn.Linear(6, 6), Gate(6), nn.Linear(6, 6), nn.Tanh(), Gate(6))


def plain(x, y, parts):
    """One device, the same micro-batches."""
    net = model()
    total = 0.0
    for own_x, own_y in zip(x.tensor_split(parts), y.tensor_split(parts), strict=True):
        with collecting_side_losses() as side_losses:
            loss = nn.functional.mse_loss(net(own_x), own_y)
            loss = sum(side_losses, loss)
        (loss * len(own_x) / len(x)).backward()
        total += float(loss.detach()) * len(own_x) / len(x)
    return total, {name: parameter.grad for name, parameter in net.named_parameters()}


@pytest.mark.parametrize("recompute", ["never", "except_last", "always"])
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "gpipe"])
def test_losses_and_gradients_are_those_of_one_device(schedule, recompute):
    """The second batch goes the short way, if any does; both add up."""
    x, y = torch.randn(7, 6, generator=torch.Generator().manual_seed(1)), torch.zeros(7, 6)
    net = model()
    pipe = ps.Pipeline(
        net,
        balance=[2, 2, 2],
        schedule=schedule,
        micro_batches=3,
        recompute=recompute,
        loss=nn.functional.mse_loss,
        executor="threads",
    )
    losses = [float(pipe.train_batch(x, y)) for _ in range(2)]
    expected, grads = plain(x, y, 3)
    assert losses == pytest.approx([expected] * 2)
    for name, parameter in net.named_parameters():
        torch.testing.assert_close(parameter.grad, 2 * grads[name], rtol=1e-5, atol=1e-7)


class Sometimes(nn.Module):
    """Has a side loss from its second batch on."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.runs = 0

    def forward(self, x):
        """Twice the batch's micro-batches without, then with."""
        self.runs += 1
        if self.runs > 4:
            side_loss((self.weight**2).mean())
        return x * self.weight


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_side_loss_that_comes_later_counts_from_then_on(place):
    """Nothing that a stage has learnt of its first micro-batches makes it deaf."""
    layers = [nn.Identity(), nn.Identity(), nn.Identity()]
    layers[place] = Sometimes()
    pipe = ps.Pipeline(
        nn.Sequential(*layers),
        balance=[1, 1, 1],
        schedule="1f1b",
        micro_batches=2,
        loss=nn.functional.mse_loss,
        executor="threads",
    )
    x = torch.ones(4, 4)
    losses = [float(pipe.train_batch(x, x)) for _ in range(4)]
    assert losses == [0.0, 0.0, 1.0, 1.0]
    assert torch.equal(layers[place].weight.grad, torch.full((4,), 2 * 2 / 4))


def test_a_side_loss_that_is_no_number_is_refused():
    """Its mean is not defined."""

    class Wrong(nn.Module):
        def forward(self, x):
            side_loss(x)
            return x

    pipe = ps.Pipeline(
        [nn.Linear(2, 2), Wrong()], balance=[2], schedule="gpipe", loss=nn.functional.mse_loss
    )
    with pytest.raises(StageFailed, match=r"a side loss is one number.*this one is \(3, 2\)"):
        pipe.train_batch(torch.ones(3, 2), torch.ones(3, 2))


def test_outside_a_pipeline_side_losses_are_dropped_unless_collected():
    """The model runs on its own too."""
    net = model()
    net(torch.ones(2, 6))
    with collecting_side_losses() as side_losses:
        net(torch.ones(2, 6))
    assert len(side_losses) == 3
