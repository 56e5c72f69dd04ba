"""Values of graphs: literals in the forward of a traced model."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

import penstock as ps


def scaled(model, x):
    """Multiply by a literal."""
    return model.second(model.first(x) * torch.tensor([1.0, 2.0, 0.5, 0.0]))


def changed(model, x):
    """Multiply by a literal that was changed in place."""
    scale = torch.tensor([1.0, 2.0, 0.5, 0.0])
    scale += 1
    scale.mul_(3)
    return model.second(torch.tanh(model.first(x) * scale)) * scale


def shared(model, x):
    """Use a literal in two layers."""
    scale = torch.tensor([1.0, 2.0, 0.5, 0.0])
    return model.second(torch.tanh(model.first(x) * scale)) * scale


class Model(nn.Module):
    """Two layers that run as a function says."""

    def __init__(self, run):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.run = run

    def forward(self, x):
        """Run the layers."""
        return self.run(self, x)


@pytest.mark.parametrize("run", [scaled, changed, shared])
@pytest.mark.parametrize("balance", [[2], [1, 1]])
def test_literals_of_a_forward_train_as_without_a_pipeline(run, balance):
    """Every forward starts from the literal, whatever the one before has made of its copy."""
    plain, model = Model(run), Model(run)
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(1))
    pipe = ps.Pipeline(
        ps.chain(model, x),
        loss=functional.mse_loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        balance=balance,
        schedule="gpipe",
        micro_batches=2,
        executor="threads",
    )
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for _ in range(3):
        loss = functional.mse_loss(plain(x), torch.ones(4, 4))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        assert float(pipe.train_batch(x, torch.ones(4, 4))) == pytest.approx(float(loss), rel=1e-5)
