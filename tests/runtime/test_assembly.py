"""What an assembly gives the ranks of a process: checks, replica groups, tied weights, homes."""

from __future__ import annotations

import warnings
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from tests.runtime.scripted import Recorder
from torch import nn

import penstock as ps
from penstock.errors import SettingError
from penstock.runtime import assembly as module
from penstock.runtime.assembly import Assembly, assemble
from penstock.stage.stage_builder import Training
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
        layers = [nn.Linear(4, 4), nn.Linear(4, 4)]
        layers[1].weight = layers[0].weight
        assembly = assembly_of(layers, boundary=boundary)
        for rank, interpreter in assembly.interpreters.items():
            rank_links = assembly.world.transport(rank)
            if boundary is None:
                assert interpreter.transport == rank_links
            else:
                assert isinstance(interpreter.transport, CompressedTransport)
                assert interpreter.transport.inner == rank_links
            assert assembly.tied[rank].transport == rank_links


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
    stream = assembly_of(schedule=ps.schedule("pipedream", 2, 2, replicas=(2, 1)), optimizer=sgd)
    assert stream.setting.schedule.copies > 1
    assert stream.optimizer_replicas == 1
    assert [list(rank.replicas) for rank in stream.interpreters.values()].count([0]) == 2


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
    assert empty.optimizers() == [stand_in]
    assert stand_in.param_groups[0]["lr"] == 0.1
    with pytest.raises(SettingError, match="no optimizer"):
        assembly_of().optimizers()


def scripted(*, copies=1, waves=(), tied=(), shared_by=(), parallel=(), zero=0):
    """Return the assembly of two ranks with two stages each, and what is asked of them by rank.

    Args:
        copies: number of replicas of every stage.
        waves: stages whose replicas average weights after waves.
        tied: ranks with tied weights.
        shared_by: by shared tensor, its ranks.
        parallel: stages whose layers processes share.
        zero: level of ZeRO.
    """
    logs = {0: [], 1: []}
    interpreters, wave_replicas = {}, {}
    for rank, log in logs.items():
        groups = {
            index: Recorder(log, f"replicas {index}", share_weights=None) for index in range(2)
        }
        for index, group in groups.items():
            group.buckets = Recorder(log, f"buckets {index}", reset=None) if index else None
            group.shards = Recorder(log, f"shards {index}", gather_state=None) if index else None
        stages = {
            index: SimpleNamespace(
                index=index,
                update=Recorder(log, f"update {index}", drop_state_of_replicas=None),
            )
            for index in range(2)
        }
        wave_replicas[rank] = {index: groups[index] for index in waves}
        interpreters[rank] = SimpleNamespace(
            replicas={index: group for index, group in groups.items() if index not in waves},
            stages=stages,
            parallel=dict.fromkeys(parallel),
            finish=lambda log=log: log.append(("finish",)),
        )
    assembly = Assembly(
        None,
        SimpleNamespace(run=lambda job: {rank: job(rank) for rank in logs}),
        SimpleNamespace(schedule=SimpleNamespace(copies=copies)),
        interpreters,
        wave_replicas,
        tuple(SimpleNamespace(ranks=ranks) for ranks in shared_by),
        {rank: Recorder(logs[rank], "tied", begin=None) for rank in tied},
        None,
        zero=zero,
    )
    return assembly, logs


def names(log):
    """Return the names of some calls."""
    return [entry[0] for entry in log]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, {0: [], 1: []}),
        ({"shared_by": [(0,)]}, {0: [], 1: []}),
        (
            {"copies": 2},
            {rank: ["replicas 0.share_weights", "replicas 1.share_weights", "finish"]
             for rank in (0, 1)},
        ),
        (
            {"copies": 2, "waves": (1,), "parallel": (0,)},
            {rank: ["replicas 1.share_weights", "finish"] for rank in (0, 1)},
        ),
        (
            {"copies": 2, "parallel": (0, 1), "tied": (1,), "shared_by": [(0,), (1, 0)]},
            {0: ["finish"], 1: ["tied.begin", "finish"]},
        ),
    ],
)  # fmt: skip
def test_ranks_begin_with_the_weights_of_the_first_replica_and_of_the_home(options, expected):
    """Those of shared layers were divided from one value; where all have them, nothing is sent."""
    assembly, logs = scripted(**options)
    assembly.share_weights()
    assert {rank: names(log) for rank, log in logs.items()} == expected


def test_tied_weights_of_ranks_begin_with_those_of_the_home_without_any_replicas():
    """The two are independent reasons."""
    assembly, logs = scripted(tied=(0, 1), shared_by=[(0, 1)])
    for interpreter in assembly.interpreters.values():
        interpreter.replicas = {}
    assembly.share_weights()
    assert {rank: names(log) for rank, log in logs.items()} == {
        rank: ["tied.begin", "finish"] for rank in (0, 1)
    }


