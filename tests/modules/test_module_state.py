"""State of modules besides their weights: its names, its changes, and its restoring."""

from __future__ import annotations

import random
import warnings
from collections import deque
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import weight_norm

from penstock.modules.module_state import (
    ModuleState,
    cell_value,
    computed_tensors,
    differing_names,
)


class Keeper(nn.Module):
    """A layer of a user with a buffer and Python state."""

    def __init__(self, **attributes):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.frozen = nn.Parameter(torch.ones(1), requires_grad=False)
        self.register_parameter("bias", None)
        self.register_buffer("mean", torch.zeros(2))
        self.register_buffer("mask", torch.zeros(1), persistent=False)
        self.register_buffer("absent", None)
        vars(self).update(attributes)


def state_of(**attributes):
    """Return the state of one keeper, under the name `layer`, and the keeper."""
    keeper = Keeper(**attributes)
    return ModuleState([("layer", keeper)]), keeper


def test_buffers_and_weights_have_the_names_of_the_model_and_are_not_copied():
    """The module of the model itself has no prefix; None is neither a buffer nor a weight."""
    model = nn.Sequential(Keeper(), nn.Linear(1, 1))
    state = ModuleState(model.named_modules())
    assert list(state.buffers()) == ["0.mean", "0.mask"]
    assert list(state.weights()) == ["0.weight", "0.frozen", "1.weight", "1.bias"]
    assert state.buffers()["0.mean"] is model[0].mean
    assert state.weights()["0.frozen"] is model[0].frozen
    assert list(ModuleState([("", Keeper())]).buffers()) == ["mean", "mask"]


def test_a_module_with_two_names_counts_under_its_first():
    """A shared layer has its state once."""
    keeper = Keeper(count=1)
    state = ModuleState([("a", keeper), ("b", keeper), ("c", Keeper())])
    assert [name for name, _ in state.modules] == ["a", "c"]
    assert list(state.places()) == ["a.count"]


def test_digests_of_buffers_differ_only_where_contents_do():
    """Equal contents are equal, also in other memory and after a change that was undone."""
    state, keeper = state_of()
    before = state.buffer_contents()
    keeper.mean.add_(1).sub_(1)
    keeper.mask = keeper.mask.clone()
    assert differing_names(before, state.buffer_contents()) == []
    keeper.mean[1] = 3.0
    assert differing_names(before, state.buffer_contents()) == ["layer.mean"]


def test_versions_differ_after_every_change_of_a_buffer():
    """Replaced or written in place, even with the same contents."""
    state, keeper = state_of()
    before = state.versions()
    assert state.versions() == before
    keeper.mean.add_(0)
    written = state.versions()
    previous, keeper.mask = keeper.mask, keeper.mask.clone()
    replaced = state.versions()
    assert len({before, written, replaced}) == 3
    assert previous is not keeper.mask


def test_marks_of_weights_tell_changes_with_and_without_autograd():
    """A write through `.data` leaves the version, a replaced weight may have the same sum."""
    state, keeper = state_of()
    before = state.weight_marks()
    assert differing_names(before, state.weight_marks()) == []
    keeper.weight.data[0] = float("nan")
    diverged = state.weight_marks()
    assert differing_names(before, diverged) == ["layer.weight"]
    assert differing_names(diverged, state.weight_marks()) == []
    keeper.weight.data[0] = 5.0
    assert differing_names(before, state.weight_marks()) == ["layer.weight"]
    keeper.weight.data[0] = 1.0
    with torch.no_grad():
        keeper.frozen.mul_(1)
    assert differing_names(before, state.weight_marks()) == ["layer.frozen"]
    previous, keeper.weight = keeper.weight, nn.Parameter(torch.ones(2))
    assert differing_names(before, state.weight_marks()) == ["layer.weight", "layer.frozen"]
    assert previous is not keeper.weight


