"""Stages of the ranks of one process: which of them have the user's modules, and which copies."""

from __future__ import annotations

import random
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import penstock as ps
from penstock.errors import SettingError
from penstock.ranks.settings.run_config import RunConfig
from penstock.ranks.tied_weights import shared_tensors
from penstock.schedule.recompute import Recompute
from penstock.stage import stage_builder
from penstock.stage.activation_meter import ActivationMeter
from penstock.stage.replica_check import ReplicatedStage
from penstock.stage.stage import Stage, StageLayer
from penstock.stage.stage_builder import StageBuilder, Training, parameter_names
from penstock.stage.stage_layers import StageLayers
from penstock.stage.training_options import TrainingOptions
from penstock.weights.catalogue import weight_rule


def sgd(parameters):
    """Plain gradient descent."""
    return torch.optim.SGD(parameters, lr=0.1)


def replicated(orders, stages):
    """Return a schedule in which every rank of a row runs all stages of its micro-batches."""
    rows = []
    for rank, holders in enumerate(orders):
        forwards = [f"{s}F{m}" for m in holders for s in range(stages)]
        backwards = [f"{s}B{m}" for m in holders for s in reversed(range(stages))]
        updates = [f"{s}U1" for s in range(stages)]
        rows.append(f"rank {rank} | " + " ".join([*forwards, *backwards, *updates]))
    return ps.Schedule.parse("\n".join(rows))


def assembly_of(layers, balance, schedule, **options):
    """Return the assembly of a pipeline whose ranks are threads of this process."""
    pipe = ps.Pipeline(
        layers,
        balance=balance,
        schedule=schedule,
        loss=nn.functional.mse_loss,
        executor="threads",
        device="cpu",
        **{"optimizer": sgd, **options},
    )
    return pipe._assembly


def modules_of(assembly, rank, index):
    """Return the modules of the layers of a rank's stage."""
    return [layer.module for layer in assembly.interpreters[rank].stages[index].layers]


@pytest.mark.parametrize("seed", range(4))
def test_the_first_rank_of_a_stage_has_the_users_modules_and_all_others_copies(seed):
    """Copies have equal values and no memory in common; each stage has its layers in order."""
    rng = random.Random(seed)
    ranks, stages = rng.randint(2, 3), rng.randint(1, 3)
    balance = [rng.randint(1, 2) for _ in range(stages)]
    layers = [nn.Linear(3, 3) for _ in range(sum(balance))]
    schedule = replicated([[rank] for rank in range(ranks)], stages)
    assembly = assembly_of(layers, balance, schedule)
    for index in range(stages):
        first = sum(balance[:index])
        users = layers[first : first + balance[index]]
        assert all(
            module is user
            for module, user in zip(modules_of(assembly, 0, index), users, strict=True)
        )
        for rank in range(1, ranks):
            for module, user in zip(modules_of(assembly, rank, index), users, strict=True):
                assert module is not user
                for copied, original in zip(module.parameters(), user.parameters(), strict=True):
                    assert copied is not original
                    assert copied.data_ptr() != original.data_ptr()
                    assert torch.equal(copied, original)


@pytest.mark.parametrize("ranks_of_stages", [(0, 1, 0), (0, 1, 2), (1, 0, 0)])
def test_a_tied_weight_is_one_tensor_on_a_rank_and_a_copy_on_every_other_one(ranks_of_stages):
    """Its home has the user's; the optimizer of one stage alone has it, the others borrow it."""
    layers = [nn.Linear(3, 3) for _ in range(3)]
    layers[2].weight = layers[0].weight
    weight = layers[0].weight
    ops = {rank: [] for rank in range(max(ranks_of_stages) + 1)}
    for kind, order in (("F", range(3)), ("B", reversed(range(3)))):
        for stage in order:
            ops[ranks_of_stages[stage]].append(f"{stage}{kind}0")
    for stage in range(3):
        ops[ranks_of_stages[stage]].append(f"{stage}U1")
    schedule = ps.Schedule.parse("\n".join(f"rank {r} | {' '.join(row)}" for r, row in ops.items()))
    assembly = assembly_of(layers, [1, 1, 1], schedule)
    first, last = (
        modules_of(assembly, ranks_of_stages[index], index)[0].weight for index in (0, 2)
    )
    assert first is weight
    assert (last is first) == (ranks_of_stages[0] == ranks_of_stages[2])
    assert torch.equal(last, first)
    updates = {
        index: assembly.interpreters[ranks_of_stages[index]].stages[index].update
        for index in range(3)
    }
    counts = {index: len(update.parameters) for index, update in updates.items()}
    assert counts == {0: 2, 1: 2, 2: 1}, "the weight is updated by the first stage"
    assert [len(updates[index].borrowed) for index in (0, 2)] == [0, 1]
    assert updates[2].borrowed[0] is last
    biases = [modules_of(assembly, ranks_of_stages[index], index)[0].bias for index in range(3)]
    users = [layer.bias for layer in layers]
    assert all(bias is user for bias, user in zip(biases, users, strict=True)), "they are not tied"


