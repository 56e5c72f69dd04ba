"""Sums over copies and the order of FSDP's steps, with threads and stand-ins for its modules.

What real FSDP and tensor parallelism compute is in `test_shared_layers.py`.
"""

from __future__ import annotations

import random
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

from penstock.errors import SettingError
from penstock.stage.parallel import parallel_stage
from penstock.stage.parallel.parallel_stage import ParallelStage, _has_gradient


class Shared(nn.Parameter):
    """A parameter that processes share, in these tests."""


class OnMesh(nn.Parameter):
    """A parameter on a mesh of some dimensions."""


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch):
    """Let groups be threads, and parameters of a class be shared."""
    monkeypatch.setattr(parallel_stage, "dist", Collectives())
    monkeypatch.setattr(parallel_stage, "is_sharded", lambda tensor: isinstance(tensor, Shared))
    monkeypatch.setattr(parallel_stage, "DTensor", OnMesh)


def layer(*tensors):
    """Return a layer with these parameters."""
    module = nn.Module()
    for number, tensor in enumerate(tensors):
        module.register_parameter(f"weight{number}", tensor)
    return module


def shared(size, *, trained=True):
    """Return a shared parameter of ones."""
    return Shared(torch.ones(size), requires_grad=trained)


@pytest.mark.parametrize("seed", range(12))
def test_gradients_are_summed_over_copies_and_added_to_those_of_earlier_batches(seed):
    """A copy may have no gradient of a parameter in a batch, in all sorts of orders; parameters that
    are whole, frozen or FSDP's are left alone.
    """
    rng = random.Random(seed)
    copies, batches = rng.randint(2, 3), 3
    sizes = [rng.randint(1, 4) for _ in range(4)]
    # By batch, copy and parameter: its gradient, or None.
    grads = [
        [
            [torch.randint(9, (size,)).float() if rng.random() < 0.6 else None for size in sizes]
            for _ in range(copies)
        ]
        for _ in range(batches)
    ]
    meeting = Meeting(copies)

    def run(copy):
        weights = [shared(size) for size in sizes]
        whole, frozen, of_fsdp = nn.Parameter(torch.ones(2)), shared(2, trained=False), shared(2)
        layers = [layer(*weights[:2], whole), layer(*weights[2:], frozen, of_fsdp)]
        group = Group(meeting, copy)
        stage = ParallelStage(0, layers, ScriptedMesh({"dp": group}, copies=copies))
        stage._fsdp_parameters = {id(of_fsdp)}
        whole.grad = of_fsdp.grad = torch.full((2,), 7.0)
        results = []
        for batch in grads:
            stage.begin()
            assert all(weight.grad is None for weight in weights)
            for weight, grad in zip(weights, batch[copy], strict=True):
                weight.grad = None if grad is None else grad.clone()
            stage.reduce()
            stage.end()
            assert not stage._previous
            results.append([None if w.grad is None else w.grad.clone() for w in weights])
        assert whole.grad.tolist() == of_fsdp.grad.tolist() == [7.0, 7.0]
        assert frozen.grad is None
        return results

    results = in_threads(copies, run)
    totals = [None] * len(sizes)
    for step, batch in enumerate(grads):
        for place in range(len(sizes)):
            rows = [row[place] for row in batch if row[place] is not None]
            if rows:
                before = [] if totals[place] is None else [totals[place]]
                totals[place] = sum([*before, *rows])
        for result in results:
            for grad, total in zip(result[step], totals, strict=True):
                assert (grad is None) == (total is None)
                assert total is None or torch.equal(grad, total)


def test_a_single_copy_sums_nothing():
    """It has no group, and keeps the gradients of earlier batches where they are."""
    weight = shared(2)
    weight.grad = torch.ones(2)
    stage = ParallelStage(0, [layer(weight)], ScriptedMesh({}))
    stage.begin()
    weight.grad += 1
    stage.reduce()
    assert weight.grad.tolist() == [2.0, 2.0]


def test_gradients_that_a_failed_batch_had_set_aside_are_dropped_with_the_others():
    """The next batch must not add them to its own."""
    weight = shared(2)
    weight.grad = torch.ones(2)
    mesh = ScriptedMesh({"dp": Group(Meeting(1), 0)})
    stage = ParallelStage(0, [layer(weight)], mesh)
    stage.begin()
    weight.grad = None
    stage.begin()
    weight.grad = torch.full((2,), 3.0)
    stage.reduce()
    assert weight.grad.tolist() == [3.0, 3.0]


