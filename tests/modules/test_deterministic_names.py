"""Which names the code of a forward may use for a proof that it draws nothing."""

from __future__ import annotations

import math
import random
from typing import Generic, TypeVar

import pytest
import torch
from torch import Tensor, nn

from penstock.modules.deterministic_code import is_torchs, prove_deterministic

COUNT, SIZES, TABLE = 3, (1, (2.0, "a")), torch.ones(4)
LISTED, DRAW, ops = [1], torch.rand, torch
MIXED = (1, [2])
T = TypeVar("T")


class Noise(float):
    """A number that draws where it is used."""

    def __rmul__(self, value):
        """Draw."""
        return torch.rand_like(value)


class NoisyTensor(Tensor):
    """A tensor that draws where it is used."""

    def __radd__(self, value):
        """Draw."""
        return torch.rand_like(value)


NOISE, NOISY_TENSOR = Noise(1), torch.ones(1).as_subclass(NoisyTensor)


def sum(value):  # noqa: A001 - hides the builtin
    """Draw."""
    return torch.rand_like(value)


def closing(variable):
    """Return a function that reads a variable of this one."""

    def inner(value):
        return value + variable

    return inner


def calling(function):
    """Return a function that calls a variable of this one."""

    def inner(value):
        return function(value)

    return inner


def halve(value):
    """Call a known op."""
    return value * 0.5


def noisy(value):
    """Call an op that draws."""
    return torch.rand_like(value)


PROVEN = {
    "number": lambda self, x: x * COUNT,
    "tuple": lambda self, x: x * SIZES[0],
    "tensor": lambda self, x: x + TABLE,
    "another name of a library": lambda self, x: ops.exp(x),
    "library": lambda self, x: x * math.pi,
    "builtins": lambda self, x: x * len(list(range(max(1, 2)))),
    "class of tensors": lambda self, x: x if isinstance(x, Tensor) else x * 2,
    "function": lambda self, x: halve(x),
    "default": lambda self, x, factor=2.0: x * factor,
    "default of a keyword": lambda self, x, *, function=halve: function(x),
    "nested": lambda self, x: [y * 2 for y in (x, x)],
}
REFUSED = {
    "list": lambda self, x: x * LISTED[0],
    "list in a tuple": lambda self, x: x * MIXED[0],
    "kind of number": lambda self, x: x * NOISE,
    "kind of tensor": lambda self, x: x + NOISY_TENSOR,
    "another name of an op": lambda self, x: DRAW(4),
    "module": lambda self, x: x * random.random(),
    "hidden builtin": lambda self, x: sum(x),
    "unknown builtin": lambda self, x: eval("x"),
    "missing global": lambda self, x: nowhere(x),  # noqa: F821 - that is the case
    "function": lambda self, x: noisy(x),
    "default": lambda self, x, function=torch.rand: function(4),
    "default of a keyword": lambda self, x, *, function=noisy: function(x),
    "nested": lambda self, x: [noisy(y) for y in (x, x)],
    "method of tensors": lambda self, x: x.normal_(),
    "unknown attribute": lambda self, x: x.unknown,
}


def layer(forward, base=nn.Module, **members):
    """Return a layer with this forward."""
    return type("Layer", (base,), {"forward": forward, **members})()


@pytest.mark.parametrize("name", PROVEN)
def test_known_names_are_proven(name):
    """Numbers, tensors, libraries and functions that use the same names."""
    assert prove_deterministic(layer(PROVEN[name])) is not None


@pytest.mark.parametrize("name", REFUSED)
def test_other_names_are_not(name):
    """What a name refers to may draw, or be changed without notice."""
    assert prove_deterministic(layer(REFUSED[name])) is None


@pytest.mark.parametrize(
    ("function", "proven"),
    [
        (closing(2.0), True),
        (closing(TABLE), True),
        (closing([1]), False),
        (calling(halve), True),
        (calling(noisy), False),
        (calling(calling(noisy)), False),
    ],
)
def test_variables_of_enclosing_functions_are_checked(function, proven):
    """A forward may be made by a function."""

    def forward(self, x):
        return function(x)

    assert (prove_deterministic(layer(forward)) is not None) is proven


def test_a_variable_without_a_value_is_no_proof():
    """Nobody knows what it will be."""

    def make():
        def forward(self, x):
            return later(x)

        proof = prove_deterministic(layer(forward))
        later = halve
        return proof, prove_deterministic(layer(forward)), later

    early, late, _ = make()
    assert (early, late is not None) == (None, True)


def write_attribute(self, x):
    """Store the input."""
    self.last = x
    return x


def delete_attribute(self, x):
    """Delete an attribute."""
    del self.last
    return x


def write_global(self, x):
    """Change a global name."""
    global COUNT  # noqa: PLW0603 - that is the case
    COUNT = 3
    return x


def import_name(self, x):
    """Import a module."""
    import math as maths

    return x * maths.pi


def make_class(self, x):
    """Define a class."""

    class Local:
        pass

    return x