def test_a_module_in_two_stages_of_different_ranks_is_copied_once_per_rank():
    """Its tensors have their original on one rank: the other one must not share them."""
    shared = nn.Linear(3, 3)
    layers = [shared, nn.Tanh(), shared]
    assembly = assembly_of(layers, [2, 1], "gpipe", micro_batches=2)
    assert modules_of(assembly, 0, 0)[0] is shared
    other = modules_of(assembly, 1, 1)[0]
    assert other is not shared
    assert {id(p) for p in other.parameters()}.isdisjoint(map(id, shared.parameters()))


def test_stages_of_one_rank_alone_have_the_users_modules():
    """No other rank of the process could change them meanwhile."""
    layers = [nn.Linear(3, 3), nn.Linear(3, 3)]
    assembly = assembly_of(layers, [1, 1], ps.Schedule.parse("0F0 1F0 1B0 0B0 1U1 0U1"))
    assert [modules_of(assembly, 0, index)[0] for index in range(2)] == layers


def test_the_loss_is_on_the_last_stage_and_only_there():
    """All other stages send their outputs."""
    layers = [nn.Linear(3, 3) for _ in range(3)]
    assembly = assembly_of(layers, [1, 1, 1], "1f1b", micro_batches=3)
    has_loss = [
        stage.loss is not None
        for rank in range(3)
        for stage in assembly.interpreters[rank].stages.values()
    ]
    assert has_loss == [False, False, True]


def test_parameter_groups_have_the_names_of_the_whole_model():
    """Also on a stage that begins in the middle."""
    layers = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))

    def groups(name, parameter):
        return {"lr": 0.5} if name in ("0.weight", "1.bias") else {}

    assembly = assembly_of(layers, [1, 1], "gpipe", micro_batches=2, parameter_groups=groups)
    rates = []
    for rank in range(2):
        optimizer = assembly.interpreters[rank].stages[rank].update.optimizer
        module = modules_of(assembly, rank, rank)[0]
        rate = {id(p): group["lr"] for group in optimizer.param_groups for p in group["params"]}
        rates.append((rate[id(module.weight)], rate[id(module.bias)]))
    assert rates == [(0.5, 0.1), (0.1, 0.5)]


def test_layers_without_tensors_are_copied_for_replicas_too():
    """They may have state of other kinds, such as a count of forwards."""
    layers = [nn.Linear(3, 3), nn.Tanh()]
    assembly = assembly_of(layers, [2], replicated([[0], [1]], 1))
    assert modules_of(assembly, 0, 0)[1] is layers[1]
    assert modules_of(assembly, 1, 0)[1] is not layers[1]


def test_a_parameter_that_occurs_twice_has_its_first_name_and_is_grouped_once():
    """Within a stage and in the whole model."""
    layers = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3))
    layers[1].weight = layers[0].weight
    layers[2].weight = layers[0].weight
    asked = []

    def groups(name, parameter):
        asked.append(name)
        return {}

    traced = ps.chain(layers)
    stage_layers = [
        StageLayer(index, traced.layers[index].name, traced.modules[index]) for index in range(3)
    ]
    names = parameter_names(traced, stage_layers)
    assert list(names.values()) == ["0.weight", "0.bias", "1.bias", "2.bias"]
    assert list(parameter_names(traced, stage_layers[1:]).values()) == [
        "0.weight",
        "1.bias",
        "2.bias",
    ]
    assembly_of(layers, [3], "gpipe", micro_batches=2, parameter_groups=groups)
    assert sorted(asked) == ["0.bias", "0.weight", "1.bias", "2.bias"]