def test_weights_without_readable_values_have_marks_too():
    """On the meta device only identity and version are there."""
    layer = nn.Linear(2, 2, bias=False, device="meta")
    state = ModuleState([("layer", layer)])
    before = state.weight_marks()
    assert differing_names(before, state.weight_marks()) == []
    with torch.no_grad():
        layer.weight.add_(1)
    assert differing_names(before, state.weight_marks()) == ["layer.weight"]


def test_names_in_one_state_only_differ():
    """A missing entry is not the same as None; names come in the order of the states."""
    before, after = {"b": 1, "a": None, "c": 2}, {"d": None, "c": 2, "b": 3}
    assert differing_names(before, after) == ["b", "a", "d"]


def test_places_are_the_attributes_of_user_modules():
    """What torch keeps in every module, and modules of torch, have none; dunder names are Python's."""
    model = nn.Sequential(Keeper(count=1, _seen=3, __cache__=2), nn.Dropout(0.5))
    model[1].note = "ignored"
    places = ModuleState(model.named_modules()).places()
    assert list(places) == ["0.count", "0._seen"]
    places["0.count"].set(5)
    assert places["0.count"].get() == model[0].count == 5


def test_places_of_attributes_do_not_run_properties():
    """A property of the user's may do anything."""

    class Guarded(Keeper):
        @property
        def count(self):
            raise AssertionError

    guarded = Guarded(count=1)
    places = ModuleState([("", guarded)]).places()
    places["count"].set(2)
    assert places["count"].get() == vars(guarded)["count"] == 2


def test_hooks_keep_state_in_closures_and_objects():
    """A counter of a function, of a method's object, and of a callable object, also in `partial`."""
    calls, layer = [0], nn.Linear(1, 1)
    owner, caller, inner = SimpleNamespace(seen=1), Callable(seen=2), Callable(seen=3)

    def hook(*_):
        calls.append(0)

    layer.register_forward_pre_hook(hook)
    layer.register_forward_hook(partial(partial(Callable.method, owner)))
    layer.register_forward_hook(Callable(count=1).method)
    layer.register_forward_hook(caller)
    layer.register_forward_hook(partial(partial(inner, 1), 2))
    layer.register_forward_hook(Wrapper(partial(Wrapper(Callable(wrapped=1)), 1)))
    layer.register_forward_hook(nn.Identity())
    places = ModuleState([("layer", layer)]).places()
    assert {name.partition(" of layer: ")[2] for name in places} == {
        *("calls", "count", "seen", "wrapped")
    }
    assert all(name.startswith("the hook ") for name in places)
    (closure,) = [place for name, place in places.items() if name.endswith("calls")]
    assert closure.get() is calls
    closure.set([1])
    assert closure.get() == [1]
    (attribute,) = [place for name, place in places.items() if name.endswith("count")]
    attribute.set(7)
    assert attribute.get() == 7


class Wrapper:
    """A decorator of a user, which has the function in `func`, as `functools.partial` does."""

    def __init__(self, func):
        self.func = func

    def __call__(self, *values):
        """Call the function."""
        return self.func(*values)


class Callable:
    """An object that may be a hook, itself or by its method."""

    def __init__(self, **fields):
        vars(self).update(fields)

    def __call__(self, *_):
        """Do nothing."""

    def method(self, *_):
        """Do nothing."""


def test_variables_without_a_value_are_none():
    """A closure may be read before it is assigned."""

    def outer():
        def inner():
            return later

        cell = inner.__closure__[0]
        empty = cell_value(cell)
        later = 4
        return empty, cell_value(cell)

    assert outer() == (None, 4)


def mutate(keeper):
    """Change every attribute of a keeper in place."""
    keeper.tensor.add_(1)
    keeper.array += 1
    keeper.python.random()
    keeper.numpy.random()
    torch.rand(1, generator=keeper.torch)
    keeper.items.append(1)
    keeper.queue.appendleft(1)
    keeper.table["b"] = 2
    del keeper.table["a"]
    keeper.names.add("b")