def test_gathered_bytes_are_those_of_the_parameters_that_fsdp_gathers():
    """Weights and gradients, whole: the part of this process times the copies."""
    gathered, other, whole = shared(5), shared(7), nn.Parameter(torch.ones(11))
    stage = ParallelStage(0, [layer(gathered, other), layer(whole)], ScriptedMesh({}, copies=3))
    assert stage.sharded == [gathered, other]
    assert stage.gathered_bytes == 0
    stage._fsdp_parameters = {id(gathered)}
    assert stage.gathered_bytes == 2 * 3 * 5 * 4


@pytest.mark.parametrize("width", [1, 2, 3])
def test_processes_that_share_layers_agree_on_numbers(width):
    """Sums count every part, and what is shared is that of the first; one alone asks nobody."""
    meeting = Meeting(width)

    def run(place):
        group = Group(meeting, place)
        mesh = ScriptedMesh({"tp": group}, width=width, coordinate=place)
        stage = ParallelStage(0, [], mesh)
        total = stage.sum_over_tensor_ranks(torch.tensor([1.0 + place, 10.0 * place]))
        first = stage.share_over_tensor_ranks(torch.tensor(5.0 + place))
        return total.tolist(), first.item(), len(group.log)

    totals = [sum(1.0 + place for place in range(width)), sum(10.0 * p for p in range(width))]
    assert in_threads(width, run) == [(totals, 5.0, 0 if width == 1 else 2)] * width


class FsdpGroup:
    """A group of parameters of FSDP that records."""

    def __init__(self, name, log, entries=()):
        self.name, self.log, self.fsdp_params = name, log, list(entries)

    def post_backward(self):
        """Record that its gradients are summed."""
        self.log.append(f"sum {self.name}")


class Module:
    """A module of FSDP that records."""

    def __init__(self, name, log):
        self.name, self.log = name, log

    def __getattr__(self, method):
        """Record any call, with its arguments."""
        return lambda *args, **options: self.log.append((self.name, method, *args, options))


def fsdp_stage(monkeypatch, groups, *, roots=(), meeting=None, place=0):
    """Return a stage with stand-ins for modules of FSDP, and the log.

    `groups` are by module, from the first layer to the last.
    """
    log = []
    states = {}
    for name, members in groups.items():
        state = SimpleNamespace(_is_root=name in roots, _fsdp_param_group=None)
        state._root_post_backward_final_callback = lambda name=name: log.append(f"end {name}")
        if len(members) > 1:
            state._fsdp_param_groups = members
        elif members:
            (state._fsdp_param_group,) = members
        states[name] = state
        for member in members:
            member.log = log
    monkeypatch.setattr(parallel_stage, "_state_of", lambda module: states[module.name])
    mesh = ScriptedMesh({"dp": Group(meeting or Meeting(1), place)})
    stage = ParallelStage(0, [], mesh)
    stage._wrapped = [Module(name, log) for name in groups]
    return stage, log


LAST = [
    ("set_is_last_backward", True, {}),
    ("set_reshard_after_backward", True, {"recurse": False}),
    ("set_requires_gradient_sync", True, {"recurse": False}),
]
NOT_LAST = [(name, False, options) for name, _, options in LAST]


def test_the_steps_of_fsdp_have_the_order_of_a_last_backward(monkeypatch):
    """Sums go from the last layer to the first; the roots wait for them; then all is as before."""
    groups = {
        "a": [FsdpGroup("a", None)],
        "without": [],
        "b": [FsdpGroup("b1", None), FsdpGroup("b2", None)],
    }
    stage, log = fsdp_stage(monkeypatch, groups, roots=("a", "b"))
    monkeypatch.setattr(stage, "_complete_gradients", lambda: log.append("complete"))
    stage.reduce()
    assert log == [
        "complete",
        *((name, *call) for name in groups for call in LAST),
        "sum b1",
        "sum b2",
        "sum a",
        "end a",
        "end b",
        *((name, *call) for name in groups for call in NOT_LAST),
    ]
    for call, method in ((stage.begin, "unshard"), (stage.end, "reshard")):
        log.clear()
        call()
        assert log == [(name, method, {}) for name in groups]


