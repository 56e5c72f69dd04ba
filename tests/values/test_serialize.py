"""Structures as JSON: what one rank writes, another reads, and everything else is refused."""

from __future__ import annotations

import dataclasses
import json
from collections import OrderedDict, defaultdict, deque
from types import MappingProxyType, SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from torch.utils import _pytree as pytree

from penstock.errors import RunError
from penstock.values.serialize import dump, parse
from penstock.values.structure import LEAF, flatten, unflatten

H = torch.arange(6.0).reshape(2, 3)


@dataclasses.dataclass
class Record:
    """A dataclass."""

    h: object
    depth: int = 0


class Pair(NamedTuple):
    """A named tuple."""

    left: object
    right: object


class Registered:
    """A class that torch's pytree knows, and that is not rebuilt by its attributes."""

    def __init__(self, h, name):
        self.h, self.name = h, name

    def __del__(self):
        """So that it is not rebuilt by its attributes."""


pytree.register_pytree_node(
    Registered,
    lambda node: ([node.h], [node.name]),
    lambda parts, context: Registered(*parts, *context),
)

SHARED = [H]


@pytest.mark.parametrize(
    "value",
    [
        H,
        (),
        [H, None, 3],
        (H, [H], {"a": H}),
        {1: H, 2.5: 3, "1": 4, (1, None): 5, torch.float32: 6},
        OrderedDict(b=H, a=1),
        defaultdict(list, a=H),
        defaultdict(None, a=H),
        deque([H], maxlen=3),
        deque([H]),
        MappingProxyType({"a": H}),
        SimpleNamespace(h=H, n=1),
        Record(H),
        Pair(H, Pair(1, H + 1)),
        Registered(H, "n"),
        [SHARED, {"again": SHARED}, [SHARED, [H]]],
        torch.max(H, 0),
        H.to_sparse(),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_structure_is_the_same_after_json(value):
    """The receiver rebuilds the value by it; kinds, classes, keys and repeated parts included."""
    leaves, structure = flatten(value)
    restored = parse(json.loads(json.dumps(dump(structure))))
    assert restored == structure
    assert restored.describe() == structure.describe()
    rebuilt = unflatten(restored, leaves)
    assert type(rebuilt) is type(value)
    assert flatten(rebuilt)[1] == structure


def test_keys_keep_their_types_and_order():
    """1 and True are equal as keys, and others to a model that looks at them."""
    keys = ["b", 1, "a", 2.0, None, (0, "x")]
    restored = parse(json.loads(json.dumps(dump(flatten(dict.fromkeys(keys, H))[1]))))
    rebuilt = unflatten(restored, [H])
    assert [(type(key), key) for key in rebuilt] == [(type(key), key) for key in keys]
    assert parse(dump(flatten({True: H})[1])) != flatten({1: H})[1]


def test_a_class_that_is_sent_is_the_one_of_its_name_again():
    """Another rank may send it back, although a later class has had the name since."""

    def new_class():
        return type("Local", (), {"__module__": "elsewhere"})

    first, second = new_class(), new_class()
    structures = [flatten(cls())[1] for cls in (first, second)]
    text = dump(structures[0])
    assert parse(text) == structures[0]
    assert parse(text).cls is first


def test_a_leaf_is_one_word():
    """Most messages are one tensor."""
    assert dump(LEAF) == "leaf"
    assert parse("leaf") is LEAF


def test_a_factory_of_the_user_is_not_sent_and_not_accepted():
    """It would be called on the other rank."""
    message = r"a defaultdict cannot cross a stage boundary between processes with the factory"
    with pytest.raises(RunError, match=message):
        dump(flatten([defaultdict(lambda: 0, a=H)])[1])
    text = dump(flatten(defaultdict(list, a=H))[1])
    text["context"][-1] = {"class": "builtins:range"}
    with pytest.raises(RunError, match=message):
        parse(text)


def test_a_class_of_another_kind_on_this_rank_is_refused():
    """Ranks with two versions of a script: the parts would become attributes, or items."""
    text = dump(flatten(Pair(H, H))[1])
    text["class"] = f"{Record.__module__}:Record"
    dump(flatten(Record(H))[1])  # remembers the class
    with pytest.raises(
        RunError, match="a Record crosses a stage boundary, and that class is of an"
    ):
        parse(text)
    text["class"] = "builtins:list"
    with pytest.raises(RunError, match="a list crosses a stage boundary"):
        parse(text)
    text["class"] = "nowhere:Pair"
    with pytest.raises(RunError, match="this rank does not find that class"):
        parse(text)


@pytest.mark.parametrize(
    "text",
    [
        None,
        "*",
        3,
        [],
        {},
        {"same": "0"},
        {"same": True},
        {"same": 0.0},
        {"again": None},
        {"other": 0},
        {"same": 0, "again": 0},
        {"kind": "pickle", "class": None, "context": [], "children": []},
        {"kind": "list", "class": None, "context": [], "children": ["leaf", 7]},
    ],
    ids=str,
)
def test_what_dump_does_not_write_is_refused(text):
    """It comes from another process."""
    with pytest.raises(RunError, match="which is no structure of a value"):
        parse(text)


def test_repeated_leaves_and_containers_are_numbers():
    """They are sent once."""
    structure = flatten([H, SHARED, SHARED])[1]
    children = dump(structure)["children"]
    assert children[0] == "leaf"
    assert children[1]["children"] == [{"same": 0}]
    assert children[2] == {"again": 0}