@pytest.mark.parametrize(
    "forward", [write_attribute, delete_attribute, write_global, import_name, make_class]
)
def test_code_that_changes_names_is_no_proof(forward):
    """Later code could find something else under them."""
    assert prove_deterministic(layer(forward)) is None


@pytest.mark.parametrize("function", [halve, noisy])
@pytest.mark.parametrize(
    "kind",
    [property, staticmethod, classmethod, lambda function: function],
    ids=lambda k: k.__name__,
)
def test_members_of_the_class_are_read_by_the_names_that_code_uses(kind, function):
    """Of whatever kind; a member that no code names is not read."""
    members = {"helper": kind(function)}
    used = layer(lambda self, x: self.helper, **members)
    unused = layer(lambda self, x: x, **members)
    assert (prove_deterministic(used) is not None) is (function is halve)
    assert prove_deterministic(unused) is not None


@pytest.mark.parametrize(
    ("value", "proven"),
    [(1, True), ("a", True), (torch.float32, True), ([1], False), (halve, False)],
)
def test_attributes_of_an_instance_must_be_plain(value, proven):
    """A list may be changed in place; of a number only its kind matters."""
    instance = layer(lambda self, x: x * self.factor)
    instance.factor = value
    assert (prove_deterministic(instance) is not None) is proven


@pytest.mark.parametrize("kind", ["parameter", "buffer", "module"])
def test_tensors_and_submodules_are_known_attributes(kind):
    """They are what a forward computes with; a submodule is read as a part."""
    instance = layer(lambda self, x: self.member + x)
    if kind == "buffer":
        instance.register_buffer("member", torch.ones(1))
    else:
        instance.member = nn.Parameter(torch.ones(1)) if kind == "parameter" else nn.ReLU()
    assert prove_deterministic(instance) is not None
    instance.inner = layer(lambda self, x: noisy(x))
    assert prove_deterministic(instance) is None


@pytest.mark.parametrize("name", ["forward", "_call_impl", "_compiled_call_impl"])
def test_a_call_that_runs_something_else_is_no_proof(name):
    """The forward of the class is what is read."""
    instance = layer(lambda self, x: x)
    vars(instance)[name] = noisy
    assert prove_deterministic(instance) is None


def test_a_class_that_changes_what_a_call_runs_is_no_proof():
    """By a special method, or by one that torch's calls use; others have no part in a call."""
    harmless = {"__doc__": "Text.", "__init__": nn.Module.__init__, "__repr__": lambda self: "a"}
    assert prove_deterministic(layer(lambda self, x: x, **harmless)) is not None
    for name in ("__call__", "__getattr__", "__mul__", "_call_impl", "_apply"):
        assert prove_deterministic(layer(lambda self, x: x, **{name: noisy})) is None, name
    assert prove_deterministic(layer(lambda self, x: x, _own=1)) is not None


@pytest.mark.parametrize(
    ("base", "proven"),
    [
        (nn.Module, True),
        (nn.Linear, True),
        (nn.Sequential, True),
        (nn.GRU, False),
        (nn.Dropout, False),
    ],
)
def test_known_classes_of_torch_may_be_bases(base, proven):
    """Of others the code is not known, such as that of recurrent layers."""
    kind = type("Layer", (base,), {"forward": lambda self, x: x})
    arguments = {nn.Linear: (1, 1), nn.GRU: (1, 1)}.get(base, ())
    assert (prove_deterministic(kind(*arguments)) is not None) is proven


def test_bases_of_the_user_are_read_too():
    """A forward may be inherited, and call a method of the derived class."""

    class Base(nn.Module, Generic[T]):
        def forward(self, x):
            return self.step(x)

    class Halving(Base[int]):
        def step(self, x):
            return halve(x)

    class Noisy(Base[int]):
        def step(self, x):
            return noisy(x)

    assert prove_deterministic(Halving()) is not None
    assert prove_deterministic(Noisy()) is None
    assert prove_deterministic(nn.Sequential(Halving(), Noisy())) is None


def test_a_proof_holds_while_the_names_have_their_values(monkeypatch):
    """Another number is as good; a deleted name, or one that refers to something else, is not."""
    proof = prove_deterministic(layer(lambda self, x: halve(x) * COUNT))
    assert proof.holds()
    monkeypatch.setitem(globals(), "COUNT", 2.5)
    assert proof.holds()
    for name, value in (("COUNT", [1]), ("COUNT", noisy), ("halve", noisy), ("halve", 3)):
        with monkeypatch.context() as change:
            change.setitem(globals(), name, value)
            assert not proof.holds()
    with monkeypatch.context() as change:
        change.delitem(globals(), "halve")
        assert not proof.holds()
    assert proof.holds()


def test_only_modules_of_torch_itself_are_torch_s():
    """A subclass may do anything."""
    assert is_torchs(nn.Linear)
    assert not is_torchs(type("Linear", (nn.Linear,), {}))
