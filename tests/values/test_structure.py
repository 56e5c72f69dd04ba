"""Nested values apart and together again."""

from __future__ import annotations

import dataclasses
import types
from collections import ChainMap, Counter, OrderedDict, UserDict, defaultdict, deque
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

from penstock.errors import RunError
from penstock.values.structure import flatten, labelled_leaves, map_tensors, tensors_of, unflatten

H = torch.arange(6.0).reshape(2, 3)


@dataclasses.dataclass(frozen=True)
class Frozen:
    """A frozen dataclass, whose constructor must not run again."""

    h: object
    depth: int = 0

    def __post_init__(self):
        if self.depth > 100:
            raise ValueError("made on the way")


@dataclasses.dataclass(slots=True)
class Slotted:
    """A dataclass with slots, one of which may be unset."""

    h: object
    note: str = dataclasses.field(init=False)


@dataclasses.dataclass
class Cached:
    """A dataclass with an attribute that is no field."""

    h: object

    def __post_init__(self):
        self.twice = self.h * 2


class Pair(NamedTuple):
    """A named tuple."""

    left: object
    right: object = None


class Plain:
    """An object with attributes and a slot further down."""

    __slots__ = ("__dict__", "slot")

    def __init__(self, h):
        self.h = h
        self.slot = h + 1


class Guarded(dict):
    """A dict that refuses to be filled from outside, as model outputs of transformers do."""

    def __setitem__(self, key, value):
        raise TypeError("not like this")


class Rows(list):
    """A list with a name."""


class Node:
    """Registered with torch as a container."""

    __slots__ = ("__weakref__", "h", "name")

    def __init__(self, h, name):
        self.h, self.name = h, name

    def __del__(self):
        """So that it is not rebuilt by its attributes."""


pytree.register_pytree_node(
    Node, lambda node: ([node.h], [node.name]), lambda parts, context: Node(*parts, *context)
)


def named_rows():
    """A list subclass with an attribute."""
    rows = Rows([H])
    rows.name = "x"
    return rows


def guarded():
    """A dict subclass with an item and an attribute, the same tensor."""
    instance = Guarded({"h": H})
    instance.h = H
    return instance


VALUES = [
    H,
    None,
    3,
    (),
    [],
    {},
    Frozen(H, 101 - 1),
    Slotted(H),
    Cached(H),
    Pair(H, Pair(H)),
    Plain(H),
    guarded(),
    named_rows(),
    OrderedDict(b=H, a=1),
    defaultdict(list, a=[H]),
    deque([H], maxlen=2),
    UserDict(a=H),
    ChainMap({"a": H}, {"b": 1}),
    Counter("aab"),
    types.MappingProxyType({"a": H}),
    types.SimpleNamespace(h=H, n=1),
    torch.max(H, 0),
    Node(H, "n"),
    {1: H, 2.5: 2, "1": 3},
    torch.nn.utils.rnn.pack_padded_sequence(H[..., None], [3, 2], batch_first=True),
    torch.distributions.Normal(H, H + 1),
    [Frozen({"deep": Pair((H, UserDict(a=Slotted(H))))})],
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_a_value_is_restored_with_class_attributes_and_tensors(value):
    """Plain PyTorch passes on the object itself, so the restored one must not differ."""
    leaves, structure = flatten(value)
    rebuilt = unflatten(structure, leaves)
    assert type(rebuilt) is type(value)
    assert flatten(rebuilt)[1] == structure
    assert all(one is other for one, other in zip(flatten(rebuilt)[0], leaves, strict=True))
    assert len(structure.labels()) == len(leaves)


def test_attributes_slots_and_unset_slots_are_as_they_were():
    """A slot without a value must not get one."""
    leaves, structure = flatten([Plain(H), Slotted(H), Cached(H), guarded(), Node(H, "n")])
    plain, slotted, cached, record, node = unflatten(structure, leaves)
    assert torch.equal(plain.slot, H + 1)
    assert not hasattr(slotted, "note")
    assert torch.equal(cached.twice, H * 2)
    assert record["h"] is record.h
    assert (node.h, node.name) == (H, "n")


def test_containers_that_stand_in_several_places_are_one_afterwards():
    """A layer that appends to one of them sees it in the other."""
    inner = [H]
    first, second = unflatten(*reversed(flatten((inner, {"a": inner}))))
    assert first is second["a"]
    assert first is not inner


def test_one_tensor_in_several_places_is_one_leaf():
    """It is sent once, and its gradient is the sum."""
    value = {"a": H, "b": [H, (H,)]}
    assert len(tensors_of(value)) == 1
    doubled = map_tensors(lambda tensor: tensor * 2, value)
    assert doubled["a"] is doubled["b"][0] is doubled["b"][1][0]


def test_a_sparse_tensor_is_its_indices_and_values():
    """What comes back is equal, and its gradient reaches what the values were made of."""
    dense = torch.tensor([[0.0, 2.0], [3.0, 0.0]], requires_grad=True)
    leaves, structure = flatten({"s": dense.to_sparse()})
    values = [leaf.detach().requires_grad_(leaf.requires_grad) for leaf in leaves]
    again = unflatten(structure, values)["s"]
    assert torch.equal(again.to_dense(), dense)
    (again.to_dense() * 5).sum().backward()
    leaves[1].backward(values[1].grad)
    assert dense.grad.tolist() == [[0.0, 5.0], [5.0, 0.0]]


def test_places_are_named_as_in_python():
    """Messages and comparisons name what is where."""
    value = (Frozen(H), {"a": [H + 1]}, Plain(H + 2))
    assert [place for place, _ in labelled_leaves(value)] == [
        "[0].h",
        "[0].depth",
        "[1]['a'][0]",
        "[2].h",
        "[2].slot",
    ]


def test_a_value_that_contains_itself_is_refused():
    """It would never end."""
    value = [H]
    value.append({"self": value})
    with pytest.raises(RunError, match=r"it contains itself.*\(at \[1\]\['self'\]\)"):
        flatten(value)


@pytest.mark.parametrize(
    "value", [nn.Linear(1, 1), lambda x, y=H: x + y, {H}, (item for item in [H])]
)
def test_objects_that_can_be_seen_to_hold_a_tensor_are_refused(value):
    """A closure, a module, a set: their tensors would keep the graph of another stage, or lose it."""
    with pytest.raises(RunError, match="because there may be tensors in it"):
        flatten([value])


@pytest.mark.parametrize("value", [nn.ReLU(), len, {1, 2}, object(), lambda x: x])
def test_objects_without_tensors_pass_as_they_are(value):
    """As they do in plain PyTorch."""
    leaves, structure = flatten([value])
    assert unflatten(structure, leaves)[0] is value


def test_model_outputs_and_encodings_of_transformers_are_restored():
    """An ordered dict whose fields are attributes as well, and a mapping with a dict inside."""
    outputs = pytest.importorskip("transformers.modeling_outputs")
    from transformers import BatchEncoding

    output = outputs.BaseModelOutput(last_hidden_state=H, hidden_states=(H, H + 1))
    rebuilt = unflatten(*reversed(flatten(output)))
    assert type(rebuilt) is type(output)
    assert rebuilt["hidden_states"] is rebuilt.hidden_states
    assert rebuilt.last_hidden_state is H is rebuilt[0]
    assert rebuilt.attentions is None
    encoding = unflatten(*reversed(flatten(BatchEncoding({"input_ids": H, "labels": H}))))
    assert isinstance(encoding, BatchEncoding)
    assert encoding["input_ids"] is encoding.labels is H
