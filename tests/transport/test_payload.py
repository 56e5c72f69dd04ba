"""Payload and Header: nested values apart and together again, by hand-over and by JSON."""

from __future__ import annotations

import json
import math
from collections import OrderedDict, UserDict, defaultdict, deque
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from penstock.transport.payload import Header, Payload, TensorForm

DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.complex64,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
]


@st.composite
def tensors(draw):
    """A small tensor of any dtype, empty and without dimensions too; some want gradients."""
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    dtype = draw(st.sampled_from(DTYPES))
    tensor = torch.arange(math.prod(shape)).reshape(shape).to(dtype)
    return tensor.requires_grad_(
        draw(st.booleans()) and (tensor.is_floating_point() or tensor.is_complex())
    )


CONSTANTS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=5)
)
KEYS = st.one_of(st.text(max_size=4), st.integers(-5, 5))
VALUES = st.recursive(
    st.one_of(tensors(), CONSTANTS),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(KEYS, inner, max_size=3),
        st.dictionaries(KEYS, inner, max_size=3).map(OrderedDict),
    ),
    max_leaves=8,
)


def alike(first, second, identical):
    """Whether two values nest alike, with keys in the same order, and hold the same; `identical`
    asks for the tensors themselves.
    """
    if isinstance(first, Tensor):
        same = (
            first is second
            if identical
            else torch.equal(first, second) and first.dtype == second.dtype
        )
        return isinstance(second, Tensor) and same
    if type(first) is not type(second):
        return False
    if isinstance(first, dict):
        return list(first) == list(second) and all(
            alike(first[key], second[key], identical) for key in first
        )
    if isinstance(first, (list, tuple)):
        return len(first) == len(second) and all(
            alike(a, b, identical) for a, b in zip(first, second, strict=True)
        )
    return first == second


@given(VALUES)
@settings(deadline=None, max_examples=150)
def test_a_value_that_was_flattened_nests_as_before(value):
    """Handed over inside one process, tensors are the sender's own."""
    assert alike(Payload.of(value).value(), value, identical=True)


@given(VALUES)
@settings(deadline=None, max_examples=150)
def test_a_header_and_the_tensors_make_the_whole_value(value):
    """Between processes only these travel: structure, keys, constants and who wants a gradient are
    in the JSON.
    """
    payload = Payload.of(value)
    text = payload.header()
    header = Header.parse(text)
    json.loads(text)
    assert header.forms == [
        TensorForm(
            tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), tensor.requires_grad
        )
        for tensor in payload.tensors
    ]
    for form, tensor in zip(header.forms, payload.tensors, strict=True):
        empty = form.empty()
        assert (empty.shape, empty.dtype, empty.device.type) == (tensor.shape, tensor.dtype, "cpu")
    filled = header.filled([tensor.detach().clone() for tensor in payload.tensors])
    assert alike(filled.value(), value, identical=False)
    assert filled.form() == payload.form()


@given(VALUES)
@settings(deadline=None, max_examples=60)
def test_other_tensors_take_the_tensors_places(value):
    """A stage replaces what arrived by leaves of its own graph."""
    payload = Payload.of(value)
    others = [tensor.detach().clone() for tensor in payload.tensors]
    changed = payload.with_tensors(others)
    assert all(ours is theirs for ours, theirs in zip(changed.tensors, others, strict=True))
    assert alike(changed.value(), value, identical=False)
    assert changed.wants_grad == payload.wants_grad


def test_a_bare_tensor_is_itself():
    """Most boundaries carry one tensor, and then nothing is flattened."""
    x = torch.ones(2, requires_grad=True)
    payload = Payload.of(x)
    assert (payload.structure, payload.wants_grad) == ("", (True,))
    assert payload.value() is x
    assert Header.parse(payload.header()).filled([x]).value() is x


def test_who_wants_a_gradient_can_be_said():
    """A forward without a graph makes tensors that require none, though gradients must come back
    for them.
    """
    assert Payload.of(torch.ones(2), (True,)).wants_grad == (True,)
    value = (torch.ones(2), {"a": torch.ones(3), "b": 7})
    assert Payload.of(value, (False, True)).wants_grad == (False, True)
    assert [
        form.wants_grad for form in Header.parse(Payload.of(value, (False, True)).header()).forms
    ] == [False, True]