def test_a_stage_is_told_the_micro_batches_that_are_evicted_from_it_alone():
    """Not those of another stage of its rank, nor those that its rank keeps for another one."""
    rows = (
        "0F0 0F1 1F0 1F1 0E1 0L1 1B0 1B1 0B0 0B1 1U1 0U1",
        "0E1 0L1 2F0 2F1 2B0 2B1 2U1",
    )
    layers = [nn.Linear(3, 3) for _ in range(3)]
    assembly = assembly_of(layers, [1, 1, 1], ps.Schedule.parse("\n".join(rows)))
    evicted = {stage.index: set(stage.evicted) for stage in assembly.stages}
    assert evicted == {0: {1}, 1: set(), 2: set()}


@pytest.mark.parametrize("layout", [None, torch.channels_last])
def test_weights_have_the_requested_memory_format(layout):
    """On every rank, in the user's modules and in copies."""
    layers = [nn.Conv2d(2, 3, 2)]
    assembly = assembly_of(layers, [1], replicated([[0], [1]], 1), memory_format=layout)
    for rank in range(2):
        weight = modules_of(assembly, rank, 0)[0].weight
        assert weight.is_contiguous(memory_format=torch.channels_last) == (layout is not None)


def test_stages_begin_and_end_as_the_cut_of_a_traced_model_demands():
    """Between stages they pass on what later ones need; the first begins with the model's input,
    and the last ends with its output.
    """
    chain = ps.chain(nn.Sequential(*(nn.Linear(3, 3) for _ in range(5))))
    entries = {layer: nn.Identity() for layer in range(5)}
    exits = {layer: nn.Identity() for layer in range(5)}
    chain = replace(chain, entries=entries, exits=exits)
    assembly = assembly_of(chain, [1, 3, 1], "gpipe", micro_batches=2)
    runners = {stage.index: stage.runner for stage in assembly.stages}
    assert [runners[index].entry for index in range(3)] == [None, entries[1], entries[4]]
    assert [runners[index].exit for index in range(3)] == [exits[0], exits[3], None]


def builder_of(layers, lengths, schedule, *, local_ranks=None, parallelism=None, **options):
    """Return a builder over a world in which some ranks are local, by default all."""
    traced = ps.chain(layers)
    schedule = ps.Schedule.parse(schedule)
    setting = RunConfig(
        tuple(lengths),
        schedule,
        Recompute.SELECTIVE,
        weight_rule("flush"),
        recomputed=frozenset({1}),
        segment_starts=frozenset({2}),
    )
    local_ranks = [*range(schedule.ranks)] if local_ranks is None else local_ranks
    world = SimpleNamespace(
        local_ranks=local_ranks, size=schedule.ranks, device=lambda rank: torch.device("cpu")
    )
    training = Training(
        nn.functional.mse_loss, sgd, 7, TrainingOptions(**options), parallelism=parallelism
    )
    shared = shared_tensors(traced.description, setting.lengths, schedule)
    return StageBuilder(traced, setting, world, training, shared)


#: Two stages on two ranks.
TWO = "0F0 0B0 0U1\n1F0 1B0 1U1"