def test_fsdp_sums_whole_gradients_only_when_it_is_told(monkeypatch):
    """Sums, not means, by the operation that gloo has; weights stay whole until the batch ends."""
    log = []

    class Wrapped(nn.Module):
        """A module of FSDP that records."""

        def __getattr__(self, method):
            """Record a call of FSDP."""
            if method == "modules" or not method.startswith("set_"):
                return super().__getattr__(method)
            return lambda *args, **options: log.append((method, *args, options))

    monkeypatch.setattr(parallel_stage, "FSDPModule", Wrapped)
    groups = [SimpleNamespace(fsdp_params=[SimpleNamespace(sharded_param=shared(1))])]
    state = SimpleNamespace(_fsdp_param_group=groups[0])
    monkeypatch.setattr(parallel_stage, "_state_of", lambda module: state)
    inner = nn.Sequential(Wrapped(), nn.Tanh())
    stage = ParallelStage(0, [nn.Tanh(), inner], ScriptedMesh({}))
    assert stage._wrapped == [inner[0]]
    assert stage._fsdp_parameters == {id(groups[0].fsdp_params[0].sharded_param)}
    assert log == [
        ("set_gradient_divide_factor", 1.0, {}),
        ("set_force_sum_reduction_for_comms", True, {}),
        ("set_reshard_after_forward", False, {"recurse": False}),
        *NOT_LAST,
    ]


def entry(*, accumulated=None, grad=None, gathered=True):
    """Return a parameter of FSDP."""
    weight = nn.Parameter(torch.ones(2))
    weight.grad = grad
    result = SimpleNamespace(unsharded_accumulated_grad=accumulated, unsharded_param=weight)
    if gathered:
        result._unsharded_param = weight
    return result


def test_a_parameter_of_fsdp_has_a_gradient_in_one_of_two_places():
    """Gathered or accumulated in float32; before it was first gathered it has none."""
    grad = torch.zeros(2)
    assert _has_gradient(entry(accumulated=grad, gathered=False))
    assert _has_gradient(entry(grad=grad))
    assert not _has_gradient(entry())
    assert not _has_gradient(entry(grad=grad, gathered=False))


@pytest.mark.parametrize("seed", range(6))
def test_copies_complete_the_gradients_that_another_copy_has(seed):
    """FSDP sums what a process has in one message, which must have one length."""
    rng = random.Random(seed)
    copies = rng.randint(1, 3)
    has = [[rng.random() < 0.4 for _ in range(5)] for _ in range(copies)]
    meeting = Meeting(copies)

    def run(copy):
        entries = [entry(grad=torch.full((2,), 3.0) if flag else None) for flag in has[copy]]
        groups = [FsdpGroup("", None, entries[:3]), FsdpGroup("", None, entries[3:])]
        mesh = ScriptedMesh({"dp": Group(meeting, copy)}, copies=copies)
        stage = ParallelStage(0, [], mesh)
        stage._fsdp_groups = lambda: iter(groups)
        stage._complete_gradients()
        return [e.unsharded_param.grad for e in entries]

    for copy, grads in enumerate(in_threads(copies, run)):
        for place, grad in enumerate(grads):
            if has[copy][place]:
                assert grad.tolist() == [3.0, 3.0]
            elif any(row[place] for row in has):
                assert grad.tolist() == [0.0, 0.0]
            else:
                assert grad is None


def on_mesh(*dimensions):
    """Return a parameter on a mesh."""
    parameter = OnMesh(torch.ones(1))
    parameter.device_mesh = SimpleNamespace(mesh_dim_names=dimensions or None)
    return parameter


@pytest.mark.parametrize("by_fsdp", [False, True])
@pytest.mark.parametrize("mesh", [(), ("dp",), ("tp",), ("dp", "tp")])
def test_layers_are_shared_over_the_dimensions_of_the_mesh_alone(by_fsdp, mesh):
    """By FSDP over copies, with or without "tp", and by tensor parallelism over "tp"."""
    allowed = [("dp",), ("dp", "tp")] if by_fsdp else [("tp",)]
    scripted = ScriptedMesh(dict.fromkeys(mesh))
    for dimensions in ((), ("pp",), ("dp",), ("tp",), ("dp", "tp"), ("pp", "tp"), ("tp", "dp")):
        parameter = on_mesh(*dimensions)
        stage = ParallelStage(4, [layer(nn.Parameter(torch.ones(1)))], scripted)
        stage._layers = [layer(nn.Parameter(torch.ones(1))), layer(shared(1), parameter)]
        stage._fsdp_parameters = {id(parameter)} if by_fsdp else set()
        if dimensions in allowed and set(dimensions) <= set(mesh):
            stage._check_meshes()
            continue
        words = ", ".join(map(repr, dimensions)) or "without names"
        with pytest.raises(SettingError) as error:
            stage._check_meshes()
        assert str(error.value).startswith(
            f"parallelize= shares weight1 of stage 4 over the dimensions {words}: fully_shard"
        )


def test_layers_over_another_dimension_are_refused_when_the_stage_is_made():
    """Not in the middle of the first batch."""
    with pytest.raises(SettingError, match="shares weight0 of stage 4 over the dimensions 'pp'"):
        ParallelStage(4, [layer(on_mesh("pp"))], ScriptedMesh({}))