def test_restored_variables_are_the_same_objects_with_the_same_contents():
    """Others may refer to the objects, so new ones in their place would not do."""
    attributes = {
        "tensor": torch.zeros(2),
        "array": np.zeros(2),
        "python": random.Random(1),
        "numpy": np.random.default_rng(1),
        "torch": torch.Generator().manual_seed(1),
        "items": [torch.zeros(1)],
        "queue": deque([3], maxlen=2),
        "table": {"a": 1},
        "names": {"a"},
        "number": 1,
    }
    state, keeper = state_of(**attributes)
    values, snapshots = state.values(), state.keep()
    changed = [f"layer.{name}" for name in attributes if name != "number"]
    mutate(keeper)
    assert differing_names(values, state.values()) == changed
    state.put_back(snapshots)
    assert differing_names(values, state.values()) == []
    keeper.number, keeper.items, keeper.tensor = 2, [5], torch.ones(3)
    state.put_back(snapshots)
    assert differing_names(values, state.values()) == []
    assert all(vars(keeper)[name] is value for name, value in attributes.items())


def test_containers_in_containers_are_restored_too():
    """A log of lists by name must not keep what an observation has appended."""
    inner, queue, tensor = [1], deque([2]), torch.zeros(1)
    log = {"losses": inner, "pair": (queue, {"tensor": tensor})}
    state, keeper = state_of(log=log)
    values, snapshots = state.values(), state.keep()
    inner.append(3)
    queue.clear()
    tensor.add_(1)
    log["losses"] = []
    log["pair"][1]["new"] = 4
    assert differing_names(values, state.values()) == ["layer.log"]
    state.put_back(snapshots)
    assert differing_names(values, state.values()) == []
    assert keeper.log["losses"] is inner
    assert keeper.log["pair"][1]["tensor"] is tensor


def test_a_container_that_contains_itself_is_restored():
    """As deep as it is compared."""
    ring = [1]
    ring.append(ring)
    state, _ = state_of(ring=ring)
    snapshots = state.keep()
    ring[0] = 2
    state.put_back(snapshots)
    assert (ring[0], ring[1] is ring, len(ring)) == (1, True, 2)


def test_variables_that_appeared_later_stay():
    """There is nothing to restore them to."""
    state, keeper = state_of(number=1)
    snapshots = state.keep()
    keeper.later, keeper.number = 3, 2
    state.put_back(snapshots)
    assert (keeper.later, keeper.number) == (3, 1)


def test_a_restored_tensor_still_serves_a_backward_that_saved_it():
    """The contents are written back as they were, so autograd must not count it as a change."""
    state, keeper = state_of(scale=torch.full((1,), 3.0))
    x = torch.ones(1, requires_grad=True)
    output = x * keeper.scale
    state.put_back(state.keep())
    output.backward()
    assert x.grad.item() == 3.0


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
def test_copies_of_modules_get_detached_copies_of_computed_tensors():
    """torch refuses to deepcopy a tensor with a graph; others are left to deepcopy."""
    normed = weight_norm(nn.Linear(2, 2))
    keeper = Keeper(
        last=torch.ones(2, requires_grad=True) * 3,
        plain=torch.ones(1),
        trained=torch.ones(1, requires_grad=True),
    )
    memo = computed_tensors([nn.Sequential(normed), keeper])
    assert set(memo) == {id(normed.weight), id(keeper.last)}
    copy = memo[id(keeper.last)]
    assert (copy.requires_grad, copy.tolist()) == (False, [3.0, 3.0])
    assert copy.data_ptr() != keeper.last.data_ptr()


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.complex64, torch.bfloat16, torch.complex128]
)
def test_a_change_of_a_weight_that_autograd_does_not_see_changes_its_mark(dtype):
    """A change through `.data` leaves the version as it is. No part of a complex weight is lost."""
    layer = nn.Module()
    layer.changed, layer.same = (nn.Parameter(torch.ones(3, dtype=dtype)) for _ in range(2))
    state = ModuleState([("layer", layer)])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        before = state.weight_marks()
        layer.changed.data[1] += 2j if dtype.is_complex else 2
        changed = differing_names(before, state.weight_marks())
    assert changed == ["layer.changed"]
