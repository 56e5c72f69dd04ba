"""Single layers with skips: namespaces, what waits after an error, classes and names of states."""

from __future__ import annotations

import contextlib
import copy
import pickle

import pytest
import torch
from torch import nn

from penstock.errors import ChainError
from penstock.modules.skippable import (
    Namespace,
    Skip,
    Skippable,
    pop,
    skippable,
    stash,
    waiting_skips,
    with_skip_carriers,
)

ONE, OTHER = torch.tensor(1.0), torch.tensor(2.0)


@skippable(stash=["b", "a"], pop=["d", "c"])
class Both(nn.Module):
    """Swaps two tensors with two others."""

    def forward(self, x, *, fails=False):
        """Pop, stash, and return what the requests have returned."""
        c = yield pop("c")
        nothing = yield stash("a", x)
        if fails:
            raise KeyError
        d = yield pop("d")
        also_nothing = yield stash("b", None)
        return c, nothing, d, also_nothing


@skippable(stash=["a"])
class Stashing(nn.Module):
    """Stashes its input."""

    def forward(self, x):
        """Return another value."""
        yield stash("a", x)
        return x + 1


@skippable(pop=["a"])
class Popping(nn.Module):
    """Adds a stashed tensor."""

    def forward(self, x):
        """Return the sum."""
        return x + (yield pop("a"))


def test_requests_return_what_was_popped_and_nothing_for_what_was_stashed():
    """Each pop its own tensor; None may be stashed."""
    waiting = {Skip(None, "c"): ONE, Skip(None, "d"): OTHER, Skip(None, "e"): ONE}
    with waiting_skips(waiting):
        c, nothing, d, also_nothing = Both()(ONE + 4)
    assert (c, nothing, d, also_nothing) == (ONE, None, OTHER, None)
    assert waiting == {Skip(None, "e"): ONE, Skip(None, "a"): ONE + 4, Skip(None, "b"): None}


def test_a_layer_that_lacks_a_tensor_takes_none():
    """The others are left for whoever handles the error."""
    waiting = {Skip(None, "c"): ONE}
    with waiting_skips(waiting), pytest.raises(RuntimeError, match="'d' has not been stashed"):
        Both()(ONE)
    assert waiting == {Skip(None, "c"): ONE}


def test_a_failed_layer_stashes_nothing():
    """A later batch would pop the tensor of this one."""
    waiting = {Skip(None, "c"): ONE, Skip(None, "d"): OTHER}
    with waiting_skips(waiting), pytest.raises(KeyError):
        Both()(ONE, fails=True)
    assert Skip(None, "a") not in waiting


def test_waiting_tensors_are_those_of_the_innermost_block():
    """Also after an error; a layer outside of all blocks has those of its thread."""
    outer, inner = {}, {}
    with waiting_skips(outer):
        with contextlib.suppress(KeyError), waiting_skips(inner):
            Stashing()(ONE)
            raise KeyError
        Stashing()(OTHER)
    assert (outer, inner) == ({Skip(None, "a"): OTHER}, {Skip(None, "a"): ONE})
    with pytest.raises(RuntimeError, match="has not been stashed"):
        Popping()(ONE)


def test_skips_have_the_namespace_that_was_assigned_last():
    """Only of the given names; all others keep theirs. Skips come in the order of their names."""
    first, second = Namespace(), Namespace()
    layer = Both()
    assert layer.stashable() == [Skip(None, "a"), Skip(None, "b")]
    assert layer.poppable() == [Skip(None, "c"), Skip(None, "d")]
    assert layer.isolate(first, only=["a", "c"]) is layer
    assert [skip.namespace for skip in layer.stashable()] == [first, None]
    assert [skip.namespace for skip in layer.poppable()] == [first, None]
    layer.isolate(second, only=[])
    assert [skip.namespace for skip in layer.poppable()] == [first, None]
    layer.isolate(second, only=["a"])
    assert [skip.namespace for skip in layer.stashable()] == [second, None]
    assert [skip.namespace for skip in layer.poppable()] == [first, None]
    layer.isolate(second)
    assert {skip.namespace for skip in (*layer.stashable(), *layer.poppable())} == {second}
    assert Both().stashable()[0].namespace is None, "other layers of the class have their own"