def test_a_stage_has_what_setting_and_options_say(monkeypatch):
    """Its runner, its update and its loss; all stages of a rank count on one meter."""
    runners = {}

    def runner(layers, *settings):
        runners[layers[0].index] = settings
        return StageLayers(layers, *settings[:2])

    monkeypatch.setattr(stage_builder, "StageLayers", runner)
    layers = [nn.Linear(3, 3) for _ in range(3)]
    options = {"clip_grad_value": 0.5, "autocast": "bfloat16", "loss_weight": len}
    more = {"offload": 0.25, "compile": {"backend": "eager"}}
    builder = builder_of(layers, [2, 1], TWO, **options, **more)
    meter = ActivationMeter()
    stages = {}
    for rank in range(2):
        built, shared = builder.build_stages(rank, meter)
        assert shared == []
        stages |= built
    assert list(stages) == [0, 1]
    cpu, recomputed, starts = torch.device("cpu"), frozenset({1}), frozenset({2})
    common = (None, None, recomputed, starts, {"backend": "eager"}, 0.25)
    assert runners == {0: (cpu, 7, *common), 2: (cpu, 7, *common)}
    for index, stage in stages.items():
        assert stage.index == index
        assert stage.recompute is Recompute.SELECTIVE
        assert stage.activation_meter is meter
        assert stage.autocast is torch.bfloat16
        assert stage.loss is (nn.functional.mse_loss if index else None)
        assert stage.loss_options.loss_weight is len
        assert stage.evicted == set()
        assert (stage.update.clip_value, stage.update.place) == (0.5, f"stage {index}")
        assert type(stage.update.optimizer) is torch.optim.SGD
        assert stage.reach.stage == index
        parameters = [p for layer in stage.layers for p in layer.module.parameters()]
        assert list(map(id, stage.reach.parameters)) == list(map(id, parameters))
        assert list(map(id, stage.update.parameters)) == list(map(id, parameters))
        others = [layer for layer in layers if layer not in stage.layers]
        assert all(stage.reach.model.name(layer.weight) for layer in others)
    assert [layer.index for layer in stages[0].layers] == [0, 1]
    assert [(layer.index, layer.name) for layer in stages[1].layers] == [(2, "2")]


def test_layers_on_the_meta_device_have_the_weights_of_the_seed_on_every_rank():
    """Whichever rank has a layer, and whatever else it has."""
    with torch.device("meta"):
        layers = [nn.Linear(3, 3), nn.Linear(3, 3)]
    weights = []
    for schedule, rank in ((TWO, 1), ("0F0 1F0 1B0 0B0 0U1 1U1", 0)):
        stages, _ = builder_of(layers, [1, 1], schedule).build_stages(rank, ActivationMeter())
        weights.append(stages[1].layers[0].module.weight)
    assert not weights[0].is_meta
    assert torch.equal(*weights)
    assert weights[0].any()


def test_a_stage_with_copies_checks_what_it_reads():
    """One that only one rank has does not."""
    schedule = "0F0 1F0 1F1 1B1 1B0 0B0 0U1 1U1\n0F1 0B1 0U1"
    builder = builder_of([nn.Linear(3, 3), nn.Linear(3, 3)], [1, 1], schedule)
    stages, _ = builder.build_stages(0, ActivationMeter())
    assert [type(stages[index]) for index in range(2)] == [ReplicatedStage, Stage]
    assert [stages[index].update.place for index in range(2)] == ["stage 0", "stage 1"]


class Nested(nn.Module):
    """A layer with a module inside."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Tanh()

    def forward(self, x):
        """Run it."""
        return self.inner(x)


def test_the_only_rank_of_a_process_has_the_users_modules_wherever_tensors_are_at_home():
    """No other rank reads them; classes are remembered where they cross between processes."""
    remembered = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stage_builder, "remember_code", remembered.extend)
        shared = nn.Linear(3, 3)
        layers = [shared, Nested(), shared]
        builder = builder_of(layers, [2, 1], TWO, local_ranks=[1])
        assert builder_of(layers, [2, 1], TWO) is not None
    stages, rank_shared = builder.build_stages(1, ActivationMeter())
    assert stages[1].layers[0].module is shared
    assert [entry.name for entry, _ in rank_shared] == ["0.weight", "0.bias"]
    assert [tensor is shared.weight for _, tensor in rank_shared] == [True, False]
    parts = [shared, *layers[1].modules(), shared, nn.functional.mse_loss]
    assert remembered == parts


class Sharing:
    """A parallelism that replaces the weights of layers, and notes its calls."""

    def __init__(self):
        self.calls = []

    def apply(self, index, modules):
        """Replace them."""
        self.calls.append((index, [*modules]))
        for module in modules:
            module.weight = nn.Parameter(torch.full((3, 3), 5.0))
        return f"shared {index}"


def test_layers_are_shared_before_their_tensors_are_listed():
    """The optimizer must get the tensors that take the place of the user's."""
    layers, sharing = [nn.Linear(3, 3) for _ in range(3)], Sharing()
    schedule = "0F0 1F0 1B0 0B0 0U1 1U1"
    builder = builder_of(layers, [2, 1], schedule, parallelism=sharing)
    stages, _ = builder.build_stages(0, ActivationMeter())
    assert sharing.calls == [(0, layers[:2]), (1, layers[2:])]
    assert builder.parallel == {0: "shared 0", 1: "shared 1"}
    for stage in stages.values():
        weights = [layer.module.weight for layer in stage.layers]
        optimized = {
            id(p) for group in stage.update.optimizer.param_groups for p in group["params"]
        }
        assert {id(weight) for weight in weights} <= optimized


