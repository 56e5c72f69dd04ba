"""The state of all stages' optimizers as that of one plain optimizer, over random models, cuts,
groups and processes, which are threads here.
"""

from __future__ import annotations

import copy
import random
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from tests.runtime.state.scripted_optimizers import (
    Counting,
    Model,
    Processes,
    ScriptedWorld,
    adam,
    assemblies,
    optimizer_of,
    step,
)
from torch import nn

from penstock.errors import SettingError
from penstock.runtime.state import torch_optimizer_state as plain_state


def on_all(function, assemblies, *args):
    """Call a function on all processes; return the results."""
    with ThreadPoolExecutor(len(assemblies)) as pool:
        futures = [pool.submit(function, assembly, *args) for assembly in assemblies]
        return [future.result() for future in futures]


def same(first, second):
    """Check that two values are equal, with their types of containers."""
    if isinstance(first, torch.Tensor):
        assert torch.equal(first, second)
        assert first.dtype == second.dtype
    elif isinstance(first, dict):
        assert first.keys() == second.keys()
        for key, value in first.items():
            same(value, second[key])
    elif isinstance(first, (list, tuple)):
        assert len(first) == len(second)
        for one, other in zip(first, second, strict=True):
            same(one, other)
    else:
        assert first == second


@pytest.mark.parametrize("kind", [adam, Counting])
@pytest.mark.parametrize("seed", range(25))
def test_the_state_is_that_of_one_optimizer_and_comes_back_under_any_cut(seed, kind):
    """In order of registration within each group; only on rank 0; without shared memory."""
    rng = random.Random(seed)
    model = Model(rng)
    trained = model.trained()
    group_of = {name: rng.randrange(2) for name in model.order}
    plain = {name: copy.deepcopy(model.parameter(name)) for name in trained}
    reference = optimizer_of(list(plain.items()), group_of, kind)
    processes = assemblies(rng, model, group_of, kind)
    for _ in range(2):
        rows = [(plain[name], model.parameter(name)) for name in trained]
        homes = [s.update.optimizer for a in processes for s in a.placed.at_home]
        step(rng, rows, reference, *(optimizer for optimizer in homes if optimizer))
    if kind is Counting:
        # Its tensors depend on the place in the group, which a cut changes: take the pipeline's.
        for name in trained:
            reference.state.pop(plain[name], None)
        for stage in (stage for assembly in processes for stage in assembly.placed.at_home):
            for name, parameter in stage.named:
                if parameter in stage.update.optimizer.state:
                    state = copy.deepcopy(dict(stage.update.optimizer.state[parameter]))
                    reference.state[plain[name]] = state
    expected = reference.state_dict()
    for assembly, state in zip(processes, on_all(plain_state.collect, processes), strict=True):
        if 0 not in assembly.world.local_ranks:
            assert state == {}
            continue
        same(state["state"], dict(sorted(expected["state"].items())))
        assert list(state["state"]) == sorted(state["state"])
        same(state["param_groups"], expected["param_groups"])
        # The options are copies, as the tensors are.
        state["param_groups"][0]["lr"] = -1
        assert assembly.optimizers()[0].param_groups[0]["lr"] == 0.5

    for group in reference.param_groups:
        group["lr"] *= 4
    saved = copy.deepcopy(reference.state_dict())
    others = assemblies(rng, model, group_of, kind)
    for stage in (stage for assembly in others for stage in assembly.stages if stage.named):
        # What is there already goes away.
        stage.update.optimizer.state[stage.named[0][1]] = {"old": 1}
    on_all(plain_state.restore, others, reference.state_dict())
    pointers = []
    for assembly in others:
        for optimizer in assembly.optimizers():
            assert [group["lr"] for group in optimizer.param_groups] == [2.0, 6.0]
        for stage in assembly.stages:
            for name, parameter in stage.named:
                state = stage.update.optimizer.state
                assert (parameter in state) == (plain[name] in reference.state)
                if parameter in state:
                    same(dict(state[parameter]), dict(reference.state[plain[name]]))
                    tensors = [t for t in state[parameter].values() if isinstance(t, torch.Tensor)]
                    pointers += [tensor.data_ptr() for tensor in tensors]
    pointers += [
        tensor.data_ptr()
        for state in reference.state.values()
        for tensor in state.values()
        if isinstance(tensor, torch.Tensor)
    ]
    assert len(set(pointers)) == len(pointers)
    same(saved, reference.state_dict())


