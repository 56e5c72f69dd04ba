"""Nested values apart and together again."""

from __future__ import annotations

import dataclasses
import functools
import types
from collections import ChainMap, Counter, OrderedDict, UserDict, defaultdict, deque
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

from penstock.errors import RunError
from penstock.values.classes import find, name_of
from penstock.values.structure import (
    LEAF,
    Unflattenable,
    flatten,
    labelled_leaves,
    tensors_of,
    unflatten,
)

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
    "value",
    [
        nn.Linear(1, 1),
        lambda x, y=H: x + y,
        {H},
        (item for item in [H]),
        functools.partial(torch.add, H),
    ],
)
def test_objects_that_can_be_seen_to_hold_a_tensor_are_refused(value):
    """A closure, a module, a set: their tensors would keep the graph of another stage, or lose it."""
    with pytest.raises(RunError, match="because there may be tensors in it"):
        flatten([value])


@pytest.mark.parametrize(
    "value", [nn.ReLU(), len, {1, 2}, object(), lambda x: x, functools.partial(torch.add, 1)]
)
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


def test_repeated_containers_are_numbered_as_they_are_rebuilt():
    """Inner ones first; a wrong number would exchange two of them."""
    inner, outer = [1], [2]
    outer.append(inner)
    value = [{"a": outer}, inner, (outer, inner), {"a": outer}]
    first, second, (third, fourth), last = unflatten(*reversed(flatten(value)))
    assert first["a"] is third is last["a"]
    assert second is fourth is third[1]
    assert (second, third, last) == ([1], [2, [1]], {"a": [2, [1]]})
    assert first is not last


def test_parts_made_while_flattening_are_not_taken_for_each_other():
    """The indices of two sparse tensors are objects of one moment, which could have one id."""
    matrices = [torch.eye(2) * factor for factor in (1.0, 2.0, 3.0)]
    leaves, structure = flatten([matrix.to_sparse() for matrix in matrices])
    assert len(leaves) == 6
    for rebuilt, matrix in zip(unflatten(structure, leaves), matrices, strict=True):
        assert torch.equal(rebuilt.to_dense(), matrix)


@pytest.mark.parametrize("coalesced", [True, False])
def test_a_sparse_tensor_keeps_its_shape_and_duplicate_indices(coalesced):
    """Duplicates are summed at its use; a tensor with a gradient has none."""
    places = torch.tensor([[0, 0], [1, 1]])
    values = torch.tensor([1.0, 2.0])
    sparse = torch.sparse_coo_tensor(places, values, (4, 5), check_invariants=False)
    sparse = sparse.coalesce() if coalesced else sparse
    rebuilt = unflatten(*reversed(flatten(sparse)))
    assert (rebuilt.shape, rebuilt.is_coalesced()) == ((4, 5), coalesced)
    assert torch.equal(rebuilt.to_dense(), sparse.to_dense())
    values = torch.ones(2, requires_grad=True)
    trained = torch.sparse_coo_tensor(places, values, (4, 5), check_invariants=False)
    indices, sums = flatten(trained)[0]
    assert (indices.tolist(), sums.tolist()) == ([[0], [1]], [2.0])
    assert sums.requires_grad


class Tagged(torch.Tensor):
    """A subclass of Tensor."""


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: H.as_subclass(Tagged),
            "a Tagged cannot cross a stage boundary, because it is a su",
        ),
        (lambda: torch.nested.nested_tensor([H, H]), "a nested tensor cannot cross.*and its mask"),
        (lambda: torch.quantize_per_tensor(H, 1.0, 0, torch.qint8), r"a quantized .* int_repr\(\)"),
        (H.to_mkldnn, r"layout torch\._mkldnn cannot cross .*: pass its to_dense\(\)"),
        (H.to_sparse_csr, r"layout torch\.sparse_csr cannot cross .*: pass its to_sparse_coo\(\)"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_tensors_that_are_more_than_strided_memory_are_refused(make, message):
    """What only their class knows would be lost; the message says what to pass."""
    for value, path in ((make(), ""), ([1, {"a": make()}], r" \(at \[1\]\['a'\]\)")):
        with pytest.raises(Unflattenable, match=f"{message}.*{path}$") as caught:
            flatten(value)
        assert caught.value.path == ("[1]['a']" if path else "")
    assert tensors_of([nn.Parameter(H)])[0].requires_grad


class OtherRows(Rows):
    """Another class with the same content."""


def test_structures_differ_where_values_nest_differently():
    """Messages of one structure are matched; the text is the same in all processes."""
    values = [
        H,
        [H],
        (H,),
        [H, H],
        [H, 1],
        [[H]],
        {"a": H},
        {"b": H},
        OrderedDict(a=H),
        Pair(H),
        Rows([H]),
    ]
    structures = [flatten(value)[1] for value in values]
    assert len(set(structures)) == len(values)
    assert len({structure.describe() for structure in structures}) == len(values)
    assert structures[0] == LEAF
    assert flatten({"a": [H, (2, None)]})[1] == flatten({"a": [H + 1, ("x", 3)]})[1]
    assert flatten([{1: H}])[1].describe() == flatten([{1: H * 2}])[1].describe()
    assert flatten([{1: H}])[1].describe() != flatten([{True: H}])[1].describe()
    assert flatten(Rows([H]))[1].describe() != flatten(OtherRows([H]))[1].describe()


def test_a_structure_knows_the_kinds_in_it():
    """Sparse tensors cannot be cut, at any depth."""
    structure = flatten([{"a": (H.to_sparse(),)}, 1])[1]
    assert [structure.has(kind) for kind in ("sparse", "tuple", "dict", "list", "deque")] == [
        True,
        True,
        True,
        True,
        False,
    ]


def test_items_are_told_from_attributes():
    """Constants among the items are inputs of a layer; those in attributes belong to an object."""
    value = [H, {"a": 1}, Frozen(2, 3), types.SimpleNamespace(n=[4]), Pair(5, 6), Node(H + 1, "n")]
    leaves, structure = flatten(value)
    items = [leaf for leaf, is_item in zip(leaves, structure.items(), strict=True) if is_item]
    assert items[0] is H
    assert items[1:] == [1, 5, 6]
    assert flatten(H)[1].items() == [True]


def test_classes_of_values_are_found_by_name_afterwards():
    """A rank that has made such a value can receive one; the class may be local to a function."""

    @dataclasses.dataclass
    class Local:
        h: object

    with pytest.raises(RunError, match="this rank does not find that class"):
        find(name_of(Local))
    flatten([{"a": Local(H)}])
    assert find(name_of(Local)) is Local


class Fresh:
    """An object that makes the list of its parts anew."""

    def __init__(self, number):
        self.number = number

    def __del__(self):
        """So that it is not rebuilt by its attributes."""


pytree.register_pytree_node(
    Fresh, lambda one: ([[one.number, one.number]], None), lambda parts, _: Fresh(parts[0][0])
)


def test_lists_that_exist_only_while_a_value_is_taken_apart_are_not_confused():
    """The next one could get the memory, and so the identity, of one that is gone."""
    rebuilt = unflatten(*reversed(flatten([Fresh(number) for number in range(20)])))
    assert [one.number for one in rebuilt] == list(range(20))
