"""Constants: when two are the same, whether a tensor hides in one, and how they are sent."""

from __future__ import annotations

import enum
import functools
import itertools
import json
import math
from collections import OrderedDict

import numpy as np
import pytest
import torch
from torch import nn

from penstock.errors import RunError
from penstock.values.classes import find, name_of
from penstock.values.constants import (
    Whole,
    decode,
    describe,
    dtype_name,
    dtype_of,
    encode,
    holds_tensor,
    key_of,
    same_constant,
)


class Colour(enum.Enum):
    """An enum; AZURE is another name of BLUE."""

    RED = 1
    BLUE = 2
    AZURE = 2  # noqa: PIE796 - an alias


class Flags(enum.Flag):
    """Flags, which can be combined."""

    A = 1
    B = 2


class Plain:
    """An object whose class says nothing of equality."""


class Listed:
    """A class with the members of an enum, which is none."""

    __members__ = {"RED": 1}  # noqa: RUF012 - as enums have it


class Stubborn:
    """An object that cannot be compared."""

    def __eq__(self, other):
        raise TypeError("not comparable")

    __hash__ = None


#: Constants of which no two are the same.
DIFFERENT = [
    None,
    False,
    0,
    0.0,
    -0.0,
    1,
    True,
    1.0,
    "1",
    b"1",
    math.nan,
    math.inf,
    1j,
    slice(1),
    slice(None, 1, 2),
    range(1),
    ...,
    torch.float32,
    torch.float64,
    torch.device("cpu"),
    torch.device("meta"),
    torch.strided,
    torch.channels_last,
    torch.Size([1]),
    torch.Size([]),
    (1,),
    [1],
    {1},
    frozenset({1}),
    {1: 1},
    Colour.RED,
    Colour.BLUE,
    np.float32(1),
    np.float64(1),
    np.int64(1),
    np.bool_(True),
    int,
    Plain,
]


def test_constants_are_the_same_only_if_type_and_value_are():
    """Equal numbers of other types, and both zeros, give other results in a model."""
    for (first, one), (second, other) in itertools.product(enumerate(DIFFERENT), repeat=2):
        assert same_constant(one, other) == (first == second), (one, other)


def test_objects_are_compared_by_their_class_which_may_refuse():
    """A comparison that fails is none of equal objects; the object itself is always the same."""
    plain, stubborn = Plain(), Stubborn()
    assert same_constant(plain, plain)
    assert same_constant(stubborn, stubborn)
    assert not same_constant(plain, Plain())
    assert not same_constant(stubborn, Stubborn())
    for number in (float, np.float32, np.float64, complex):
        assert same_constant(number("nan"), number("nan"))
        assert not same_constant(number("-0.0"), number("0.0"))


def test_equal_constants_share_a_key_and_different_ones_do_not():
    """Forms of messages are looked up by it: a shared key would send the constant of another."""
    keys = [key_of(constant) for constant in DIFFERENT]
    assert len(set(keys)) == len(keys)
    for constant in (math.nan, -0.0, "text", torch.Size([1, 2]), np.float32(0.5), Colour.BLUE):
        copied = decode(json.loads(json.dumps(encode(constant))))
        assert key_of(copied) == key_of(constant)
    other_colour = enum.Enum("Colour", {"RED": 1})
    assert repr(other_colour.RED) == repr(Colour.RED)
    assert key_of(other_colour.RED) != key_of(Colour.RED)
    first, second = Plain(), Plain()
    assert key_of(first) == key_of(first) != key_of(second)


def test_descriptions_have_the_content_of_constants_alone():
    """They are compared between processes, where the address of an object differs."""
    assert describe(3) == ("builtins:int", "3")
    assert describe(torch.float16) == ("torch:dtype", "torch.float16")
    assert describe(Colour.RED)[1] == repr(Colour.RED)
    name, content = describe(Plain())
    assert (name.rpartition(":")[2], content) == ("Plain", "")
    assert describe([1])[1] == ""


def function_with(value):
    """A function with a value in its closure."""
    return lambda: value


def generator_of(value):
    """A generator that will yield a value."""
    yield value


H = torch.zeros(1)


@pytest.mark.parametrize(
    "holder",
    [
        lambda tensor: [tensor],
        lambda tensor: {"a": {"b": (tensor,)}},
        function_with,
        lambda tensor: lambda x=tensor: x,
        lambda tensor: lambda *, x=tensor: x,
        lambda tensor: np.array([None, tensor], dtype=object),
        lambda tensor: np.array([(1, tensor)], dtype=[("n", int), ("o", object)]),
        lambda tensor: np.array([[(1, {"a": tensor})]], dtype=[("n", int), ("o", object)]),
        generator_of,
        lambda tensor: nn.ParameterList([tensor]),
        lambda tensor: iter([tensor]),
    ],
)
def test_a_tensor_is_seen_wherever_python_refers_to_it(holder):
    """Its gradient would be lost. The same holder with a number has none."""
    assert holds_tensor(holder(H))
    if not isinstance(holder(H), nn.Module):
        assert not holds_tensor(holder(1))