def single(groups, *, shapes=((2,), (3,))):
    """Return the assembly of one rank with a stage, whose optimizer has these groups of names."""
    parameters = {f"w{n}": nn.Parameter(torch.ones(shape)) for n, shape in enumerate(shapes)}
    optimizer = adam([{"params": [parameters[name] for name in row]} for row in groups])
    update = SimpleNamespace(optimizer=optimizer, candidates=list(parameters.values()))
    layers = [SimpleNamespace(name="", module=nn.ParameterDict(parameters))]
    stage = SimpleNamespace(index=0, update=update, layers=layers)
    tensors = [SimpleNamespace(name=n, shape=tuple(p.shape)) for n, p in parameters.items()]
    return SimpleNamespace(
        world=ScriptedWorld(Processes(1), (0,), 1),
        stages=[stage],
        placed=SimpleNamespace(at_home=[stage], home=(0,)),
        traced=SimpleNamespace(
            parameter_names=lambda: list(parameters),
            first_name=lambda name: name,
            description=SimpleNamespace(tensors=tensors),
        ),
        names=lambda stage: {parameter: name for name, parameter in parameters.items()},
        optimizers=lambda: [optimizer],
    )


def state_for(groups, state):
    """Return a state of a plain optimizer with groups of these numbers."""
    options = dict(adam([nn.Parameter(torch.ones(1))]).defaults)
    return {"state": state, "param_groups": [{**options, "params": row} for row in groups]}


@pytest.mark.parametrize(
    ("groups", "state", "message"),
    [
        (
            [["w0", "w1"]],
            state_for([[0], [1]], {}),
            "have 1 and 1 parameters; this pipeline's have 2",
        ),
        ([["w0", "w1"]], state_for([], {}), "have no parameters; this pipeline's have 2"),
        (
            [["w0"], ["w1"]],
            state_for([[0, 1]], {}),
            "have 2 parameters; this pipeline's have 1 and 1",
        ),
        ([["w0", "w1"]], [1], "with 'state' and 'param_groups', not list$"),
        ([["w0", "w1"]], {"state": {}, "b": 1}, r"and 'param_groups', not \['b', 'state'\]$"),
        (
            [["w0", "w1"]],
            state_for([[5, 8]], {8: {"exp_avg": torch.ones(2)}}),
            r"^exp_avg of parameter 8 has shape \(2,\) in the state; w1, .* has \(3,\): the state is",
        ),
        (
            [["w1"], ["w0"]],
            state_for([[0], [1]], {0: {"exp_avg": torch.ones(3)}, 1: {"exp_avg": torch.ones(3)}}),
            r"^exp_avg of parameter 1 has shape \(3,\) in the state; w0, .* has \(2,\)",
        ),
    ],
)
def test_a_state_of_another_optimizer_is_refused_before_anything_changes(groups, state, message):
    """With the figures of both."""
    assembly = single(groups)
    (optimizer,) = assembly.optimizers()
    with pytest.raises(SettingError, match=message):
        plain_state.restore(assembly, state)
    assert not optimizer.state


def test_groups_of_the_same_sizes_in_another_order_are_others():
    """Their options would go to the wrong parameters."""
    assembly = single([["w0", "w1"], ["w2"]], shapes=((2,), (2,), (2,)))
    with pytest.raises(SettingError, match="have 1 and 2 parameters; this pipeline's have 2 and 1"):
        plain_state.restore(assembly, state_for([[0], [1, 2]], {}))


def test_numbers_of_a_saved_state_need_not_begin_at_0_or_ascend():
    """They are keys; state of numbers that no group has is left out."""
    assembly = single([["w0", "w1"]])
    (optimizer,) = assembly.optimizers()
    saved = {
        number: {"step": torch.tensor(1.0), "exp_avg": torch.full((size,), 4.0 + size)}
        for number, size in ((7, 2), (3, 3), (99, 1))
    }
    state = state_for([[7, 3]], saved)
    state["param_groups"][0]["param_names"] = ["a", "b"]
    plain_state.restore(assembly, state)
    parameters = optimizer.param_groups[0]["params"]
    assert [optimizer.state[p]["exp_avg"].tolist() for p in parameters] == [[6, 6], [7, 7, 7]]
    assert len(optimizer.state) == 2
    assert "param_names" not in optimizer.param_groups[0]


