"""How a caller's `parallelize=` is checked and applied; the processes are threads here."""

from __future__ import annotations

import random
import re
from types import SimpleNamespace

import pytest
import torch
from tests.stage.parallel.scripted_groups import (
    Collectives,
    Group,
    Meeting,
    ScriptedMesh,
    in_threads,
)
from torch import nn

import penstock as ps
from penstock.errors import SettingError
from penstock.ranks.process_world import DistributedWorld
from penstock.schedule.recompute import Recompute
from penstock.stage.parallel import parallelism
from penstock.stage.parallel.parallelism import Parallelism


@pytest.fixture(autouse=True)
def collectives(monkeypatch):
    """Let groups be threads."""
    monkeypatch.setattr(parallelism, "dist", Collectives())


def change(layers, mesh):
    """Change no layer."""


def mesh_of(*dimensions, width=1, coordinate=0):
    """Return a mesh of one process with these dimensions."""
    groups = {name: Group(Meeting(1), 0) for name in dimensions}
    return ScriptedMesh(groups, width=width, coordinate=coordinate)


def options(**changes):
    """Return training options under which layers can be shared."""
    defaults = {
        "parallelize": change,
        "compiled": None,
        "offload": 0.0,
        "memory_format": None,
        "deferred_batch_norm": False,
    }
    return SimpleNamespace(**{**defaults, **changes})


def setting(schedule=None, recompute=Recompute.ALWAYS):
    """Return the configuration of a run."""
    if schedule is None:
        schedule = ps.schedule("1f1b", stages=2, micro_batches=2)
    return SimpleNamespace(schedule=schedule, recompute=recompute)


MODEL = SimpleNamespace(modules=[nn.Linear(1, 1), nn.Linear(1, 1)])


def test_without_a_function_every_process_has_its_own_layers():
    """A mesh may have copies; but processes of "tp" would all compute the same."""
    for mesh in (None, mesh_of("dp"), mesh_of("tp", width=1)):
        assert Parallelism.of(mesh, options(parallelize=None), setting(), MODEL) is None
    with pytest.raises(SettingError, match=r"'tp' of the mesh has 2 processes that .*parallelize="):
        Parallelism.of(mesh_of("tp", width=2), options(parallelize=None), setting(), MODEL)


def test_a_function_needs_a_dimension_over_which_it_shares():
    """Stages alone are not one."""
    for mesh in (mesh_of("dp"), mesh_of("tp", width=2), mesh_of("dp", "tp")):
        result = Parallelism.of(mesh, options(), setting(), MODEL)
        assert (result.mesh, result.function) == (mesh, change)
    for mesh in (None, mesh_of()):
        with pytest.raises(SettingError, match=r"'dp' or 'tp': give mesh= with one of them"):
            Parallelism.of(mesh, options(), setting(), MODEL)


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("function", [None, change])
def test_layers_that_are_shared_before_are_refused(place, function, monkeypatch):
    """Any weight of any layer; the message has the class of the layer."""
    modules = [nn.Linear(2, 2), nn.Bilinear(1, 1, 1)]
    shared = modules[place].bias
    monkeypatch.setattr(parallelism, "is_sharded", lambda tensor: tensor is shared)
    model = SimpleNamespace(modules=modules)
    with pytest.raises(SettingError, match=f"^{type(modules[place]).__name__} has weights that"):
        Parallelism.of(mesh_of("dp"), options(parallelize=function), setting(), model)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"schedule": ps.schedule("pipedream", stages=2)}, "pipedream, which is asynchronous"),
        (
            {"schedule": ps.schedule("terapipe", stages=2, micro_batches=2, slices=2)},
            "terapipe, which slices micro-batches",
        ),
        (
            {"schedule": ps.schedule("zb-h1", stages=2, micro_batches=2)},
            "zb-h1, which splits backwards",
        ),
        (
            {"schedule": ps.Schedule.parse("0F0 0E0 0L0 0B0 0U1\n0E0 0L0 1F0 1B0 1U1")},
            "custom, which moves activations",
        ),
        ({"recompute": Recompute.SELECTIVE}, "recompute of single layers"),
        ({"compiled": {}}, "compile"),
        ({"offload": 0.5}, "offload"),
        ({"memory_format": torch.channels_last}, "memory_format"),
        ({"deferred_batch_norm": True}, "deferred_batch_norm"),
    ],
)
def test_what_shared_layers_do_not_support_is_named(changes, words):
    """One thing at a time; alone, and with a second one."""
    run = {key: changes[key] for key in changes if key in ("schedule", "recompute")}
    more = {key: changes[key] for key in changes if key not in run}
    message = rf"^parallelize= is not possible with {words}"
    with pytest.raises(SettingError, match=rf"{message}: leave it out"):
        Parallelism.of(mesh_of("dp"), options(**more), setting(**run), MODEL)
    if words != "deferred_batch_norm":
        more["deferred_batch_norm"] = True
        with pytest.raises(SettingError, match=rf"{message} and deferred_batch_norm: leave it out"):
            Parallelism.of(mesh_of("dp"), options(**more), setting(**run), MODEL)


