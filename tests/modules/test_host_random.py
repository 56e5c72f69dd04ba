"""Python's and NumPy's global generators: their state, their seed, and which code mentions them."""

from __future__ import annotations

import collections
import functools
import random
import sys
from types import ModuleType

import numpy as np
import pytest
import torch
from torch import nn

from penstock.modules.host_random import (
    closure_of,
    equal_states,
    host_state,
    mentions_host_generators,
    names_of_code,
    restore_host,
    seed_host,
)

GENERATOR = random.Random(1)
DRAW = random.random
NUMPY_DRAW = np.random.rand


@pytest.fixture(autouse=True)
def restored_generators():
    """Give the generators back as they were."""
    state = host_state()
    yield
    restore_host(state)


def draw():
    """Draw from both generators."""
    return random.random(), np.random.random()  # noqa: NPY002


def test_a_restored_state_repeats_the_numbers_of_both_generators():
    """A recomputed layer draws what its first forward drew."""
    state = host_state()
    first = draw()
    assert draw() != first
    restore_host(state)
    assert draw() == first


def test_one_seed_is_one_state_of_both_generators():
    """NumPy takes 32 bits of it; the others still count for Python's."""
    seed_host(5)
    first = draw()
    seed_host(5)
    assert draw() == first
    seed_host(5 + 2**32)
    python, numpy = draw()
    assert (python == first[0], numpy == first[1]) == (False, True)
    for other in (6, 5 + 2**31):
        seed_host(other)
        assert all(new != old for new, old in zip(draw(), first, strict=True))


def test_a_state_without_numpy_is_that_of_python_alone(monkeypatch):
    """Importing NumPy for a seed would cost its time in every process."""
    monkeypatch.delitem(sys.modules, "numpy.random")
    state = host_state()
    assert state[1] is None
    first = random.random()
    seed_host(3)
    restore_host(state)
    assert random.random() == first
    monkeypatch.undo()
    numpy_state = host_state()
    restore_host(state)
    assert equal_states((state[0], numpy_state[1]), (state[0], host_state()[1]))


@pytest.mark.parametrize("error", [TypeError, ValueError, AttributeError])
def test_a_bit_generator_that_takes_no_seed_is_left_alone(monkeypatch, error):
    """The user has installed it, and Python's generator is seeded all the same."""

    def refuse(seed):
        raise error

    monkeypatch.setattr(np.random, "seed", refuse)
    seed_host(1)
    first = random.random()
    seed_host(1)
    assert random.random() == first


def test_states_are_equal_until_one_of_the_generators_draws():
    """States contain arrays, which `==` would compare element by element."""
    before = host_state()
    assert equal_states(before, host_state())
    random.random()
    assert not equal_states(before, host_state())
    restore_host(before)
    np.random.random()  # noqa: NPY002
    assert not equal_states(before, host_state())


def plain_help(x):
    """Return the input."""
    return x


def python_help(x):
    """Draw from Python's generator."""
    return x * random.random()


def indirect_help(x):
    """Call a function that draws."""
    return python_help(x)


def recursive_help(x):
    """Call itself."""
    return recursive_help(x) if x is None else x


def aliased_help(x):
    """Draw by another name of a method of Python's generator."""
    return x * DRAW()


def numpy_help(x):
    """Draw by another name of a function of NumPy's generator."""
    return x * NUMPY_DRAW()


PYTHON_MODULE, NUMPY_MODULE = random, np.random


def python_module_help(x):
    """Draw by another name of the module of Python's generator."""
    return x * PYTHON_MODULE.uniform(0, 1)


def numpy_module_help(x):
    """Draw by another name of the module of NumPy's generator."""
    return x * NUMPY_MODULE.uniform()


def nested_help(x):
    """Draw in a function inside this one."""

    def noise():
        return random.random()

    return x * noise()


def noisy(function):
    """Return a function that draws, and calls another one."""

    @functools.wraps(function)
    def wrapper(x):
        return function(x) * random.random()

    return wrapper


def doubling(function):
    """Return a function that calls another one."""

    @functools.wraps(function)
    def wrapper(x):
        return 2 * function(x)

    return wrapper


def closing_over(value):
    """Return a function that reads a variable of this one."""

    def call(x):
        return value(x)

    return call


def layer(function):
    """Return a layer of a user whose forward calls a function."""

    class Layer(nn.Module):
        def forward(self, x):
            return function(x)

    return Layer()