@pytest.mark.parametrize("ranks", [1, 2])
def test_unlike_groups_of_stages_have_no_common_optimizer(ranks):
    """On one rank or on two; the message has the options of both."""
    stages = []
    parameters = [nn.Parameter(torch.ones(1)) for _ in range(2)]
    for index, parameter in enumerate(parameters):
        optimizer = torch.optim.SGD([parameter], lr=1.0 + index)
        stages.append(SimpleNamespace(index=index, update=SimpleNamespace(optimizer=optimizer)))
    assembly = SimpleNamespace(
        world=ScriptedWorld(Processes(1), tuple(range(ranks)), ranks),
        stages=stages,
        placed=SimpleNamespace(at_home=stages, home=(0, ranks - 1)),
        traced=SimpleNamespace(
            parameter_names=lambda: ["w0", "w1"],
            description=SimpleNamespace(
                tensors=[SimpleNamespace(name=f"w{n}", shape=(1,)) for n in range(2)]
            ),
        ),
        names=lambda stage: {parameter: f"w{n}" for n, parameter in enumerate(parameters)},
        optimizers=lambda: [stage.update.optimizer for stage in stages],
    )
    with pytest.raises(SettingError, match=r'groups, \{.*"lr": 1\.0.*\} and \{.*"lr": 2\.0'):
        plain_state.restore(assembly, state_for([[0, 1]], {}))
    # Options of one list or tuple and another are unlike, too.
    for kind in (list, tuple):
        for number, stage in enumerate(stages):
            (group,) = stage.update.optimizer.param_groups
            group["lr"], group["betas"] = 1.0, kind((0.5, number))
        with pytest.raises(SettingError, match=r'"betas": \[0\.5, 0\].*"betas": \[0\.5, 1\]'):
            plain_state.restore(assembly, state_for([[0, 1]], {}))
    # The order of the options does not matter.
    for number, stage in enumerate(stages):
        (group,) = stage.update.optimizer.param_groups
        del group["betas"]
        if number:
            group["lr"] = group.pop("lr")
    # A learning rate that is a tensor is one of its number.
    stages[1].update.optimizer.param_groups[0]["lr"] = torch.tensor(1.0)
    state = torch.optim.SGD(parameters, lr=3.0).state_dict()
    plain_state.restore(assembly, state)
    assert [stage.update.optimizer.param_groups[0]["lr"] for stage in stages] == [3.0, 3.0]


def test_without_any_trained_parameter_the_state_is_empty():
    """Ranks have an optimizer for the learning rate alone."""
    stand_in = adam([{"params": [nn.Parameter(torch.ones(1))]}])
    stand_in.param_groups.clear()
    assembly = SimpleNamespace(
        world=ScriptedWorld(Processes(1), (0,), 1),
        stages=[],
        placed=SimpleNamespace(at_home=[], home=(0,)),
        traced=SimpleNamespace(parameter_names=list),
        optimizers=lambda: [stand_in],
    )
    assert plain_state.collect(assembly) == {"state": {}, "param_groups": []}


def test_options_that_are_tensors_are_copied_in_both_directions():
    """A caller that changes a learning rate of the state does not change the pipeline's."""
    assembly = single([["w0"], ["w1"]])
    (optimizer,) = assembly.optimizers()
    for group in optimizer.param_groups:
        group["lr"] = torch.tensor(0.5)
    state = plain_state.collect(assembly)
    state["param_groups"][1]["lr"].fill_(7)
    assert [float(group["lr"]) for group in optimizer.param_groups] == [0.5, 0.5]
    plain_state.restore(assembly, state)
    assert [float(group["lr"]) for group in optimizer.param_groups] == [0.5, 7.0]
    state["param_groups"][0]["lr"].fill_(9)
    assert [float(group["lr"]) for group in optimizer.param_groups] == [0.5, 7.0]


