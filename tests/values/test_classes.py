"""Classes that are found by name, without an import or a call."""

from __future__ import annotations

import dataclasses
import gc
from typing import NamedTuple

import pytest
from torch import nn

from penstock.errors import RunError
from penstock.values.classes import find, name_of, remember, remember_code


def local_classes():
    """A model as a script's function makes it: nothing in it has a name that a module has."""

    @dataclasses.dataclass
    class Inner:
        h: object

    class State(NamedTuple):
        inner: Inner

    def made(h):
        return State(Inner(h))

    class Layer(nn.Module):
        def forward(self, x):
            return made(x)

    return Layer(), State, Inner


def test_classes_that_a_layers_code_refers_to_are_found():
    """Through a helper function, and through a field of another class."""
    layer, state, inner = local_classes()
    with pytest.raises(RunError, match="this rank does not find that class"):
        find(name_of(state))
    remember_code([layer])
    assert find(name_of(state)) is state
    assert find(name_of(inner)) is inner


def test_the_latest_class_of_a_name_is_used_and_old_ones_are_freed():
    """A notebook cell that runs again defines its classes again."""
    _, first, _ = local_classes()
    _, second, _ = local_classes()
    remember(first)
    remember(second)
    name = name_of(first)
    assert find(name) is second
    del first, second
    gc.collect()
    with pytest.raises(RunError, match="define it at the top of a module that every rank imports"):
        find(name)


@pytest.mark.parametrize("name", ["os:system", "antigravity:fly", "builtins:eval", ":", "no"])
def test_an_unknown_class_is_refused_and_nothing_is_imported(name):
    """A name comes from another process."""
    with pytest.raises(RunError, match="does not find that class"):
        find(name)
