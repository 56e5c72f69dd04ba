"""Ranks of which some reach each other through memory and others only over the network."""

from __future__ import annotations

import os

import pytest
import torch
from torch import nn

import penstock as ps
from penstock.transport.hybrid import HybridTransport
from penstock.transport.same_host import SameHostTransport

pytestmark = pytest.mark.usefixtures("functions_by_value")


def trained(far: tuple[int, ...], schedule: str, balance: tuple[int, ...]):
    """Losses, what carries messages here, and the weights, with some ranks that share no memory
    with others.
    """
    rank = int(os.environ["RANK"])
    connect = SameHostTransport.connect
    SameHostTransport.connect = lambda self, store, size, *, willing: connect(
        self, store, size, willing=rank not in far
    )
    try:
        torch.manual_seed(0)
        net = nn.Sequential(
            nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 3)
        )
        pipe = ps.Pipeline(
            net,
            balance=balance,
            schedule=schedule,
            micro_batches=4,
            loss=nn.functional.cross_entropy,
            optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
            clip_grad_norm=1.0,
        )
    finally:
        SameHostTransport.connect = connect
    x = torch.randn(9, 6, generator=torch.Generator().manual_seed(1))
    y = torch.arange(9) % 3
    losses = [float(pipe.train_batch(x, y)) for _ in range(3)] + [float(pipe.eval_batch(x, y))]
    return (
        losses,
        type(pipe._world.transport(rank)).__name__,
        {k: v.tolist() for k, v in pipe.state_dict().items()},
    )


@pytest.mark.parametrize(("schedule", "balance"), [("1f1b", (2, 2, 2)), ("gpipe", (3, 1, 2))])
def test_the_way_that_messages_go_changes_nothing(schedule, balance):
    """Rank 2 is on another host, as far as anybody can tell."""
    near = ps.launch(trained, 3, (), schedule, balance, threads=1)
    mixed = ps.launch(trained, 3, (2,), schedule, balance, threads=1)
    assert [way for _, way, _ in near] == ["SameHostTransport"] * 3
    assert [way for _, way, _ in mixed] == [HybridTransport.__name__] * 2 + ["DistributedTransport"]
    assert near[0][0] == mixed[0][0]
    assert near[0][2] == mixed[0][2]
    assert len({tuple(losses) for losses, _, _ in (*near, *mixed)}) == 1