def test_attributes_of_functions_are_searched_but_not_the_globals_of_their_module():
    """The globals belong to the module: here `H` is a tensor."""

    def reads_global():
        return H

    assert not holds_tensor(reads_global)
    reads_global.cache = H
    assert holds_tensor(reads_global)


def test_the_search_ends_at_what_is_never_sent_apart_and_in_circles():
    """Enums, classes and modules hold what belongs to the program."""

    class Settings(Whole):
        """An object of the product."""

        def __init__(self):
            self.value = H

    circle = [1]
    circle.append(circle)
    for value in (Settings(), [Settings()], circle, [torch], Colour.RED, np.zeros(3), [nn.Linear]):
        assert not holds_tensor(value)
    circle.append(H)
    assert holds_tensor(circle)


def test_an_object_that_is_too_large_to_search_counts_as_holding_a_tensor():
    """An error is better than a lost gradient; numbers alone are no objects to search."""
    assert holds_tensor([[] for _ in range(20_001)])
    assert not holds_tensor([[] for _ in range(19_000)])
    assert not holds_tensor(list(range(50_000)))


@pytest.mark.parametrize(
    "value",
    [
        *DIFFERENT,
        -1.5,
        2**70,
        "é\n",
        b"\x00\xff",
        1 - 2j,
        slice("a", None, -1),
        range(5, 1, -2),
        torch.sparse_coo,
        torch.preserve_format,
        torch.bfloat16,
        (),
        (1, (torch.int8, None)),
        [math.inf, [b"", ...]],
        {"a": (1,), 2: None, (1, 2): [3]},
        {(1, 2), "a"},
        Colour.AZURE,
        Flags.A,
        np.float16(1.5),
        np.complex64(1 - 2j),
        np.datetime64("2020-01-02"),
        np.str_("é"),
        OrderedDict,
        torch.device("cuda:1"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_constant_is_the_same_after_json(value):
    """Sender and receiver compute with the same constants, of the same types."""
    restored = decode(json.loads(json.dumps(encode(value))))
    assert type(restored) is type(value)
    assert same_constant(restored, value)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (object(), r"^an object cannot cross a stage boundary between processes.*records$"),
        (
            np.zeros(2),
            r"^a ndarray cannot cross.*records\. Convert it to a tensor: torch\.from_num",
        ),
        (function_with(1), r"^a function cannot.*records\. Send the arguments it is made from"),
        (
            functools.partial(int),
            r"^a partial cannot.*records\. Send the arguments it is made from",
        ),
        (Plain(), "^a Plain cannot cross.*records$"),
        (Flags.A | Flags.B, "^a Flags cannot cross"),
        ([1, {"a": object()}], "^an object cannot cross"),
        (np.array([object()], dtype=object), "^a ndarray cannot cross"),
        (np.array([(1, "a")], dtype=[("n", int), ("o", object)])[0], "^a void cannot cross"),
        (OrderedDict(a=1), "^an OrderedDict cannot cross"),
    ],
)
def test_other_objects_are_refused_with_advice(value, message):
    """Nothing is pickled, so that nothing that arrives is run."""
    with pytest.raises(RunError, match=message):
        encode(value)


@pytest.mark.parametrize(
    "text",
    [
        {"pickle": "x"},
        {},
        {"dtype": "float32", "size": [1]},
        [1],
        {"dtype": "Tensor"},
        {"dtype": "nothing"},
        {"layout": "float32"},
        {"memory_format": "strided"},
        {"class": "os:system"},
        {"enum": ["builtins:int", "real"]},
        {"enum": [f"{Colour.__module__}:Colour", "GREEN"]},
        {"enum": [f"{Colour.__module__}:Listed", "RED"]},
        {"enum": [f"{Colour.__module__}:Colour", "__class__"]},
        {"tuple": [1, {"pickle": 2}]},
    ],
    ids=str,
)
def test_what_encode_does_not_write_is_refused(text):
    """It comes from another process."""
    # Remembers the classes, whose module the test runner may not have loaded.
    encode([Colour.RED, Listed])
    with pytest.raises(RunError):
        decode(text)


def test_names_of_dtypes_are_those_of_torch():
    """Plans and checkpoints have them."""
    for dtype in (torch.float32, torch.bfloat16, torch.int8, torch.bool, torch.complex64):
        assert f"torch.{dtype_name(dtype)}" == str(dtype)
        assert dtype_of(dtype_name(dtype)) is dtype
    with pytest.raises(RunError, match=r"contains torch\.strided, which is no dtype"):
        dtype_of("strided")


def test_classes_that_were_sent_are_found_by_name_afterwards():
    """This rank may get them back; both are local to a function."""

    class Sent:
        """A class that is sent itself."""

    class Level(enum.Enum):
        """A class of which a member is sent."""

        LOW = 1

    for value, cls in ((Sent, Sent), (Level.LOW, Level)):
        with pytest.raises(RunError, match="this rank does not find that class"):
            find(name_of(cls))
        text = encode(value)
        assert find(name_of(cls)) is cls
        assert decode(text) is value
