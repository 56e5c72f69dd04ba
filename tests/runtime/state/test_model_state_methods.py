"""The whole model's state on every rank."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
from tests.runtime.scripted import failing
from torch import nn

import penstock as ps
from penstock.errors import RunError, SettingError
from penstock.runtime.stale_guard import Guard, guards_of
from penstock.runtime.state import model_state_methods
from penstock.runtime.state.model_state_methods import ModelState, fill, guard_for, whole_state
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


class Scales(nn.Module):
    """A layer with tensors of many types and sizes."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([[1.5, -2.0], [0.25, 3.0]]).t())
        self.tied = nn.Parameter(torch.tensor([0.5, -1.0], dtype=torch.bfloat16))
        self.register_buffer("count", torch.tensor(7))
        self.register_buffer("mask", torch.tensor([True, False, True]))
        self.register_buffer("nothing", torch.zeros(0, 3))
        self.register_buffer("phase", torch.tensor([1 + 2j, 3 - 1j]))
        self.register_buffer("single", torch.zeros(1))

    def forward(self, x):
        """Multiply by the weight."""
        return x @ self.weight


def two_stages(**options):
    """Return a pipeline of two layers of many types, which share a weight."""
    first, second = Scales(), Scales()
    second.tied = first.tied
    return ps.Pipeline(
        nn.Sequential(first, second),
        loss=nn.functional.mse_loss,
        balance=[1, 1],
        micro_batches=1,
        executor="threads",
        **options,
    )


def test_tensors_of_all_types_come_to_ranks_that_collect_nothing(monkeypatch):
    """Bit by bit, under all names of a shared tensor; empty tensors are in no message. A tensor may
    be conjugated lazily, or be one element of any stride.
    """
    pipe = two_stages()
    expected = pipe.state_dict()
    expected["0.phase"] = torch.tensor([1 - 2j, 3 + 1j]).conj()
    expected["0.single"] = torch.arange(4.0)[::3][1:]
    messages = []

    def send(content, source, form):
        assert (source, form.dtype, form.shape) == (0, "uint8", tuple(content.shape))
        messages.append(content.clone())
        return content

    def receive(content, source, form):
        assert (source, form.dtype) == (0, "uint8")
        message = messages.pop(0)
        assert tuple(message.shape) == form.shape
        return message

    placed = pipe._assembly.placed
    for rank, broadcast in enumerate((send, receive)):
        monkeypatch.setattr(
            stage_state, "collect", lambda *_, rank=rank: {} if rank else dict(expected)
        )
        world = SimpleNamespace(local_ranks=(rank,), size=2, broadcast=broadcast)
        state = whole_state(world, placed)
        assert list(state) == list(expected)
        for name, tensor in expected.items():
            assert state[name].dtype == tensor.dtype, name
            assert torch.equal(state[name], tensor), name
        assert len(messages) == (0 if rank else 11)


def test_threads_have_the_whole_state_without_messages(monkeypatch):
    """It is in one process."""
    pipe = two_stages()
    pipe._world.broadcast = None
    assert whole_state(pipe._world, pipe._assembly.placed).keys() == pipe.state_dict().keys()


@pytest.mark.parametrize("as_list", [False, True])
def test_a_model_is_filled_with_all_tensors_of_a_state(as_list):
    """A list of modules has the names of an `nn.Sequential`; the model keeps its own tensors."""
    layers = [nn.Linear(2, 3), nn.BatchNorm1d(3)]
    target = layers if as_list else nn.Sequential(*layers)
    weight = layers[0].weight
    state = {name: tensor + 1 for name, tensor in nn.Sequential(*layers).state_dict().items()}
    fill(target, state)
    torch.testing.assert_close(dict(nn.Sequential(*layers).state_dict()), state)
    assert layers[0].weight is weight
    assert weight.requires_grad
    assert weight.grad_fn is None


def test_extra_state_of_a_model_is_left_alone():
    """It is no tensor, and a pipeline's state does not have it."""

    class Extra(nn.Linear):
        """A layer with extra state."""

        def get_extra_state(self):
            """Return a number."""
            return 7

    model = nn.Sequential(Extra(2, 2))
    fill(model, {"0.weight": torch.ones(2, 2), "0.bias": torch.zeros(2)})
    assert torch.equal(model[0].weight, torch.ones(2, 2))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda state: state.pop("0.bias"), "1 tensors .* \\('0.bias'\\)"),
        (lambda state: state.update(more=torch.ones(1)), "1 tensors .* \\('more'\\)"),
        (lambda state: state.update({"0.bias": torch.ones(2)}), "1 tensors .* \\('0.bias'\\)"),
        (lambda state: state.update({"0.bias": torch.ones(3, 1)}), "1 tensors .* \\('0.bias'\\)"),
        (
            lambda state: state.update({name: torch.ones(1) for name in "abcd"}),
            "4 tensors .* \\('a', 'b', 'c', 'd'\\)",
        ),
        (
            lambda state: state.update({name: torch.ones(1) for name in "abcde"}),
            "5 tensors .* \\('a', 'b', 'c', 'd', …\\)",
        ),
    ],
)
def test_a_state_of_another_model_is_refused_and_changes_nothing(change, text):
    """A name is in one of the two, or a shape differs; up to four examples are named."""
    model = nn.Sequential(nn.Linear(2, 3))
    before = copy.deepcopy(model.state_dict())
    state = {name: tensor + 1 for name, tensor in before.items()}
    change(state)
    with pytest.raises(SettingError, match=text):
        fill(model, state)
    torch.testing.assert_close(dict(model.state_dict()), dict(before), rtol=0, atol=0)