@pytest.mark.parametrize("zero", [0, 1])
@pytest.mark.parametrize("fails", [False, True])
def test_divided_optimizer_states_are_whole_within_the_block_alone(zero, fails):
    """All ranks gather before the block; afterwards each has its own part, also after an error."""
    assembly, logs = scripted(copies=2, zero=zero)
    gathers = ["shards 1.gather_state", "finish"] if zero else []
    drops = ["update 0.drop_state_of_replicas", "update 1.drop_state_of_replicas"]

    def use():
        with assembly.whole_optimizer_state():
            assert [names(log) for log in logs.values()] == [gathers] * 2
            if fails:
                raise ValueError("planted")

    if fails:
        with pytest.raises(ValueError, match="planted"):
            use()
    else:
        use()
    assert [names(log) for log in logs.values()] == [gathers + drops] * 2


def test_gradient_hooks_forget_at_a_checkpoint():
    """Of all ranks; a group without buckets has none."""
    assembly, logs = scripted(copies=2)
    assembly.reset_gradient_hooks()
    assert [names(log) for log in logs.values()] == [["buckets 1.reset"]] * 2


@pytest.mark.parametrize(("trained", "source"), [((0, 1, 2), 1), ((1, 2), 2), ((2,), 0), ((), 1)])
def test_texts_of_all_ranks_are_those_of_the_first_rank_that_trains_something(trained, source):
    """The optimizer of a rank without parameters may have other groups."""
    layers = [nn.Linear(2, 2).requires_grad_(index in trained) for index in range(3)]
    schedule = ps.Schedule.parse("2F0 2B0 2U1\n0F0 0B0 0U1\n1F0 1B0 1U1")
    assembly = assembly_of(layers, schedule, (1, 1, 1))
    sources = []
    assembly.world.broadcast = lambda texts, rank: sources.append(rank) or texts
    assert assembly.broadcast_texts(["a", "b"]) == ("a", "b")
    assert sources == [source]
    assert assembly.broadcast_texts([]) == ()
    assert sources == [source]


def test_what_shared_layers_cannot_do_is_refused_with_what_to_do():
    """Only where there are any."""
    assembly, _ = scripted()
    assembly.check_unshared("this", "do that")
    vars(assembly)["parallelism"] = object()
    with pytest.raises(SettingError, match=r"^this is not possible .* \(parallelize=\): do that$"):
        assembly.check_unshared("this", "do that")


def test_every_rank_has_the_memory_that_the_plan_predicts_for_it():
    """For the message of an exhausted memory; without a plan there is no prediction."""
    plain = assembly_of()
    predictions = [interpreter.predicted_bytes for interpreter in plain.interpreters.values()]
    assert predictions == [None, None]
    setting = replace(plain.setting, predicted_bytes=(10, 20))
    training = Training(nn.functional.mse_loss, None, 0)
    again = assemble(plain.traced, setting, plain.world, training)
    predictions = [interpreter.predicted_bytes for interpreter in again.interpreters.values()]
    assert predictions == [10, 20]


def test_groups_of_shared_layers_are_closed_with_the_ranks():
    """A rank that stops the run would else leave others in their collective operations."""
    plain = assembly_of()
    watched = []
    parallelism = SimpleNamespace(
        apply=lambda index, modules: (index, len(modules)), watch_groups=watched.append
    )
    training = Training(nn.functional.mse_loss, None, 0, parallelism=parallelism)
    assembly = assemble(plain.traced, plain.setting, plain.world, training)
    assert watched == [plain.world]
    assert assembly.parallelism is parallelism
    for interpreter in assembly.interpreters.values():
        assert interpreter.parallel == {0: (0, 1), 1: (1, 1)}


@pytest.mark.parametrize("hook", ["none", "powersgd"])
@pytest.mark.parametrize("ranks", [(0, 1), (1,)])
@pytest.mark.parametrize("collectives", [False, True])
def test_a_gradient_hook_without_effect_is_reported_once(hook, ranks, collectives):
    """By the process of rank 0."""
    world = SimpleNamespace(local_ranks=ranks, has_replica_collectives=collectives)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        module._check_gradient_hook(hook, world)
    expected = hook != "none" and 0 in ranks and not collectives
    assert len(caught) == expected
    if expected:
        assert "gradient_hook='powersgd' has no effect here" in str(caught[0].message)


