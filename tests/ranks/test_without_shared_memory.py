"""Ranks of one host on a machine without shared memory: messages go over gloo, by themselves."""

from __future__ import annotations

import logging
import os

import pytest
import torch
from torch import nn

import penstock as ps
from penstock.shared_memory.availability import SWITCH

#: So large that the step, not the weight before it, decides every bit of the weight after it.
LEARNING_RATE = 2.0**20


def network() -> nn.Sequential:
    """Four layers with weights from a seed."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 3))


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    """Eight samples: four micro-batches of two, so that all factors of the loss are powers of 2."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(8, 6, generator=generator), torch.arange(8) % 3


#: Cases, and the reason that the log gives for not using shared memory.
REASONS = {"switch": f"{SWITCH} is 0", "darwin": "this system is darwin", "nothing": None}


def train_one_step(lack: str):
    """Train a step on this rank, where shared memory lacks something.

    Returns the loss, the transport's name, the weights, and the log lines about shared memory.
    """
    from penstock.shared_memory import availability

    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logger = logging.getLogger("penstock.transport.same_host")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    with pytest.MonkeyPatch.context() as patch:
        if lack == "switch":
            patch.setenv(SWITCH, "0")
        if lack == "darwin":
            patch.setattr(availability.sys, "platform", "darwin")
        pipe = ps.Pipeline(
            network(),
            balance=(2, 2),
            schedule="1f1b",
            micro_batches=4,
            loss=nn.functional.cross_entropy,
            optimizer=lambda weights: torch.optim.SGD(weights, lr=LEARNING_RATE),
        )
        loss = float(pipe.train_batch(*batch()))
    logger.removeHandler(handler)
    transport = pipe._world.transport(int(os.environ["RANK"]))
    return loss, type(transport).__name__, pipe.state_dict(), lines


def train_in_all_cases():
    """Train a step in every case, one after the other."""
    return {lack: train_one_step(lack) for lack in REASONS}


def plain_step() -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and weights of one step in one process, gradients accumulated over micro-batches."""
    model, total = network(), 0.0
    for x, y in zip(*(tensor.split(2) for tensor in batch()), strict=True):
        loss = nn.functional.cross_entropy(model(x), y) / 4
        loss.backward()
        total += float(loss.detach())
    torch.optim.SGD(model.parameters(), lr=LEARNING_RATE).step()
    return total, model.state_dict()


@pytest.fixture(scope="module")
def ranks():
    """What every rank came to, by case; one launch serves all."""
    return ps.launch(train_in_all_cases, 2, threads=1)


@pytest.mark.parametrize("lack", REASONS)
def test_training_falls_back_to_gloo_with_exact_gradients_and_one_line(ranks, lack):
    """A machine that shared memory is not safe on must train to the same numbers, not to others."""
    results = [rank[lack] for rank in ranks]
    transport = "SameHostTransport" if lack == "nothing" else "DistributedTransport"
    assert [name for _, name, _, _ in results] == [transport] * 2
    lines = [line for _, _, _, lines in results for line in lines]
    assert len(lines) == (REASONS[lack] is not None)
    assert all(REASONS[lack] in line for line in lines)
    loss, weights = plain_step()
    for rank_loss, _, rank_weights, _ in results:
        assert rank_loss == pytest.approx(loss, rel=1e-6)
        assert all(torch.equal(weights[key], value) for key, value in rank_weights.items())
    assert set(results[0][2]) == set(weights)