def test_a_model_without_memory_is_refused():
    """Also if only a part of it is on the meta device."""
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2, device="meta"))
    state = {name: torch.ones(tensor.shape) for name, tensor in model.state_dict().items()}
    with pytest.raises(SettingError, match="the model is on the meta device"):
        fill(model, state)


class Pipe(ModelState):
    """A pipeline whose ranks are threads, with stand-ins for its parts."""

    def __init__(self, pipe):
        self.log = []
        self._assembly, self._world = pipe._assembly, pipe._world
        self._guard = None

    def _enter(self, call):
        self.log.append(call)


@pytest.mark.parametrize("stale", [0, 1])
@pytest.mark.parametrize("as_list", [False, True])
def test_a_filled_model_may_be_read_and_one_that_was_not_filled_stays_stale(as_list, stale):
    """Its layers have the values of all ranks then; after a failure it is as it was before."""
    pipe = Pipe(two_stages())
    layers = [Scales(), Scales()]
    model = layers if as_list else nn.Sequential(*layers)
    guards = [Guard(0, 2, {index: str(index)}, stale=index == stale) for index in range(2)]
    for guard, layer in zip(guards, layers, strict=True):
        guard.watch([layer], [], copies=False)
    layers[0].register_buffer("surplus", torch.ones(1))
    with pytest.raises(SettingError, match="surplus"):
        pipe.load_into(model)
    assert [guard.stale for guard in guards] == [stale == 0, stale == 1]
    del layers[0].surplus
    pipe.load_into(model)
    assert [guard.stale for guard in guards] == [False, False]
    assert pipe.log == ["load_into"] * 2
    assert torch.equal(layers[1].weight, pipe._assembly.stages[1].layers[0].module.weight)


@pytest.mark.parametrize("stale", [False, True])
def test_a_model_that_was_filled_in_part_is_as_stale_as_before(stale, monkeypatch):
    """Also if the user has interrupted it."""
    pipe = Pipe(two_stages())
    model = nn.Sequential(Scales(), Scales())
    guard = Guard(0, 2, {0: "0"}, stale=stale)
    guard.watch([model], [], copies=False)
    monkeypatch.setattr(model_state_methods, "fill", failing(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        pipe.load_into(model)
    assert guard.stale == stale


def test_marks_and_release_reach_the_guard_of_the_pipeline():
    """A guard of stale layers stays on the model when the pipeline is closed."""
    pipe = Pipe(two_stages())
    pipe._mark_stale()
    pipe._release_guard()
    model = nn.Linear(2, 2)
    pipe._guard = guard = Guard(0, 1, {0: "a"})
    guard.watch([model], [], copies=False)
    pipe._mark_stale()
    assert guard.stale
    pipe._release_guard()
    assert guards_of([model]) == [guard]
    guard.stale = False
    pipe._release_guard()
    assert guards_of([model]) == []


def test_an_average_is_saved_with_the_pipeline_unless_it_is_refused():
    """Refused where processes share layers, and where a loaded one would be lost."""
    pipe = two_stages(optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    first, second = pipe.ema(), pipe.ema(0.5)
    assert pipe._persistence.averages == [first, second]
    pipe._persistence.progress = SimpleNamespace(averages=(1, 1, 1), step=3)
    with pytest.raises(SettingError, match="3 running averages"):
        pipe.ema()

    def refuse(what, instead):
        raise SettingError(f"{what}: {instead}")

    pipe._persistence.progress = SimpleNamespace(averages=())
    vars(pipe)["_assembly"] = SimpleNamespace(check_unshared=refuse)
    with pytest.raises(SettingError, match=r"^ema: average the weights of saved checkpoints$"):
        pipe.ema()
    assert pipe._persistence.averages == [first, second]


@pytest.mark.parametrize("stale", [False, True])
def test_threads_are_refused_a_model_that_other_processes_have_trained(stale):
    """They would train on from old values; else the earlier guard is removed."""
    pipe = two_stages()
    model = nn.Sequential(Scales(), Scales())
    Guard(1, 2, {0: "a"}, stale).watch([model], [model[0]], copies=False)
    traced = ps.chain(model)
    if stale:
        with pytest.raises(RunError, match=r"^training of the model on rank 1 would give wrong"):
            guard_for(traced, pipe._assembly)
        assert len(guards_of([model])) == 1
    else:
        assert guard_for(traced, pipe._assembly) is None
        assert guards_of([model]) == []


def test_a_process_guards_the_layers_of_other_ranks():
    """By the layers of all of its ranks; the message has the first of these."""
    model = nn.Sequential(*[nn.Linear(2, 2) for _ in range(4)])
    traced = ps.chain(model)
    stages = [SimpleNamespace(layers=[SimpleNamespace(index=index)]) for index in (1, 3)]
    world = SimpleNamespace(local_ranks=(2, 4), size=5)
    guard = guard_for(traced, SimpleNamespace(world=world, stages=stages))
    assert (guard.rank, sorted(guard.remote_layers)) == (2, [0, 2])