@pytest.mark.parametrize("zero", [0, 1])
@pytest.mark.parametrize("collectives", [None, "collectives"])
def test_sums_in_buckets_are_those_of_collective_operations_without_zero(
    zero, collectives, monkeypatch
):
    """With ZeRO a replica needs the sums of its part alone; stages on one rank have no group."""
    monkeypatch.setattr(module, "ReplicaGroup", lambda *args: args)
    monkeypatch.setattr(module, "is_sharded", lambda tensor: tensor == "part")
    monkeypatch.setattr(module, "BucketSum", lambda *args: ("buckets", *args[:3]))
    monkeypatch.setattr(module, "reduction_factory", lambda *args: ("reduction", *args))
    world = SimpleNamespace(
        transport=lambda rank: f"links of {rank}",
        open_segment=lambda ranks: f"segment of {ranks}",
        replica_collectives=lambda stage: collectives,
    )
    guard = SimpleNamespace(rank=2, during=None)
    stages = {0: SimpleNamespace(tensors=lambda: ["plain", "part"]), 1: None}
    schedule = SimpleNamespace(ranks_of_stage=[(1, 2), (2,)])
    options = SimpleNamespace(zero_level=zero, gradient_hook="fp16")
    groups = module._make_replicas(
        stages, guard, world, schedule, [("entry", "shared tensor")], options
    )
    buckets = None
    if collectives and not zero:
        buckets = ("buckets", 0, collectives, ("reduction", collectives, "fp16"))
    assert groups == {
        0: (
            stages[0],
            (1, 2),
            2,
            "links of 2",
            guard,
            ["shared tensor", "part"],
            "segment of (1, 2)",
            buckets,
            zero,
        )
    }


def test_a_layer_that_is_frozen_in_part_is_trained():
    """Its stage has an optimizer."""
    layers = [nn.Linear(2, 2) for _ in range(2)]
    layers[0].weight.requires_grad_(False)
    assembly = assembly_of(layers)
    sources = []
    assembly.world.broadcast = lambda texts, rank: sources.append(rank) or texts
    assembly.broadcast_texts(["a"])
    assert sources == [0]


def test_the_ranks_of_a_pipeline_check_by_its_policy_and_its_hook_is_checked():
    """The message of a check names the rank."""
    with pytest.warns(UserWarning, match="has no effect here"):
        assembly = assembly_of(gradient_hook="fp16", on_nonfinite="raise", optimizer=sgd)
    checks = [interpreter.finite for interpreter in assembly.interpreters.values()]
    assert [(check.rank, check.policy) for check in checks] == [(0, "raise"), (1, "raise")]


def test_layers_of_a_process_are_those_of_all_stages_of_its_ranks():
    """All others are copies without memory."""
    assembly = assembly_of([nn.Linear(4, 4) for _ in range(5)], balance=(2, 3))
    assert module._local_layers(assembly.interpreters) == set(range(5))
    assert module._local_layers({1: assembly.interpreters[1]}) == {2, 3, 4}


def test_copies_of_a_stage_whose_optimizers_choose_other_parameters_are_refused():
    """They would be different after the first step. Frozen parameters count, since they may be
    thawed.
    """
    layers = [nn.Linear(2, 2), nn.Linear(2, 2)]
    layers[1].bias.requires_grad_(False)
    calls = []

    def all_but_the_bias_of_a_copy(parameters):
        calls.append(len(parameters))
        parameters = parameters[: 1 if calls.count(2) == 4 else 2]
        return torch.optim.SGD(parameters, lr=0.1)

    schedule = ps.Schedule.parse("0F0 1F0 1B0 0B0 0U1 1U1\n0F1 1F1 1B1 0B1 0U1 1U1")
    with pytest.raises(SettingError, match="for one copy of stage 1 than for another"):
        assembly_of(layers, schedule, optimizer=all_but_the_bias_of_a_copy)
    assert calls == [2, 2, 2, 2]


def test_the_home_of_a_tied_tensor_is_the_first_rank_of_its_first_stage():
    """Not the lowest rank that holds it: checkpoints have the tensor of its home."""
    layers = [nn.Linear(2, 2), nn.Linear(2, 2)]
    layers[1].weight = layers[0].weight
    assembly = assembly_of(layers, ps.Schedule.parse("1F0 1B0 1U1\n0F0 0B0 0U1"))
    assert assembly.placed.home == (1, 0)
    assert assembly.placed.shared == {"0.weight": 1}


class OfOneRank:
    """All ranks, of which this process has only the second."""

    local_ranks = (1,)

    def __init__(self, world):
        self.world = world

    def __getattr__(self, name):
        return getattr(self.world, name)


def test_a_process_holds_memory_for_the_layers_of_its_ranks_alone():
    """Those of other ranks are copies on the meta device; threads have all layers."""
    layers = [nn.Linear(4, 4) for _ in range(3)]
    threads = assembly_of(layers, balance=(2, 1))
    assert threads.traced.modules == tuple(layers)
    training = Training(nn.functional.mse_loss, None, 0)
    process = assemble(threads.traced, threads.setting, OfOneRank(threads.world), training)
    assert list(process.interpreters) == [1]
    assert [module.weight.is_meta for module in process.traced.modules] == [True, True, False]
    assert process.traced.modules[2] is layers[2]
    assert not layers[0].weight.is_meta