@pytest.mark.parametrize(
    ("function", "draws"),
    [
        (plain_help, False),
        (recursive_help, False),
        (torch.rand_like, False),
        (len, False),
        (collections.Counter, False),
        (python_help, True),
        (indirect_help, True),
        (aliased_help, True),
        (numpy_help, True),
        (nested_help, True),
        (python_module_help, True),
        (numpy_module_help, True),
        (noisy(plain_help), True),
        (doubling(python_help), True),
        (doubling(plain_help), False),
        (functools.cache(python_help), True),
        (functools.cache(plain_help), False),
        (torch.no_grad()(python_help), True),
        (torch.no_grad()(plain_help), False),
        (closing_over(python_help), True),
        (closing_over(plain_help), False),
        (random.random, True),
        (random.Random(2).uniform, True),
        (np.random.random, True),
    ],
)
def test_functions_that_a_forward_calls_are_searched(function, draws):
    """At any distance, through closures and wrappers; each once."""
    assert mentions_host_generators(layer(function)) is draws
    assert mentions_host_generators(nn.Sequential(nn.Linear(1, 1), layer(function))) is draws


class Base(nn.Module):
    """A user's base class whose method draws."""

    def noise(self):
        """Draw."""
        return random.random()

    def forward(self, x):
        """Return the input."""
        return x


class Derived(Base):
    """Inherits a method that draws."""

    def forward(self, x):
        """Return the input."""
        return x


class WithProperty(nn.Module):
    """Draws in a property."""

    @property
    def noise(self):
        """Draw."""
        return random.random()

    def forward(self, x):
        """Return the input."""
        return x


class WithStatic(nn.Module):
    """Draws in a static method."""

    @staticmethod
    def noise():
        """Draw."""
        return random.random()

    def forward(self, x):
        """Return the input."""
        return x


class WithClassMethod(nn.Module):
    """Draws in a class method."""

    @classmethod
    def noise(cls):
        """Draw."""
        return np.random.random()  # noqa: NPY002

    def forward(self, x):
        """Return the input."""
        return x


@pytest.mark.parametrize("kind", [Base, Derived, WithProperty, WithStatic, WithClassMethod])
def test_methods_and_properties_of_a_class_and_its_bases_are_searched(kind):
    """A forward may call any of them."""
    assert mentions_host_generators(kind())


def test_modules_of_torch_mention_no_host_generators():
    """They draw from torch's generators, and searching their code would take seconds."""
    assert not mentions_host_generators(nn.Sequential(nn.Linear(1, 1), nn.Dropout(0.5)))


@pytest.mark.parametrize("register", ["register_forward_hook", "register_forward_pre_hook"])
@pytest.mark.parametrize(("hook", "draws"), [(python_help, True), (plain_help, False)])
def test_hooks_and_replaced_forwards_are_searched(register, hook, draws):
    """Also those of torch's own modules."""
    hooked = nn.Linear(1, 1)
    getattr(hooked, register)(hook)
    assert mentions_host_generators(nn.Sequential(hooked)) is draws
    replaced = nn.Linear(1, 1)
    replaced.forward = hook
    assert mentions_host_generators(replaced) is draws


def test_functions_of_the_user_s_modules_are_searched_by_their_names():
    """`helpers.noise(x)` names a global module and one of its functions, not the others."""
    helpers = ModuleType("user_helpers")
    helpers.noise, helpers.identity = python_help, plain_help
    space = {"helpers": helpers, "__name__": "user_program"}
    exec("def noisy(x): return helpers.noise(x)\ndef calm(x): return helpers.identity(x)", space)
    assert mentions_host_generators(layer(space["noisy"]))
    assert not mentions_host_generators(layer(space["calm"]))


def test_a_closure_yields_the_variables_that_have_values():
    """A variable may be assigned after the function was defined."""

    def outer(a):
        def inner():
            return a, b

        early = dict(closure_of(inner))
        b = 2
        return early, dict(closure_of(inner))

    assert outer(1) == ({"a": 1}, {"a": 1, "b": 2})
    assert list(closure_of(plain_help)) == []


def test_names_of_code_include_those_of_inner_functions():
    """Globals and attributes, and not local variables."""

    def outer(local):
        def inner():
            return [GENERATOR.random() for _ in local]

        return inner, sys.modules

    names = set(names_of_code(outer.__code__))
    assert {"GENERATOR", "random", "sys", "modules"} <= names
    assert "local" not in names