def test_a_rank_whose_stages_have_no_parameters_gets_the_options():
    """It must know the learning rate, such as for a scheduler."""
    assembly = single([["w0", "w1"]])
    stand_in = adam([{"params": [nn.Parameter(torch.ones(1))]}])
    empty = SimpleNamespace(index=1, update=SimpleNamespace(optimizer=None))
    assembly.stages.append(empty)
    optimizers = [*assembly.optimizers(), stand_in]
    assembly.optimizers = lambda: optimizers
    state = state_for([[0, 1]], {})
    state["param_groups"][0]["lr"] = 0.125
    plain_state.restore(assembly, state)
    assert [optimizer.param_groups[0]["lr"] for optimizer in optimizers] == [0.125, 0.125]
    assert len(stand_in.param_groups[0]["params"]) == 1
    assert not stand_in.state
    assert len(optimizers[0].param_groups[0]["params"]) == 2


def test_state_without_a_tensor_has_no_shape():
    """Torch's SGD has kept None in place of a momentum buffer."""
    assembly = single([["w0", "w1"]])
    (optimizer,) = assembly.optimizers()
    first, second = optimizer.param_groups[0]["params"]
    step = torch.ones(())
    saved = {
        0: {"momentum_buffer": None, "step": step},
        1: {"exp_avg": torch.ones(3), "step": step},
    }
    plain_state.restore(assembly, state_for([[0, 1]], saved))
    assert optimizer.state[first]["momentum_buffer"] is None
    assert optimizer.state[second]["exp_avg"].tolist() == [1.0] * 3


def test_options_without_a_plain_value_are_not_compared():
    """Such as the hooks of a fused optimizer: they have no form that ranks can exchange."""
    assembly = single([["w0"], ["w1"]])
    for group in assembly.optimizers()[0].param_groups:
        group["hook"], group["nothing"] = object(), None
    groups = plain_state.collect(assembly)["param_groups"]
    assert [group["params"] for group in groups] == [[0], [1]]
    assert groups[0].keys() == assembly.optimizers()[0].param_groups[0].keys()


def test_state_of_a_tied_weight_is_that_of_its_first_name():
    """The stage that steps it may call it by the name of a later layer, in tensors and numbers."""
    assembly = single([["w0", "w1"]])
    (optimizer,) = assembly.optimizers()
    tied, other = optimizer.param_groups[0]["params"]
    for parameter, value in ((tied, 4.0), (other, 6.0)):
        tensors = {"step": torch.tensor(value), "exp_avg": torch.full_like(parameter, value)}
        optimizer.state[parameter] = {**tensors, "count": value}
    first_names = {"w0": "embedding", "w1": "w1"}
    assembly.names = lambda stage: {tied: "embedding", other: "w1"}
    assembly.traced.first_name = first_names.get
    assembly.traced.parameter_names = lambda: ["w1", "embedding"]
    assembly.traced.description.tensors[0].name = "embedding"
    state = plain_state.collect(assembly)
    assert {number: row["exp_avg"].tolist() for number, row in state["state"].items()} == {
        0: [6, 6, 6],
        1: [4, 4],
    }
    assert [row["count"] for row in state["state"].values()] == [6.0, 4.0]
    assert state["param_groups"][0]["params"] == [0, 1]
    optimizer.state.clear()
    plain_state.restore(assembly, state)
    assert [optimizer.state[parameter]["count"] for parameter in (tied, other)] == [4.0, 6.0]


def test_plain_values_alone_are_state_of_a_tied_weight():
    """A parameter without tensors in its state has no path from which its name could be read."""
    assembly = single([["w0", "w1"]])
    (optimizer,) = assembly.optimizers()
    first, tied = optimizer.param_groups[0]["params"]
    optimizer.state[tied] = {"count": 5}
    assembly.names = lambda stage: {first: "w0", tied: "embedding"}
    assembly.traced.first_name = {"w0": "w0", "w1": "embedding"}.get
    assembly.traced.parameter_names = lambda: ["embedding", "w0"]
    assert plain_state.collect(assembly)["state"] == {0: {"count": 5}}
