"""Kinds of containers: which classes are taken apart, and that nothing of an object gets lost."""

from __future__ import annotations

import argparse
import ast
import collections
import dataclasses
import decimal
import enum
import functools
import io
import pathlib
import threading
import time
import types
from collections import Counter, OrderedDict, UserList, defaultdict, deque
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

from penstock.errors import RunError
from penstock.values.constants import Whole
from penstock.values.kinds import (
    DEFAULT,
    DEQUE,
    DICT,
    KINDS,
    LIST,
    MAPPING,
    NAMESPACE,
    OBJECT,
    ORDERED,
    REGISTERED,
    RESULT,
    SEQUENCE,
    SPARSE,
    TUPLE,
    VIEW,
    check_context,
    context_of,
    context_values,
    kind_of,
)


@dataclasses.dataclass
class Record:
    """A dataclass."""

    h: object


@dataclasses.dataclass
class Known:
    """A dataclass that torch's pytree knows, too."""

    h: object


class Pair(NamedTuple):
    """A named tuple."""

    left: object


class Parent:
    """An object with slots."""

    __slots__ = ("__private", "first")


class Child(Parent):
    """With further slots, one of the same name."""

    __slots__ = ("first", "second")


class Both(Child):
    """With attributes beside the slots."""


class Closing:
    """With code that runs at its end."""

    def __del__(self):
        """Nothing."""


class Node(Closing):
    """Such a class that torch's pytree knows."""

    def __init__(self, parts):
        self.parts = parts


class Row(list):
    """A list that counts its elements in another way, and shows nothing of them."""

    __slots__ = ("name",)

    def __iter__(self):
        return iter(())

    def __len__(self):
        return 0


class Table(dict):
    """A dict that shows other keys and values than it has."""

    def __iter__(self):
        return iter(["other"])

    def __getitem__(self, key):
        return "other"


class Groups(defaultdict):
    """A defaultdict with a name."""


class Ordered(OrderedDict):
    """An ordered dict with a name."""


class Steps(tuple):
    """A tuple whose constructor takes other arguments."""

    __slots__ = ()

    def __new__(cls, count):
        """Make a tuple of numbers."""
        return super().__new__(cls, range(count))


class ProductObject(Whole):
    """An object of the product."""


class Simple:
    """A class with one attribute that torch's pytree knows."""

    def __init__(self, h):
        self.h = h


pytree.register_pytree_node(Simple, lambda one: ([one.h], None), lambda parts, _: Simple(*parts))
pytree.register_pytree_node(Known, lambda known: ([known.h], None), lambda parts, _: Known(*parts))
pytree.register_pytree_node(Node, lambda node: (node.parts, "c"), lambda parts, _: Node(parts))


@pytest.mark.parametrize(
    ("cls", "kind"),
    [
        (list, LIST),
        (tuple, TUPLE),
        (dict, DICT),
        (OrderedDict, ORDERED),
        (defaultdict, DEFAULT),
        (deque, DEQUE),
        (types.MappingProxyType, VIEW),
        (types.SimpleNamespace, NAMESPACE),
        (Row, SEQUENCE),
        (Pair, SEQUENCE),
        (Steps, SEQUENCE),
        (Table, MAPPING),
        (Counter, MAPPING),
        (Groups, MAPPING),
        (Ordered, MAPPING),
        (torch.return_types.max, RESULT),
        (Record, OBJECT),
        (Known, OBJECT),
        (Child, OBJECT),
        (UserList, OBJECT),
        (argparse.Namespace, OBJECT),
        (Node, REGISTERED),
        (Simple, REGISTERED),
        (Closing, None),
        (ProductObject, None),
        (enum.Enum, None),
        (nn.Linear, None),
        (torch.Size, None),
        (nn.Parameter, None),
        (ValueError, None),
        (type, None),
        (object, None),
        (int, None),
        (set, None),
        (time.struct_time, RESULT),
        (decimal.Decimal, None),
        (io.StringIO, None),
        (threading.Thread, OBJECT),
        (pathlib.PurePosixPath, OBJECT),
        (collections.UserDict, OBJECT),
        (type("Text", (str,), {}), None),
        (type("Bytes", (bytearray,), {}), None),
        (type("Ring", (deque,), {}), None),
        (type("Buffer", (io.BytesIO,), {}), None),
        (type("Price", (decimal.Decimal,), {}), None),
        (functools.partial, None),
        (type("Call", (functools.partial,), {}), None),
        (ast.Module, None),
        (type("Heir", (Closing,), {}), None),
        (type("ClosingRow", (list,), {"__del__": Closing.__del__}), None),
        (type("ClosingTable", (OrderedDict,), {"__del__": Closing.__del__}), None),
        (type("Referenced", (), {"__slots__": ("h", "__weakref__")}), OBJECT),
    ],
    ids=lambda value: getattr(value, "__name__", str(getattr(value, "name", value))),
)
def test_classes_are_taken_apart_only_if_their_parts_are_all_they_have(cls, kind):
    """Hidden state of a class written in C would be lost, and code of `__del__` run twice."""
    assert kind_of(cls) is kind


