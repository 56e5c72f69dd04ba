"""`Pipe` as an `nn.Module`: its layers, devices, types, state and checkpointing."""

from __future__ import annotations

from collections import OrderedDict

import pytest
import torch
from tests.pipe.layers import make_model, make_pipe
from torch import nn

from penstock.errors import SettingError
from penstock.pipe.pipe import Pipe


def test_it_counts_and_gives_its_layers_like_the_sequential():
    """`len`, `iter` and `[]` go through all partitions, in order."""
    model = make_model()
    layers = list(model)
    pipe = Pipe(model, [2, 3], devices=2)
    assert len(pipe) == 5
    assert list(pipe) == layers
    assert pipe[3] is layers[3]
    assert pipe[-1] is layers[4]
    with pytest.raises(IndexError, match="out of range"):
        _ = pipe[5]


def test_partitions_are_sequentials_whose_layers_keep_their_names():
    """Hooks and checkpoints of the peers go by `partitions.<place>.<name>`."""
    pipe = Pipe(
        nn.Sequential(OrderedDict(first=nn.Linear(1, 1), second=nn.Linear(1, 1))),
        [1, 1],
        devices=["cpu", "cpu"],
    )
    assert isinstance(pipe.partitions, nn.ModuleList)
    assert all(isinstance(partition, nn.Sequential) for partition in pipe.partitions)
    assert list(pipe.state_dict()) == [
        "partitions.0.first.weight",
        "partitions.0.first.bias",
        "partitions.1.second.weight",
        "partitions.1.second.bias",
    ]


@pytest.mark.parametrize(
    "move",
    [
        lambda p: p.cuda(),
        lambda p: p.cpu(),
        lambda p: p.to("cuda"),
        lambda p: p.to(0),
        lambda p: p.to(torch.device("cpu")),
        lambda p: p.to(device=0),
        lambda p: p.to(torch.rand(1)),
        lambda p: p.to(tensor=torch.rand(1)),
    ],
)
def test_moving_is_denied(move):
    """Every partition has its own device."""
    with pytest.raises(TypeError, match="denied to move parameters and buffers"):
        move(make_pipe())


def test_casting_is_allowed():
    """The type of numbers is nobody's place."""
    pipe = make_pipe().half().to(torch.double)
    assert pipe(torch.rand(6, 4, dtype=torch.double)).dtype is torch.double


@pytest.mark.parametrize("balance", [[2, 3], [4, 1], [5]])
def test_state_loads_under_another_balance_and_from_and_into_the_plain_model(balance):
    """A checkpoint must not be tied to a cut."""
    source, plain = make_pipe(), make_model()
    with torch.no_grad():
        for parameter in source.parameters():
            parameter.add_(1.0)
    reloaded = Pipe(make_model(), balance, devices=2)
    reloaded.load_state_dict(source.state_dict())
    plain.load_state_dict(reloaded.sequential_state_dict())
    again = Pipe(make_model(), balance, devices=2)
    again.load_state_dict(plain.state_dict())
    for pipe_copy in (reloaded, again):
        torch.testing.assert_close(
            pipe_copy.sequential_state_dict(), source.sequential_state_dict(), rtol=0, atol=0
        )


def test_state_loads_where_the_pipe_is_a_part_of_another_module():
    """`load_state_dict` of the whole comes by without asking the Pipe's own."""
    whole, plain = nn.ModuleDict({"body": make_pipe()}), nn.ModuleDict({"body": make_model()})
    with torch.no_grad():
        plain["body"][0].bias.fill_(3.0)
    whole.load_state_dict(plain.state_dict())
    assert whole["body"][0].bias.tolist() == [3.0] * 8


def test_a_missing_and_an_unexpected_tensor_are_named():
    """Strictness stays what it is."""
    state = make_model().state_dict()
    state["4.extra"] = state.pop("4.bias")
    with pytest.raises(
        RuntimeError,
        match=r'(?s)Missing.*"partitions\.1\.4\.bias".*Unexpected.*"partitions\.1\.4\.extra"',
    ):
        make_pipe().load_state_dict(state)


def test_activation_checkpointing_of_trainer_recomputes_all_micro_batches():
    """By both of its names; disabling it brings the mode before back."""
    pipe = Pipe(nn.Sequential(nn.Linear(3, 4)), [1], chunks=2)
    pipe.gradient_checkpointing_enable({"use_reentrant": False})
    pipe.activation_checkpointing_enable()
    assert pipe.checkpoint == "always"
    pipe.gradient_checkpointing_disable()
    assert pipe.checkpoint == "except_last"
    pipe.activation_checkpointing_disable()
    assert pipe.checkpoint == "never"


@pytest.mark.parametrize(
    "settings",
    [
        {"every_n_layers": 2},
        {"offload": True},
        {"activation_checkpointing_kwargs": {"context_fn": None}},
    ],
)
def test_activation_checkpointing_that_a_pipe_has_not_is_refused(settings):
    """The message names the setting."""
    pipe = Pipe(nn.Sequential(nn.Linear(3, 4)), [1])
    with pytest.raises(SettingError, match="a Pipe recomputes whole partitions"):
        pipe.activation_checkpointing_enable(**settings)
