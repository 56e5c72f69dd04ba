"""Tests of the guard against reading stale layers, on its own and in one process."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

from penstock.errors import RunError
from penstock.runtime.stale_guard import Guard, guards_of


def guarded(*, copies=False, stale=True, names=("a", "b")):
    """Return a model with a guard on itself and on its second layer."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    guard = Guard(1, 7, dict(enumerate(names)), stale)
    guard.watch([model], [model[1]], copies=copies)
    return model, guard


@pytest.mark.parametrize(
    ("names", "figures"),
    [
        (("a",), "1 of its 7 layers ('a') are"),
        (("a", "b", "a"), "2 of its 7 layers ('a', 'b') are"),
        (("a", "b", "c"), "3 of its 7 layers ('a', 'b', 'c') are"),
        (("a", "b", "c", "d"), "4 of its 7 layers ('a', 'b', 'c', …) are"),
    ],
)
def test_the_message_names_call_rank_and_up_to_three_layers_once(names, figures):
    """A name that several tensors have counts once."""
    guard = Guard(1, 7, dict(enumerate(names)), stale=True)
    with pytest.raises(RunError) as caught:
        guard.check("reading")
    assert str(caught.value).startswith("reading of the model on rank 1 would")
    assert figures in str(caught.value)


def test_a_stale_model_refuses_every_way_of_reading_it():
    """Its values are those from before the training."""
    model, _ = guarded()
    x = torch.ones(1, 2)
    for call, read in {
        "state_dict()": model.state_dict,
        "running": lambda: model(x),
        "copying": lambda: copy.deepcopy(model),
        "pickling": lambda: pickle.dumps(model),
    }.items():
        with pytest.raises(RunError) as caught:
            read()
        assert str(caught.value).startswith(f"{call} of the model")
    with pytest.raises(RunError, match="running"):
        model[1](x)
    model[0](x)  # a layer that this rank trains stays callable


def test_a_model_that_is_not_stale_is_read_as_without_a_guard():
    """Its copies do not become stale with it."""
    model, guard = guarded(stale=False)
    x = torch.ones(1, 2)
    output, copied = model(x), copy.deepcopy(model)
    loaded = pickle.loads(pickle.dumps(model))
    guard.mark()
    for other in (copied, loaded):  # these have the values from before the training
        assert other.state_dict().keys() == {"0.weight", "0.bias", "1.weight", "1.bias"}
        assert torch.equal(other(x), output)
        assert not guards_of([other])


def test_a_copy_of_a_stale_traced_model_is_stale_too():
    """Until the guard is released, for the copy as well."""
    model, guard = guarded(copies=True)
    copied = copy.deepcopy(model)
    assert guards_of([copied]) == [guard]
    with pytest.raises(RunError, match="state_dict"):
        copied.state_dict()
    guard.release()
    copied.state_dict()


def test_marking_reaches_all_later_guards_and_no_earlier_one():
    """Later pipelines train the model that the earlier one has left."""
    guards = [Guard(0, 1, {}) for _ in range(3)]
    guards[0].successor, guards[1].successor = guards[1:]
    guards[1].mark()
    assert [guard.stale for guard in guards] == [False, True, True]


def test_release_restores_the_call_that_the_module_had():
    """Also one that was replaced before, such as by a compiler."""
    model, guard = guarded()
    other = Guard(0, 2, {0: "x"})
    before = dict(vars(model[0]))
    vars(model[0])["_compiled_call_impl"] = compiled = lambda x: x + 1
    other.watch([], [model[0], model[0]], copies=False)
    x = torch.ones(1, 2)
    assert torch.equal(model[0](x), x + 1)
    other.release()
    assert vars(model[0])["_compiled_call_impl"] is compiled
    guard.release()
    assert not guard.stale
    assert vars(model[1]).keys() == before.keys()
    assert not model._state_dict_pre_hooks


def test_release_leaves_the_call_of_a_later_guard():
    """The model of a later pipeline may still be stale."""
    model, guard = guarded(stale=False)
    later = Guard(0, 2, {0: "x"}, stale=True)
    later.watch([], [model[1]], copies=False)
    guard.release()
    with pytest.raises(RunError, match="rank 0"):
        model[1](torch.ones(1, 2))


def test_guards_of_submodules_are_listed_once():
    """By the order of the modules."""
    model, guard = guarded()
    guard.watch([model[0], model[1]], [], copies=False)
    assert guards_of([nn.ModuleList([model]), model]) == [guard]
    assert guards_of([nn.ModuleList([model])]) == [guard]
    other, second = guarded()
    assert guards_of([model, other]) == [guard, second]