def rebuild(value):
    """The value taken apart and rebuilt."""
    kind = kind_of(type(value))
    context, parts = kind.split(value)
    hash(context)
    plain = context_of(kind.name, context_values(kind.name, context))
    assert plain == context
    return kind.build(type(value), plain, list(parts))


def test_subclasses_of_lists_and_dicts_keep_what_python_itself_has_stored():
    """Their own methods may show something else, and are not called."""
    row = Row([1, 2])
    row.name = "a"
    rebuilt = rebuild(row)
    assert list(list.__iter__(rebuilt)) == [1, 2]
    assert rebuilt.name == "a"
    table = Table(a=1, b=2)
    table.note = 3
    rebuilt = rebuild(table)
    assert list(dict.items(rebuilt)) == [("a", 1), ("b", 2)]
    assert rebuilt.note == 3
    assert rebuild(Steps(3)) == (0, 1, 2)
    assert type(rebuild(Steps(3))) is Steps


def test_mappings_keep_order_factory_and_attributes():
    """A missing key gives what it gave before."""
    groups = Groups(list, b=[1], a=[2])
    groups.name = "x"
    rebuilt = rebuild(groups)
    assert (list(rebuilt.items()), rebuilt.name) == ([("b", [1]), ("a", [2])], "x")
    assert rebuilt["new"] == []
    ordered = Ordered(b=1, a=2)
    ordered.move_to_end("b")
    ordered.name = "y"
    rebuilt = rebuild(ordered)
    assert (list(rebuilt), rebuilt.name) == (["a", "b"], "y")
    rebuilt.move_to_end("a")
    assert list(rebuilt) == ["b", "a"]
    plain = rebuild(defaultdict(int, a=1))
    assert (plain["b"], plain["a"]) == (0, 1)
    assert rebuild(deque([1, 2, 3], maxlen=3)).maxlen == 3


def test_slots_of_all_ancestors_are_kept_also_those_of_one_name():
    """A slot that has no value gets none."""
    child = Child()
    Parent.first.__set__(child, 1)
    child.first = 2
    child._Parent__private = 3
    rebuilt = rebuild(child)
    assert Parent.first.__get__(rebuilt) == 1
    assert (rebuilt.first, rebuilt._Parent__private) == (2, 3)
    assert not hasattr(rebuilt, "second")
    child.second = None
    assert rebuild(child).second is None


def test_attributes_and_slots_of_one_object_are_not_mixed_up():
    """Attributes come first among the parts."""
    both = Both()
    both.first, both.second, both.third, both.fourth = 1, 2, 3, 4
    context, parts = OBJECT.split(both)
    assert parts == [3, 4, 1, 2]
    labels = [OBJECT.label(context, index) for index in range(4)]
    assert labels == [".third", ".fourth", ".first", ".second"]
    rebuilt = rebuild(both)
    assert vars(rebuilt) == {"third": 3, "fourth": 4}
    assert (rebuilt.first, rebuilt.second) == (1, 2)


