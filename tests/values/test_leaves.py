"""Leaves of values: which tensors and constants they are, in which order, and what maps them."""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

import pytest
import torch

from penstock.values.structure import (
    Unflattenable,
    flatten,
    labelled_leaves,
    leaves_of,
    map_tensors,
    tensors_of,
    unflatten,
)

H = torch.arange(6.0).reshape(2, 3)


class Pair(NamedTuple):
    """A named tuple."""

    left: object
    right: object


class Tagged(torch.Tensor):
    """A subclass of Tensor."""


def test_one_tensor_in_several_places_is_one_leaf():
    """It is sent once, and its gradient is the sum."""
    value = {"a": H, "b": [H, (H,)]}
    assert len(tensors_of(value)) == 1
    doubled = map_tensors(lambda tensor: tensor * 2, value)
    assert doubled["a"] is doubled["b"][0] is doubled["b"][1][0]


def test_equal_tensors_and_constants_are_leaves_of_their_own():
    """Only one tensor in several places is one leaf; the second is not sent."""
    other = H.clone()
    leaves, structure = flatten([H, other, H, 1, 1, other])
    assert len(leaves) == 4
    rebuilt = unflatten(structure, leaves)
    assert rebuilt[0] is rebuilt[2] is H
    assert rebuilt[1] is rebuilt[5] is other


def test_tensors_and_constants_are_in_the_order_of_the_value():
    """Callers match them with flags and forms by position."""
    value = {"b": 1, "a": [H, "x", H + 1], "c": H}
    assert [str(leaf) for leaf in leaves_of(value)] == ["1", str(H), "x", str(H + 1)]
    assert [place for place, _ in labelled_leaves(value)] == [
        "['b']",
        "['a'][0]",
        "['a'][1]",
        "['a'][2]",
    ]
    assert leaves_of(H) == [H]
    assert leaves_of(3) == [3]
    assert tensors_of(3) == []
    assert map_tensors(lambda tensor: tensor.shape, H) == (2, 3)
    assert map_tensors(lambda tensor: tensor.shape, (H, 7)) == ((2, 3), 7)


def test_tensors_are_numbered_among_all_leaves():
    """Constants are leaves too, in front of a tensor that occurs again."""
    value = ["a", 1, H, {"again": H}, 2]
    leaves, structure = flatten(value)
    assert [type(leaf) for leaf in leaves] == [str, int, torch.Tensor, int]
    rebuilt = unflatten(structure, leaves)
    assert rebuilt[2] is rebuilt[3]["again"] is H
    assert (rebuilt[:2], rebuilt[4]) == (["a", 1], 2)


def test_functions_are_applied_to_dense_tensors_alone():
    """Indices and values of a sparse one; a subclass of Tensor is refused."""
    seen = []

    def doubled(tensor):
        seen.append(tensor)
        return tensor * 2

    sparse = torch.tensor([0.0, 3.0, 0.0, 0.0]).to_sparse()
    rebuilt = map_tensors(doubled, sparse)
    assert [tensor.layout for tensor in seen] == [torch.strided] * 2
    assert rebuilt.to_dense().tolist() == [0.0, 0.0, 6.0, 0.0]
    with pytest.raises(Unflattenable, match="a Tagged cannot cross"):
        map_tensors(doubled, H.as_subclass(Tagged))


def test_only_kinds_of_many_classes_name_the_class():
    """Structures are compared, and sent: a list is a list."""
    for value in ([1], (1,), {"a": 1}, OrderedDict(a=1)):
        assert flatten(value)[1].cls is None
    assert flatten(Pair(1, 2))[1].cls is Pair