def test_a_name_that_is_no_skip_of_the_layer_is_refused_and_changes_nothing():
    """The message lists those that it has."""
    layer = Stashing()
    with pytest.raises(ValueError, match="Stashing has no skip 'c' to isolate; it has 'a'"):
        layer.isolate(Namespace(), only=["a", "c"])
    assert layer.stashable() == [Skip(None, "a")]
    with pytest.raises(ValueError, match="has no skip 'c' to isolate; it has none"):
        skippable()(nn.Identity)().isolate(Namespace(), only=["c"])


def test_a_copied_namespace_is_the_same_one():
    """Models are copied and pickled with their layers."""
    space = Namespace()
    for twin in (copy.deepcopy(space), pickle.loads(pickle.dumps(space))):
        assert (twin == space, hash(twin) == hash(space)) == (True, True)
        assert {Skip(space, "a"): ONE}[Skip(twin, "a")] is ONE
    assert space != Namespace()
    assert space != space.id
    assert str(Skip(None, "a")) == "'a'"
    assert str(Skip(space, "a")) == f"'a' of <Namespace {space.id[:8]}>"


def test_the_class_is_that_of_the_user_with_skips():
    """Its name, module and documentation are those that the user wrote."""
    assert issubclass(Both, Skippable)
    assert (Both.__name__, Both.__qualname__, Both.__module__) == ("Both", "Both", __name__)
    assert Both.__doc__ == "Swaps two tensors with two others."
    assert repr(Stashing()) == "@skippable(Stashing())"
    assert (Stashing.stashable_names, Stashing.poppable_names) == ({"a"}, frozenset())


def test_a_state_with_the_users_own_submodule_named_module_is_taken_as_it_is():
    """Only a state of another library has a level more than the layer."""

    @skippable()
    class Nested(nn.Module):
        def __init__(self):
            super().__init__()
            self.module = nn.Linear(1, 1, bias=False)

    nested = Nested()
    nested.load_state_dict({"module.weight": torch.full((1, 1), 3.0)})
    assert nested.module.weight.item() == 3.0

    @skippable()
    class Plain(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(1))

    model = nn.Sequential(Plain(), Plain())
    model.load_state_dict({"0.module.weight": torch.ones(1), "1.weight": torch.ones(1)})
    assert [layer.weight.item() for layer in model] == [1.0, 1.0]


def test_only_layers_on_the_way_of_a_skip_are_wrapped():
    """The others take and return plain values, and are the user's own modules."""
    before, between, after = nn.Identity(), nn.Linear(1, 1), nn.Tanh()
    named = [("a", before), ("b", Stashing()), ("c.d", between), ("e", Popping()), ("f", after)]
    carried = with_skip_carriers(named)
    assert [name for name, _ in carried] == ["a", "b", "c.d", "e", "f"]
    assert (carried[0][1], carried[4][1]) == (before, after)
    wrapped = [getattr(layer, "whole_names", False) for _, layer in carried]
    assert wrapped == [False, True, True, True, False]
    assert dict(carried[2][1].named_parameters()).keys() == {"c.d.weight", "c.d.bias"}
    value, skips = carried[2][1](carried[1][1](torch.ones(1, 1)))
    assert skips == (torch.ones(1, 1),)
    assert torch.equal(carried[3][1]((value, skips)), between(torch.tensor([[2.0]])) + 1)


def test_two_layers_of_one_name_are_refused():
    """Which skip belongs to which of them could not be told."""
    named = [("a", nn.Identity()), ("a", Stashing()), ("b", Popping())]
    with pytest.raises(ChainError, match="two layers have one name"):
        with_skip_carriers(named)
