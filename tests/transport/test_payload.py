"""Payload and Header: nested values apart and together again, by hand-over and by JSON."""

from __future__ import annotations

import json
import math
from collections import OrderedDict, defaultdict, deque
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from penstock.errors import RunError
from penstock.transport.payload import Header, Payload, TensorForm

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.int64, torch.int32, torch.uint8,
          torch.bool]  # fmt: skip


@st.composite
def tensors(draw):
    """A small tensor of any dtype, empty and without dimensions too; some want gradients."""
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    dtype = draw(st.sampled_from(DTYPES))
    made = torch.arange(math.prod(shape)).reshape(shape).to(dtype)
    return made.requires_grad_(
        draw(st.booleans()) and (made.is_floating_point() or made.is_complex())
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
    """Whether two values nest alike, with keys in the same order, and hold the same; `identical` asks for the tensors themselves."""
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
    """Between processes only these travel: structure, keys, constants and who wants a gradient are in the JSON."""
    payload = Payload.of(value)
    text = payload.header()
    header = Header.parse(text)
    json.loads(text)
    assert header.forms == [TensorForm(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), tensor.requires_grad)
                            for tensor in payload.tensors]  # fmt: skip
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
    """A forward without a graph makes tensors that require none, though gradients must come back for them."""
    assert Payload.of(torch.ones(2), (True,)).wants_grad == (True,)
    value = (torch.ones(2), {"a": torch.ones(3), "b": 7})
    assert Payload.of(value, (False, True)).wants_grad == (False, True)
    assert [
        form.wants_grad for form in Header.parse(Payload.of(value, (False, True)).header()).forms
    ] == [False, True]


@pytest.mark.parametrize("missing", [(), (0,), (1,), (0, 2), (0, 1, 2)])
def test_a_list_of_gradients_keeps_its_gaps(missing):
    """The receiver matches gradients to outputs by place; a gap that closed would shift all after it."""
    gradients = [None if i in missing else torch.full((i + 1,), float(i)) for i in range(3)]
    payload = Payload.flat(gradients)
    assert payload.wants_grad == (False,) * (3 - len(missing))
    header = Header.parse(payload.header())
    assert len(header.forms) == 3 - len(missing)
    assert alike(header.filled(payload.tensors).value(), gradients, identical=True)
    assert Payload.flat([]).value() == []


def test_the_form_tells_shapes_dtypes_nesting_and_constants_apart_and_not_contents():
    """The sender compares forms of batches, to say when what it once told the receiver holds no more."""

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
    """A leaf of nobody's."""

    RED = 1


class Point(NamedTuple):
    """A tuple with names."""

    x: Tensor
    y: Tensor


@dataclass
class Record:
    """A dataclass that torch does not know how to take apart."""

    x: Tensor


ONE = torch.ones(1)


@pytest.mark.parametrize(("value", "message"), [
    (Record(ONE), r"^a Record cannot cross a stage boundary: layers there may return tensors and plain constants in nested tuples, lists"),
    ((ONE, [Record(ONE)]), r"^a Record cannot cross a stage boundary: layers there may return"),
    ((ONE, {1, 2}), r"^a set cannot cross a stage boundary"),
    ((ONE, Colour.RED), r"^a Colour cannot cross a stage boundary"),
    ((ONE, b"bytes"), r"^a bytes cannot cross a stage boundary"),
    ((ONE, 1j), r"^a complex cannot cross a stage boundary"),
    ((ONE, torch.float32), r"^a dtype cannot cross a stage boundary"),
    (Point(ONE, ONE), r"^a Point cannot cross a stage boundary \(.*namedtuple.*\): return tensors in nested tuples, lists and dicts$"),
    ([Point(ONE, ONE)], r"^a list cannot cross a stage boundary \(.*namedtuple.*Point"),
    (torch.max(ONE, 0), r"^a max cannot cross a stage boundary \(.*return_types\.max.*\): return tensors in nested tuples"),
    (defaultdict(list, a=ONE), r"^a defaultdict cannot cross a stage boundary \(a defaultdict has a function inside, which does not travel\)"),
    ((1, defaultdict(lambda: 3, a=ONE)), r"^a tuple cannot cross a stage boundary \(a defaultdict has a function inside"),
    ({(1, 2): ONE}, r"^a dict cannot cross a stage boundary, because a key of a dict in it would change on the way: keys there may be strings"),
    ([{"a": {(1,): ONE}}], r"^a list cannot cross a stage boundary, because a key of a dict in it would change"),
    ({torch.float32: ONE}, r"^a dict cannot cross a stage boundary \("),
])  # fmt: skip
def test_what_cannot_travel_is_refused_at_the_sender_with_its_kind(value, message):
    """The receiver could only fail far from the cause; a dict with tuples as keys once did."""
    with pytest.raises(RunError, match=message):
        Payload.of(value)


def test_other_containers_of_torchs_keep_their_kind():
    """Shapes and deques are no promise, but must not turn into something else unsaid."""
    value = (deque([ONE, ONE], maxlen=3), torch.Size([2, 3]))
    payload = Payload.of(value)
    found = Header.parse(payload.header()).filled(payload.tensors).value()
    assert found == payload.value() == value
    assert found[0].maxlen == 3


def test_a_header_that_names_a_function_is_not_followed():
    """Headers come through the store from other processes; torch would import the module that one names."""
    text = json.dumps({"structure": json.dumps([1, {
        "type": "collections.defaultdict",
        "context": {"default_factory_module": "this", "default_factory_name": "s", "dict_context": ["a"]},
        "children_spec": [{"type": None, "context": None, "children_spec": []}],
    }]), "leaves": [{"constant": 1}]})  # fmt: skip
    payload = Header.parse(text).filled([])
    with pytest.raises(
        ValueError, match="a defaultdict has a function inside, which does not travel"
    ):
        payload.value()
