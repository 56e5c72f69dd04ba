"""What an assembly gives the ranks of a process: checks, replica groups, tied weights, homes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import penstock as ps
from penstock.errors import SettingError
from penstock.transport.compressed import CompressedTransport


def sgd(parameters):
    """Plain gradient descent."""
    return torch.optim.SGD(parameters, lr=0.1)


def assembly_of(layers=None, schedule="gpipe", balance=(1, 1), **options):
    """Return the assembly of a pipeline in this process."""
    layers = layers or [nn.Linear(4, 4), nn.Linear(4, 4)]
    pipe = ps.Pipeline(
        layers,
        balance=balance,
        schedule=schedule,
        loss=nn.functional.mse_loss,
        executor="threads",
        device="cpu",
        **options,
    )
    return pipe._assembly


@pytest.mark.parametrize(
    ("options", "checked"),
    [
        ({"optimizer": sgd}, True),
        ({"optimizer": sgd, "scaler": True}, False),
        ({"optimizer": sgd, "scaler": False}, True),
        ({}, False),
    ],
)
def test_gradients_are_checked_where_they_are_used_and_no_scaler_checks_them(options, checked):
    """An overflow is no failure under a loss scaler, and without an optimizer nobody steps."""
    assembly = assembly_of(**options)
    flags = [interpreter.finite.gradients for interpreter in assembly.interpreters.values()]
    assert flags == [checked] * 2
    assert assembly.steps is ("optimizer" in options)


def test_only_activations_are_compressed_and_only_on_request():
    """The exchange of tied weights and of replicas has the rank's own links."""
    for boundary in (None, "int8"):
        assembly = assembly_of(boundary=boundary)
        for rank, interpreter in assembly.interpreters.items():
            own = assembly.world.transport(rank)
            if boundary is None:
                assert interpreter.transport == own
            else:
                assert isinstance(interpreter.transport, CompressedTransport)
                assert interpreter.transport.inner == own


@pytest.mark.parametrize("same_rank", [False, True])
def test_tied_weights_are_exchanged_between_ranks_only(same_rank):
    """Two stages of one rank share the parameter itself."""
    layers = [nn.Linear(4, 4) for _ in range(4)]
    layers[2].weight = layers[0].weight
    text = "0F0 1F0 2F0 3F0 3B0 2B0 1B0 0B0 0U1 1U1 2U1 3U1"
    if not same_rank:
        text = "0F0 1F0 1B0 0B0 0U1 1U1\n2F0 3F0 3B0 2B0 2U1 3U1"
    assembly = assembly_of(layers, ps.Schedule.parse(text), (1, 1, 1, 1))
    assert list(assembly.tied) == ([] if same_rank else [0, 1])
    assert assembly.placed.shared == {"0.weight": 0}


def test_replicas_average_gradients_or_weights_but_not_both():
    """HetPipe's replicas exchange weights after waves, those of other schedules gradients."""
    plain = assembly_of(
        schedule=ps.Schedule.parse("0F0 1F0 1B0 0B0 0U1 1U1\n0F1 1F1 1B1 0B1 0U1 1U1")
    )
    assert [list(interpreter.replicas) for interpreter in plain.interpreters.values()] == [
        [0, 1],
        [0, 1],
    ]
    assert plain.wave_replicas == {0: {}, 1: {}}
    assert plain.optimizer_replicas == 1
    waves = assembly_of(schedule="hetpipe", micro_batches=1, optimizer=sgd)
    assert not any(interpreter.replicas for interpreter in waves.interpreters.values())
    assert all(waves.wave_replicas.values())
    assert waves.optimizer_replicas == max(map(len, waves.setting.schedule.ranks_of_stage)) > 1


def test_a_stage_with_replicas_has_its_home_on_the_first():
    """Its state is saved once."""
    assembly = assembly_of(
        schedule=ps.Schedule.parse("0F1 1F1 1B1 0B1 0U1 1U1\n0F0 1F0 1B0 0B0 0U1 1U1")
    )
    placed = assembly.placed
    assert placed.home == (0, 0)
    assert placed.at_home == list(assembly.interpreters[0].stages.values())
    assert len(placed.local) == len(assembly.stages) == 4


def test_the_optimizers_are_those_of_the_stages_or_one_that_knows_the_learning_rate():
    """A rank without parameters has one over stand-ins, the same at every call."""
    assembly = assembly_of(optimizer=sgd)
    assert assembly.optimizers() == [stage.update.optimizer for stage in assembly.stages]
    empty = assembly_of([nn.Tanh(), nn.Tanh()], optimizer=sgd)
    (stand_in,) = empty.optimizers()
    assert empty.optimizers()[0] is stand_in
    assert stand_in.param_groups[0]["lr"] == 0.1
    with pytest.raises(SettingError, match="no optimizer"):
        assembly_of().optimizers()
