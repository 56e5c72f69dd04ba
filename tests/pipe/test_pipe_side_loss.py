"""Side losses in a Pipe: they are added to the caller's loss, and cannot be forgotten."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional

import penstock as ps
from penstock.errors import RunError
from penstock.modules.side_loss import collecting_side_losses


class Penalised(nn.Module):
    """A linear map with a penalty on what it makes, a mean over samples."""

    def __init__(self, weight=0.3):
        super().__init__()
        self.map, self.weight = nn.Linear(5, 5), weight

    def forward(self, x):
        """The map."""
        output = torch.tanh(self.map(x))
        ps.side_loss(self.weight * output.square().mean())
        return output


def model():
    """Penalties at the beginning and further on."""
    torch.manual_seed(0)
    return nn.Sequential(Penalised(), nn.Linear(5, 5), Penalised(0.7), nn.Linear(5, 5))


def plain_step(net, x, y, scale=1.0):
    """Loss plus mean side losses in plain PyTorch: its value, and gradients on the model."""
    with collecting_side_losses() as sides:
        loss = functional.mse_loss(net(x), y)
    total = loss + sum(sides)
    (total * scale).backward()
    return total.detach(), sum(sides).detach()


@pytest.mark.parametrize("samples", [8, 7])
@pytest.mark.parametrize("checkpoint", ["never", "except_last", "always"])
def test_side_losses_count_as_in_plain_training(checkpoint, samples):
    """They were dropped. Micro-batches that are not equally large count by their samples; a scaled
    loss scales them.
    """
    net = model()
    plain = copy.deepcopy(net)
    pipe = ps.Pipe(net, balance=[1, 2, 1], devices=["cpu"] * 3, chunks=3, checkpoint=checkpoint)
    x, y = torch.randn(samples, 5), torch.randn(samples, 5)
    expected, sides = plain_step(plain, x, y, scale=8.0)
    for _ in range(2):
        net.zero_grad()
        total = functional.mse_loss(pipe(x), y) + pipe.side_loss
        (total * 8.0).backward()
        torch.testing.assert_close(total.detach(), expected)
        torch.testing.assert_close(pipe.side_loss.detach(), sides)
        for parameter, other in zip(net.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(parameter.grad, other.grad)


@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_a_loss_without_them_is_refused(checkpoint):
    """Whoever forgets them would train another model without a word."""
    pipe = ps.Pipe(model(), balance=[2, 2], devices=["cpu"] * 2, chunks=2, checkpoint=checkpoint)
    x, y = torch.randn(4, 5), torch.randn(4, 5)
    with pytest.raises(
        RunError,
        match=r"have called ps.side_loss.*loss = criterion\(model\(x\), y\) \+ model.side_loss",
    ):
        functional.mse_loss(pipe(x), y).backward()
    (functional.mse_loss(pipe(x), y) + 0 * pipe.side_loss).backward()


def test_side_losses_alone_reach_the_weights():
    """The output need not be part of what is differentiated."""
    net = model()
    pipe = ps.Pipe(net, balance=[2, 2], devices=["cpu"] * 2, chunks=2)
    pipe(torch.randn(4, 5))
    pipe.side_loss.backward()
    assert net[0].map.weight.grad.abs().sum() > 0
    assert net[3].weight.grad is None or not net[3].weight.grad.any()


def test_each_forward_has_its_own():
    """The attribute is the last forward's; one that was taken before stays what it was."""
    net = model()
    plain = copy.deepcopy(net)
    pipe = ps.Pipe(net, balance=[2, 2], devices=["cpu"] * 2, chunks=2)
    total = 0
    for _ in range(2):
        x, y = torch.randn(4, 5), torch.randn(4, 5)
        plain_step(plain, x, y)
        total = total + functional.mse_loss(pipe(x), y) + pipe.side_loss
    total.backward()
    for parameter, expected in zip(net.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, expected.grad)


def test_models_without_side_losses_and_evaluation():
    """Zero where there are none, so that one loop serves all models; without a graph it is a plain
    number.
    """
    pipe = ps.Pipe(
        nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5)), balance=[1, 1], devices=2, chunks=2
    )
    (pipe(torch.randn(4, 5)).sum() + pipe.side_loss).backward()
    assert pipe.side_loss == 0
    pipe = ps.Pipe(model().requires_grad_(requires_grad=False), balance=[2, 2], devices=2, chunks=2)
    x = torch.randn(4, 5, requires_grad=True)
    with torch.no_grad():
        pipe(x)
    assert pipe.side_loss > 0
    assert not pipe.side_loss.requires_grad


def test_a_pipe_can_be_copied_and_pickled_after_a_forward():
    """The graph of the last forward stays behind."""
    pipe = ps.Pipe(model(), balance=[2, 2], devices=["cpu"] * 2, chunks=2)
    pipe(torch.randn(4, 5))
    assert copy.deepcopy(pipe).side_loss == 0
    assert pickle.loads(pickle.dumps(pipe)).side_loss == 0


class Sometimes(nn.Module):
    """Has a side loss in its first forward only."""

    def __init__(self):
        super().__init__()
        self.map, self.calls = nn.Linear(5, 5), []  # a number would be put back for a recompute

    def forward(self, x):
        """The map."""
        self.calls.append(len(self.calls))
        if len(self.calls) == 1:
            ps.side_loss(self.map(x).mean())
        return self.map(x)


def test_a_recompute_without_the_side_loss_is_refused():
    """Its gradient would be lost."""
    pipe = ps.Pipe(
        nn.Sequential(Sometimes(), nn.Linear(5, 5)),
        balance=[1, 1],
        devices=2,
        chunks=1,
        checkpoint="always",
    )
    with pytest.raises(RunError, match="a forward had 0 side losses, and 1 the first time"):
        (pipe(torch.randn(4, 5)).sum() + pipe.side_loss).backward()
