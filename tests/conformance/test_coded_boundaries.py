"""Training over boundaries in fewer bits: nearly the same, and off by default."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import penstock as ps
from penstock.errors import SettingError


def trained(boundary, schedule="1f1b"):
    """Losses of some steps, and the weights."""
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Linear(16, 128),
        nn.Tanh(),
        nn.Linear(128, 128),
        nn.Tanh(),
        nn.Linear(128, 128),
        nn.Linear(128, 4),
    )
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(32, 16, generator=generator)
    y = torch.tanh(x[:, :4] * 2)
    pipe = ps.Pipeline(
        net,
        balance=[2, 2, 2],
        schedule=schedule,
        micro_batches=4,
        loss=nn.functional.mse_loss,
        executor="threads",
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        boundary=boundary,
    )
    return [float(pipe.train_batch(x, y)) for _ in range(40)], net


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
@pytest.mark.parametrize("boundary", ["bfloat16", "int8"])
def test_a_net_learns_as_it_does_without(boundary, schedule):
    """The loss comes down by as much, within a few percent."""
    plain, _ = trained(None, schedule)
    coded, _ = trained(boundary, schedule)
    assert coded != plain
    assert coded[-1] < 0.3 * coded[0]
    assert coded[-1] == pytest.approx(plain[-1], rel=0.1)


def test_an_unknown_form_is_refused_before_anything_starts():
    """By name."""
    with pytest.raises(SettingError, match="choose one of bfloat16, int8"):
        trained("float8")