@pytest.mark.parametrize("missing", [(), (0,), (1,), (0, 2), (0, 1, 2)])
def test_a_list_of_gradients_keeps_its_gaps(missing):
    """The receiver matches gradients to outputs by place; a gap that closed would shift all after
    it.
    """
    gradients = [None if i in missing else torch.full((i + 1,), float(i)) for i in range(3)]
    payload = Payload.flat(gradients)
    assert payload.wants_grad == (False,) * (3 - len(missing))
    header = Header.parse(payload.header())
    assert len(header.forms) == 3 - len(missing)
    assert alike(header.filled(payload.tensors).value(), gradients, identical=True)
    assert Payload.flat([]).value() == []


def test_the_form_tells_shapes_dtypes_nesting_and_constants_apart_and_not_contents():
    """The sender compares forms of batches, to say when what it once told the receiver holds no
    more.
    """

    def form(value, wants=None):
        return Payload.of(value, wants).form()

    x = torch.ones(2, 3)
    others = [
        torch.ones(3, 2),
        torch.ones(2, 3, dtype=torch.float64),
        (x,),
        [x],
        {"a": x},
        {"b": x},
        (x, 1),
        (x, 2),
        (x, None),
    ]
    assert len({form(x), *map(form, others), form(x, (True,))}) == len(others) + 2
    assert form(x) == form(torch.zeros(2, 3))
    assert form((x, 1)) == form((torch.zeros(2, 3), 1))


class Colour(Enum):
    """A constant by name."""

    RED = 1


class Point(NamedTuple):
    """A tuple with names."""

    x: Tensor
    y: Tensor


@dataclass(frozen=True)
class Record:
    """A dataclass that torch does not know how to take apart."""

    x: Tensor


ONE = torch.ones(1)


def sent(value):
    """As it arrives in another process."""
    payload = Payload.of(value)
    return Header.parse(payload.header()).filled(payload.tensors).value()


@pytest.mark.parametrize(
    "value",
    [
        Record(ONE),
        (ONE, [Record(ONE)]),
        Point(ONE, ONE.clone()),
        [Point(ONE, ONE)],
        (ONE, Colour.RED),
        (ONE, b"bytes"),
        (ONE, 1j),
        (ONE, torch.float32),
        (ONE, torch.Size([2, 3])),
        (ONE, slice(1, None, 2)),
        (ONE, np.float32(0.1)),
        (ONE, np.int64(7)),
        {(1, 2): ONE},
        [{"a": {(1,): ONE}}],
        {torch.float32: ONE},
        {Colour.RED: ONE, 1: 2, "1": 3},
        defaultdict(list, a=ONE),
        UserDict(a=ONE),
        (ONE, ...),
        (ONE, range(3)),
        (ONE, int),
        (ONE, torch.channels_last),
        2**80,
        -0.0,
        (ONE, torch.device("cpu")),
        {"penstock.type": "os:system", "fields": {}},
    ],
)
def test_constants_and_records_of_many_kinds_arrive_as_they_were(value):
    """Version 0.1 refused them, or let them arrive as something else."""
    received = sent(value)
    assert type(received) is type(value)
    assert repr(received) == repr(value)


def test_a_sparse_tensor_arrives_whether_it_is_nested_or_not():
    """It is sent as its indices and values."""
    sparse = torch.eye(3).to_sparse()
    assert len(Payload.of(sparse).tensors) == 2
    for received in (sent(sparse), sent([sparse])[0]):
        assert received.layout is torch.sparse_coo
        assert torch.equal(received.to_dense(), torch.eye(3))


@pytest.mark.parametrize("value", [set("abc"), frozenset("abc")])
def test_sets_arrive_as_they_were(value):
    """In any order: that of strings differs from process to process."""
    tensor, arrived = sent((ONE, value))
    assert torch.equal(tensor, ONE)
    assert (type(arrived), arrived) == (type(value), value)


def test_nan_arrives_and_has_a_form_of_its_own():
    """NaN is unequal to itself, and a form with one in it was another every time."""
    assert math.isnan(sent((ONE, math.nan))[1])
    assert Payload.of((ONE, math.nan)).form() == Payload.of((ONE, math.nan)).form()
    assert Payload.of((ONE, 0.0)).form() != Payload.of((ONE, -0.0)).form()