@pytest.mark.parametrize("schedule", [TWO, "0F0 1F0 1B0 0B0 0U1 1U1"])
def test_a_weight_of_several_stages_must_not_be_divided(monkeypatch, schedule):
    """Its gradients are summed between stages as wholes; the message says which it is."""
    layers = [nn.Linear(3, 3), nn.Linear(3, 3)]
    layers[1].weight = layers[0].weight
    builder = builder_of(layers, [1, 1], schedule)
    monkeypatch.setattr(stage_builder, "is_sharded", lambda tensor: True)
    with pytest.raises(SettingError, match=r"^parallelize= divides 0\.weight, which several"):
        builder.build_stages(0, ActivationMeter())


def test_modules_with_computed_tensors_are_copied():
    """torch refuses to copy a tensor that has a graph, such as a stored output."""
    layer = nn.Linear(3, 3)
    layer.last = layer(torch.ones(1, 3))
    assert not layer.last.is_leaf
    schedule = "0F0 0B0 0U1\n0F1 0B1 0U1"
    stages, _ = builder_of([layer], [1], schedule).build_stages(1, ActivationMeter())
    copied = stages[0].layers[0].module
    assert torch.equal(copied.weight, layer.weight)
    assert copied.weight is not layer.weight
    assert torch.equal(copied.last, layer.last)


def test_a_rank_of_several_processes_has_its_groups_and_its_entry_on_its_device():
    """As ranks that are threads have."""
    layers = [nn.Linear(3, 3), nn.Linear(3, 3)]
    builder = builder_of(
        layers, [1, 1], TWO, local_ranks=[1], parameter_groups=lambda name, p: {"lr": len(p.shape)}
    )
    meta = torch.device("meta")
    builder.world.device = lambda rank: meta
    builder.traced = replace(builder.traced, entries={1: nn.Linear(3, 3)})
    stages, _ = builder.build_stages(1, ActivationMeter())
    rates = [group["lr"] for group in stages[1].update.optimizer.param_groups]
    assert sorted(rates) == [1, 2]
    assert stages[1].runner.device == meta
    assert stages[1].runner.entry.weight.device == meta


@pytest.mark.parametrize("balance", [[3], [2, 1], [1, 2]])
def test_layers_of_a_copy_share_what_the_users_layers_share(balance):
    """Within a stage and between stages of the rank."""
    layers = [nn.Linear(3, 3) for _ in range(3)]
    layers[2].weight = layers[0].weight
    assembly = assembly_of(layers, balance, replicated([[0], [1]], len(balance)))
    for rank in range(2):
        modules = [
            module for index in range(len(balance)) for module in modules_of(assembly, rank, index)
        ]
        assert modules[0].weight is modules[2].weight
        assert (modules[0].weight is layers[0].weight) == (rank == 0)
        assert modules[1].weight is not modules[0].weight
        stages = assembly.interpreters[rank].stages
        updated = [p for index in stages for p in stages[index].update.parameters]
        is_updated = any(parameter is modules[0].weight for parameter in updated)
        assert is_updated == (rank == 0 or len(balance) == 1), "by the first stage at its home"
