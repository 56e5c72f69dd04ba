"""The whole model's state on every rank."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import nn

import penstock as ps
from penstock.runtime.state.model_state_methods import whole_state
from penstock.stage import stage_state


def test_a_name_that_a_container_gives_to_a_layers_tensor_is_in_the_state_of_every_rank(
    monkeypatch,
):
    """It is in that of one device, and `load_into` refuses a state without it."""
    container = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    container.register_parameter("scale", container[0].weight)
    net = nn.Sequential(container, nn.Linear(3, 2))
    pipe = ps.Pipeline(
        net, loss=nn.functional.mse_loss, balance=[2, 1], micro_batches=2, executor="threads"
    )
    collected = pipe.state_dict()
    assert collected.keys() == net.state_dict().keys()
    monkeypatch.setattr(stage_state, "collect", lambda *_: collected)
    first_of_two = SimpleNamespace(local_ranks=(0,), size=2, broadcast=lambda content, *_: content)
    state = whole_state(first_of_two, pipe._assembly.placed)
    assert state.keys() == collected.keys()
    assert torch.equal(state["0.scale"], state["0.0.weight"])
    pipe.close()