def test_one_tensor_in_several_places_travels_once_and_stays_one():
    """Its gradient is then the sum, and a change in place shows in all places."""
    payload = Payload.of((ONE, {"again": ONE}, [ONE]))
    assert len(payload.tensors) == 1
    received = sent((ONE, {"again": ONE}, [ONE]))
    assert received[0] is received[1]["again"] is received[2][0]
    assert Payload.of((ONE, ONE.clone())).structure != payload.structure


def test_tensors_that_share_memory_are_noted_and_parts_that_do_not_meet_are_not():
    """A change of one of two that share theirs must be refused; halves of one tensor are harmless."""
    whole = torch.arange(12.0).reshape(3, 4)
    assert Payload.of((whole, whole[:, 1:])).shared == ((0, 1),)
    assert Payload.of((whole, whole.detach(), ONE)).shared == ((0, 1),)
    assert Payload.of(list(whole.chunk(2, dim=1))).shared == ()
    assert Payload.of([whole[::2], whole[1::2]]).shared == ()
    text = Payload.of((whole, whole[:, 1:])).header()
    assert Header.parse(text).shared == ((0, 1),)


def test_other_containers_of_torchs_keep_their_kind():
    """Shapes and deques are no promise, but must not turn into something else unsaid."""
    value = (deque([ONE, ONE], maxlen=3), torch.Size([2, 3]))
    payload = Payload.of(value)
    received = Header.parse(payload.header()).filled(payload.tensors).value()
    assert received == payload.value() == value
    assert received[0].maxlen == 3


@st.composite
def strided(draw):
    """A tensor with any order of dimensions, gaps and repeated elements."""
    shape = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    tensor = torch.arange(math.prod(shape)).reshape(shape)
    for dim in range(len(shape)):
        change = draw(st.sampled_from(["none", "none", "cut", "step", "repeat"]))
        if change == "cut":
            tensor = tensor.narrow(dim, 0, max(1, tensor.shape[dim] - 1))
        elif change == "step":
            tensor = tensor[(slice(None),) * dim + (slice(None, None, 2),)]
        elif change == "repeat":
            tensor = tensor.narrow(dim, 0, 1).expand(
                *[3 if other == dim else -1 for other in range(tensor.dim())]
            )
    return tensor.permute(draw(st.permutations(range(tensor.dim()))))


@given(strided(), st.booleans())
@settings(deadline=None, max_examples=60)
def test_distinct_elements_are_sent_and_the_receiver_has_the_same_tensor(tensor, copies):
    """In the sender's strides, and in memory of its own where a copy is asked for."""
    form = TensorForm.of(tensor, wants_grad=False)
    packed = form.packed(tensor).contiguous().clone()
    assert form.empty().shape == packed.shape
    assert form.empty().dtype is packed.dtype
    distinct = tensor.unique().numel() if form.stride is not None else tensor.numel()
    assert packed.numel() == distinct
    received = form.unpacked(packed, copies=copies)
    assert torch.equal(received, tensor)
    contiguous = torch.empty(tensor.shape).stride()
    assert received.stride() == (contiguous if form.stride is None else form.stride)
    if copies:
        before = received.clone()
        packed.fill_(-1)
        assert torch.equal(received, before)


def test_replaced_tensors_keep_structure_constants_and_shared_memory():
    """Only the tensors are others, in their order."""
    memory = torch.arange(4.0)
    payload = Payload.of({"a": memory[:3], "b": 5, "c": [memory[2:]]})
    assert payload.shared == ((0, 1),)
    other = payload.with_tensors([torch.zeros(3), torch.ones(2)])
    assert other.shared == payload.shared
    assert other.wants_grad == payload.wants_grad
    value = other.value()
    assert (value["b"], value["a"].tolist(), value["c"][0].tolist()) == (5, [0.0] * 3, [1.0] * 2)
    assert other.nbytes == 20


def test_a_list_of_gradients_stays_a_list_unless_it_is_a_single_tensor():
    """A single missing gradient as well."""
    gradient = torch.ones(2)
    assert Payload.flat([gradient]).value() is gradient
    for row in ([None], [None, gradient], [gradient, gradient], []):
        payload = Payload.flat(list(row))
        assert payload.value() == row
        assert payload.wants_grad == (False,) * sum(leaf is not None for leaf in row)