def test_what_the_message_advises_is_possible():
    """Otherwise the advice would lead in a circle."""
    with pytest.raises(SettingError) as error:
        Parallelism.of(mesh_of("dp"), options(offload=1.0), setting(), MODEL)
    advice = str(error.value).partition("use schedule=")[2].partition(", recompute=")
    recompute = Recompute(re.match("'(.*?)'", advice[2])[1])
    names = re.findall("'(.*?)'", advice[0])
    assert len(names) == 3
    for name in names:
        run = setting(ps.schedule(name, stages=4, micro_batches=4), recompute)
        assert Parallelism.of(mesh_of("dp"), options(), run, MODEL) is not None


class Layer(nn.Module):
    """A layer whose tensors have several dtypes, and one an order of its own in memory."""

    def __init__(self, seed):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.weight = nn.Parameter(torch.randn(3, 2, generator=generator).t())
        self.small = nn.Parameter(torch.randn(2, generator=generator).half())
        self.register_buffer("count", torch.randint(9, (), generator=generator))
        self.register_buffer("mask", torch.randint(2, (1, 3), generator=generator).bool(), False)


def tensors_of(layers):
    """Return all tensors of some layers."""
    return [tensor for layer in layers for tensor in (*layer.parameters(), *layer.buffers())]


@pytest.mark.parametrize("copies", [1, 2])
@pytest.mark.parametrize("width", [1, 2, 3])
def test_all_processes_of_a_stage_start_with_the_weights_of_the_first(copies, width):
    """Of its first copy and coordinate, in all dtypes; the function gets the stage's layers."""
    over_copies = [Meeting(copies) for _ in range(width)]
    over_width = [Meeting(width) for _ in range(copies)]
    processes = [(copy, place) for copy in range(copies) for place in range(width)]
    calls = []

    def run(number):
        copy, place = processes[number]
        groups = {"dp": Group(over_copies[place], copy), "tp": Group(over_width[copy], place)}
        mesh = ScriptedMesh(groups, copies=copies, width=width, coordinate=place)
        layers = [Layer(2 * number), Layer(2 * number + 1)]

        def function(modules, seen):
            calls.append([*map(id, modules)] == [*map(id, layers)] and seen is mesh.mesh)

        stage = Parallelism(mesh, function).apply(5, tuple(layers))
        assert stage.index == 5
        return layers

    results = in_threads(len(processes), run)
    assert calls == [True] * len(processes)
    for layers in results:
        pairs = zip(tensors_of(layers), tensors_of([Layer(0), Layer(1)]), strict=True)
        assert all(torch.equal(tensor, first) for tensor, first in pairs)


def apply(function):
    """Apply a function to two layers, and return them."""
    layers = [nn.Linear(1, 1), nn.Linear(1, 1)]
    Parallelism(mesh_of(), lambda modules, mesh: function(modules)).apply(0, layers)
    return layers


def test_the_result_of_the_function_may_be_layers_or_nothing():
    """`fully_shard` returns the layer that it has changed."""
    apply(lambda modules: None)
    apply(lambda modules: 3)
    apply(lambda modules: modules[1])
    apply(lambda modules: tuple(reversed(modules)))


def replace_last(modules):
    """Put another module in the place of the last one."""
    modules[-1] = nn.Linear(1, 1)


@pytest.mark.parametrize(
    "function",
    [
        lambda modules: nn.Sequential(*modules),
        lambda modules: [modules[0], nn.Linear(1, 1)],
        lambda modules: modules.reverse(),
        lambda modules: modules.append(modules[0]),
        lambda modules: modules.pop(),
        replace_last,
    ],
)
def test_the_layers_of_a_stage_stay_as_they_are(function):
    """Others would not be those that the pipeline runs and saves."""
    with pytest.raises(SettingError, match="it must change the layers in place"):
        apply(function)


def test_only_groups_of_gloo_are_closed_when_the_run_is_stopped():
    """NCCL has its own way; each dimension over which weights are shared has a group."""
    for backends in (("gloo", "gloo"), ("gloo", "nccl"), ("nccl", "gloo")):
        groups = {
            name: Group(Meeting(1), 0, backend)
            for name, backend in zip(("dp", "tp"), backends, strict=True)
        }
        watched = []
        world = DistributedWorld.__new__(DistributedWorld)
        world.watch_group = watched.append
        Parallelism(ScriptedMesh(groups), change).watch_groups(world)
        expected = [group for group in groups.values() if group.backend == "gloo"]
        assert sorted(map(id, watched)) == sorted(map(id, expected))


def test_the_first_coordinate_writes_for_all():
    """Files would be written several times."""
    for coordinate in range(3):
        mesh = mesh_of("tp", width=3, coordinate=coordinate)
        assert Parallelism(mesh, change).writes == (coordinate == 0)


@pytest.mark.parametrize("seed", range(10))
def test_an_action_has_succeeded_if_it_has_on_all_processes_of_the_layers(seed):
    """One that shares them with no other is asked alone."""
    rng = random.Random(seed)
    width = rng.randint(1, 4)
    results = [rng.random() < 0.8 for _ in range(width)]
    meeting = Meeting(width)

    def agree(place):
        group = Group(meeting, place)
        mesh = ScriptedMesh({"tp": group}, width=width, coordinate=place)
        agreed = Parallelism(mesh, change).all_agree(success=results[place])
        assert len(group.log) == (width > 1)
        return agreed

    assert in_threads(width, agree) == [all(results)] * width