@pytest.mark.parametrize(
    ("value", "labels"),
    [
        ([1, 2], ["[0]", "[1]"]),
        ({"a": 1, 2: 3}, ["['a']", "[2]"]),
        (OrderedDict(a=1), ["['a']"]),
        (defaultdict(int, a=1), ["['a']"]),
        (types.MappingProxyType({"a": 1}), ["['a']"]),
        (types.SimpleNamespace(a=1, b=2), [".a", ".b"]),
        (Record(1), [".h"]),
        (Pair(1), ["[0]"]),
        (Node([1, 2]), ["[0]", "[1]"]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_parts_are_named_as_in_python(value, labels):
    """Messages say where a value cannot be sent."""
    kind = kind_of(type(value))
    context, parts = kind.split(value)
    assert [kind.label(context, index) for index in range(len(parts))] == labels


def test_attributes_beside_items_have_names_of_their_own():
    """Items come first."""
    row = Row([1, 2])
    row.name = "a"
    table = Table(a=1)
    table.note = 3
    child = Child()
    child.first = 1
    for value, labels in (
        (row, ["[0]", "[1]", ".name"]),
        (table, ["['a']", ".note"]),
        (child, [".first"]),
    ):
        kind = kind_of(type(value))
        context, parts = kind.split(value)
        assert [kind.label(context, index) for index in range(len(parts))] == labels


def test_contexts_differ_where_keys_differ_in_type():
    """1, 1.0 and True are one key to a dict."""
    for make in (dict, OrderedDict, Table):
        contexts = [kind_of(make).split(make({key: 0}))[0] for key in (1, True, 1.0, "1")]
        assert len(set(contexts)) == 4
    assert DICT.split({"a": 1, "b": 2})[0] != DICT.split({"b": 1, "a": 2})[0]
    assert DEQUE.split(deque([1], 2))[0] != DEQUE.split(deque([1], 3))[0]
    assert DEFAULT.split(defaultdict(int))[0] != DEFAULT.split(defaultdict(list))[0]


def test_a_sparse_tensor_has_its_duplicate_indices_unless_it_has_a_gradient():
    """Values of duplicates have no gradients of their own; without one they are summed at its use."""
    indices, values = torch.tensor([[1, 0, 1]]), torch.tensor([1.0, 2.0, 4.0])
    plain = torch.sparse_coo_tensor(indices, values, (3,), check_invariants=False)
    context, parts = SPARSE.split(plain)
    assert (context, [part.tolist() for part in parts]) == (((3,), False), [[[1, 0, 1]], [1, 2, 4]])
    rebuilt = SPARSE.build(torch.Tensor, context, parts)
    assert not rebuilt.is_coalesced()
    assert rebuilt.to_dense().tolist() == [2.0, 5.0, 0.0]
    trained = torch.sparse_coo_tensor(
        indices, values.requires_grad_(), (3,), check_invariants=False
    )
    context, (places, sums) = SPARSE.split(trained)
    assert (context, places.tolist()) == (((3,), True), [[0, 1]])
    SPARSE.build(torch.Tensor, context, [places, sums]).to_dense().pow(2).sum().backward()
    assert values.grad.tolist() == [2 * 5.0, 2 * 2.0, 2 * 5.0]


def test_a_context_of_torchs_pytree_is_compared_by_its_value():
    """It may be unhashable, such as a list; a structure must be hashable."""
    (first,), (same,), (other,) = (context_of("registered", [value]) for value in ([1], [1], [2]))
    assert first == same != other
    assert hash(first) == hash(same)
    assert first != [1]
    assert repr(first) == "[1]"
    assert context_values("list", (1, 2)) == context_of("list", [1, 2]) == (1, 2)


def test_a_class_that_is_not_registered_here_is_refused():
    """A message names it, and another rank has registered it."""
    with pytest.raises(RunError, match="a Record crosses a stage boundary, and this rank has not"):
        REGISTERED.build(Record, context_of("registered", [None]), [1])


@pytest.mark.parametrize("factory", [None, list, dict, set, tuple, int, float, str, OrderedDict])
def test_factories_without_code_of_the_user_are_accepted(factory):
    """They are Python's own."""
    check_context(DEFAULT, None, ((), (), factory))
    check_context(MAPPING, Groups, ((), (), (), (), factory))


@pytest.mark.parametrize("factory", [print, lambda: 0, object, type, Record])
def test_other_factories_are_refused(factory):
    """A missing key would call them on the other rank."""
    for kind, cls, context in (
        (DEFAULT, None, ((), (), factory)),
        (MAPPING, Groups, ((), (), (), (), factory)),
    ):
        with pytest.raises(RunError, match="which would be called there: convert it to a dict"):
            check_context(kind, cls, context)


def test_kinds_are_found_by_their_names():
    """Messages have the names."""
    assert {name: kind.name for name, kind in KINDS.items()} == {name: name for name in KINDS}
    named = {name for name, kind in KINDS.items() if kind.named}
    assert named == {"sequence", "result", "mapping", "object", "registered"}


def test_a_class_of_another_kind_is_refused():
    """The message was written by a rank on which the class is derived from something else."""
    check_context(OBJECT, Record, (("h",), ()))
    for kind, cls in ((MAPPING, Record), (OBJECT, Row), (SEQUENCE, Table), (OBJECT, Closing)):
        context = (*kind.split(Groups(list))[0][:4], None) if kind is MAPPING else ((), ())
        with pytest.raises(RunError, match=f"a {cls.__name__} crosses .* is of another kind on"):
            check_context(kind, cls, context)


def refuse(*_, **__):
    """Stand for a method whose code must not run."""
    raise AssertionError("a method of the class was called")


def test_values_are_rebuilt_without_their_classes_code():
    """It may count objects, check arguments or refuse assignments."""
    methods = ("__init__", "__setattr__", "__setitem__", "append", "extend", "update")
    items = {list: [1, 2], tuple: (1, 2), dict: {"a": 1}, OrderedDict: {"a": 1}, object: None}
    for base, content in items.items():
        cls = type("Guarded", (base,), {})
        value = cls() if content is None else cls(content)
        value.note = "x"
        for method in methods:
            setattr(cls, method, refuse)
        rebuilt = rebuild(value)
        assert type(rebuilt) is cls
        assert vars(rebuilt) == {"note": "x"}
        assert content is None or rebuilt == content
