"""Digests of values: equal if and only if the contents are, as far as they are compared."""

from __future__ import annotations

import random
from collections import OrderedDict, deque

import numpy as np
import pytest
import torch
from torch import nn

from penstock.modules import module_state
from penstock.modules.module_state import content


class Record:
    """A plain object with fields."""

    def __init__(self, **fields):
        vars(self).update(fields)


#: A value and others that differ from it.
DIFFERENT = [
    (1, [2, 1.0, True, None, "1"]),
    (float("nan"), [0.0]),
    (0.0, [-0.0]),
    (b"a", ["a"]),
    (np.arange(4), [np.arange(4.0), np.arange(4).reshape(2, 2), np.array([0, 1, 2, 4])]),
    (
        torch.arange(4),
        [torch.arange(4.0), torch.arange(4).reshape(2, 2), torch.tensor([0, 1, 2, 4])],
    ),
    (torch.ones(2, dtype=torch.bfloat16), [torch.ones(2, dtype=torch.float16)]),
    (np.zeros(2, np.float32), [np.zeros(2, np.int32), np.zeros((2, 1), np.float32)]),
    (torch.zeros(2), [torch.zeros(2, dtype=torch.int32), torch.zeros(2, 1)]),
    ([1, 2], [[2, 1], [1], [1, 2, 2], {1, 2}]),
    ([[1], [2]], [[[1], [3]]]),
    ({"a": 1}, [{"a": 2}, {"b": 1}, {"a": 1, "b": 1}]),
    ({1, 2}, [{1, 3}, {1}]),
    (random.Random(1), [random.Random(2)]),
    (np.random.default_rng(1), [np.random.default_rng(2)]),
    (torch.Generator().manual_seed(1), [torch.Generator().manual_seed(2)]),
    (Record(a=1, b=[2]), [Record(a=1, b=[3]), Record(a=1)]),
]


@pytest.mark.parametrize(
    ("value", "others"), DIFFERENT, ids=[str(i) for i in range(len(DIFFERENT))]
)
def test_a_digest_is_equal_if_and_only_if_the_value_is(value, others):
    """Types count as well: 1 and True are equal in Python, and not the same state."""
    assert content(value) == content(value)
    for other in others:
        assert content(value) != content(other)


@pytest.mark.parametrize(
    "make",
    [
        lambda: [float("nan"), "a"],
        lambda: np.array([[1.5]]),
        lambda: torch.tensor([1.0, float("nan")]),
        lambda: torch.complex(torch.ones(1), torch.ones(1)).conj(),
        lambda: torch.arange(6).reshape(2, 3).t(),
        lambda: deque([OrderedDict(a=torch.ones(1))]),
        lambda: random.Random(3),
        lambda: np.random.default_rng(3),
        lambda: torch.Generator().manual_seed(3),
        lambda: Record(a=Record(b=1)),
        lambda: {f"name {number}" for number in range(20)},
    ],
)
def test_equal_values_in_two_objects_have_one_digest(make):
    """State is compared by contents, wherever these are."""
    assert content(make()) == content(make())


def test_sets_that_iterate_in_different_orders_have_one_digest():
    """Two equal sets of colliding entries keep the order in which they were filled."""
    first, second = set(), set()
    for number in (0, 8, 16):
        first.add(number)
        second.add(16 - number)
    assert list(first) != list(second)
    assert content(first) == content(second)


def test_unknown_objects_are_compared_by_identity():
    """Functions, classes and modules, and objects of libraries, are not looked into."""
    for make in (lambda: lambda: 1, lambda: nn.Linear(1, 1), object, lambda: torch.device("cpu")):
        value, other = make(), make()
        assert content(value) == content(value)
        assert (content(value) == content(other)) is (value is other)


def test_contents_below_a_depth_are_compared_by_identity():
    """Deeply nested values would take too long, and could refer to themselves."""
    inner = []
    nested = [[[[inner]]]]
    before = content(nested)
    inner.append(1)
    assert content(nested) == before
    nested[0][0][0].append(2)
    assert content(nested) != before
    ring = []
    ring.append(ring)
    assert content(ring) == content(ring)


def test_of_long_containers_the_ends_are_compared():
    """A change in the middle of thousands of items is not worth the time; their number is."""
    items = list(range(1002))
    for place, seen in (
        (0, True),
        (499, True),
        (500, False),
        (501, False),
        (502, True),
        (1001, True),
    ):
        assert (content(items) != content([*items[:place], -1, *items[place + 1 :]])) is seen, place
    assert content(items) != content([*items, items[-1]])
    table = dict.fromkeys(range(1002))
    middle = {key: None for key in table if key != 500}
    assert content(table) != content(middle)
    short = items[:1000]
    assert content(short) != content([*short[:500], -1, *short[501:]])


def test_large_tensors_are_compared_by_memory_and_version(monkeypatch):
    """Reading gigabytes at every forward would take longer than the forward."""
    monkeypatch.setattr(module_state, "_LARGE_BYTES", 8)
    small, large = torch.zeros(2), torch.zeros(3)
    assert content(small) == content(small.clone())
    before = content(large)
    assert before == content(large)
    assert before != content(large.clone())
    large.add_(0)
    assert before != content(large)


@pytest.mark.parametrize(
    "make", [lambda: torch.eye(2).to_sparse(), lambda: torch.ones(2, device="meta")]
)
def test_tensors_without_readable_bytes_are_compared_by_identity_and_version(make):
    """Sparse and meta tensors."""
    tensor = make()
    before = content(tensor)
    assert before == content(tensor)
    assert before != content(make())
    tensor.mul_(1)
    assert before != content(tensor)
