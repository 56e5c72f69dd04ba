"""Optimizers and parameters where ranks are processes, with shared memory or over the network
alone.
"""

from __future__ import annotations

import os

import pytest
import torch
from tests.runtime.against_plain import adamw, batch, model, plain_step, same_state
from torch.nn import functional

import penstock as ps
from penstock.errors import SettingError
from penstock.transport.same_host import SameHostTransport


def trained(far: tuple[int, ...], schedule: str) -> dict[str, object]:
    """Train with thawed and frozen layers, tied weights, other norms, manual learning rates and
    moved states.
    """
    rank = int(os.environ["RANK"])
    connect = SameHostTransport.connect
    SameHostTransport.connect = lambda self, store, size, *, willing: connect(
        self, store, size, willing=rank not in far
    )
    network = model(tied=True)
    for index in (0, 2):
        network[index].requires_grad_(False)
    try:
        pipe = ps.Pipeline(
            network,
            balance=[3, 5],
            schedule=schedule,
            micro_batches=4,
            loss=functional.cross_entropy,
            optimizer=adamw,
            clip_grad_norm=0.05,
            clip_norm_type=1.0,
            deadline_s=60,
        )
    finally:
        SameHostTransport.connect = connect
    for number in range(3):
        if number == 1:
            network[0].requires_grad_(True)
            network[2].requires_grad_(True)
            network[6].requires_grad_(False)
        if number == 2:
            network[6].requires_grad_(True)
            pipe.set_learning_rate(0.02)
        pipe.train_batch(*batch(number))
    state, weights = pipe.optimizer_state_dict(), pipe.state_dict()
    with pytest.raises(SettingError, match="it has no"):
        pipe.load_state_dict({"0.weight": torch.zeros(8, 6)})
    # Every rank needs the whole state to load it.
    shared_state = pipe._world.broadcast(state if rank == 0 else None, 0)
    network[0].requires_grad_(False)
    pipe.load_optimizer_state_dict(shared_state)
    network[0].requires_grad_(True)
    pipe.train_batch(*batch(3))
    after = pipe.state_dict()
    pipe.close()
    return {"state": state, "weights": weights, "after": after, "norm": pipe.grad_norm}


@pytest.mark.parametrize(("schedule", "far"), [("1f1b", (1,)), ("chimera", ())])
def test_processes_thaw_clip_and_keep_their_state_as_plain_pytorch(schedule, far):
    """Messages of gradients and activations have another form after a layer was thawed."""
    plain = model(tied=True)
    for index in (0, 2):
        plain[index].requires_grad_(False)
    optimizer = adamw(plain.parameters())

    def clip(parameters):
        torch.nn.utils.clip_grad_norm_(parameters, 0.05, 1.0)

    for number in range(3):
        if number == 1:
            plain[0].requires_grad_(True)
            plain[2].requires_grad_(True)
            plain[6].requires_grad_(False)
        if number == 2:
            plain[6].requires_grad_(True)
            optimizer.param_groups[0]["lr"] = 0.02
        plain_step(plain, optimizer, number, clip=clip)
    result, other = ps.launch(trained, 2, far, schedule, threads=1)
    assert (other["state"], other["weights"]) == ({}, {})
    same_state(result["state"], optimizer.state_dict())
    expected = dict(plain.state_dict())
    assert all(torch.allclose(result["weights"][k], v, rtol=1e-9) for k, v in expected.items())
    plain_step(plain, optimizer, 3, clip=clip)
    expected = dict(plain.state_dict())
    assert all(torch.allclose(result["after"][k], v, rtol=1e-9) for k, v in expected.items())
    assert result["norm"] == other["norm"]
