"""Values cut into parts and joined again: what can be joined, and what is refused and why."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from penstock.batches.splitting import (
    cut,
    even_sizes,
    fault_of_rows,
    join,
    sample_count,
    sizes_by_share,
    token_count,
)
from penstock.errors import SettingError


def rows(samples, width=2):
    """Samples that can be told apart."""
    return torch.arange(samples * width, dtype=torch.float32).reshape(samples, width)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (torch.eye(3).to_sparse(), "x have a sparse tensor in them, which cannot be cut"),
        ([torch.zeros(3), torch.eye(3).to_sparse()], "pass its indices by sample as padded dense"),
        ([1, "a"], r"x must be tensors with .*; these have no tensors"),
        ({"a": nn.Linear(1, 1)}, r"x cannot be cut into micro-batches: .* \(at \['a'\]\)"),
    ],
)
def test_values_without_rows_in_memory_are_refused(value, message):
    """A sparse tensor has no rows that can be split as views; the caller is told what to pass."""
    for count in (sample_count, token_count):
        with pytest.raises(SettingError, match=message):
            count(value, "x")


def test_samples_are_counted_over_all_tensors():
    """One number, whatever the nesting."""
    assert sample_count({"a": rows(5), "b": [torch.ones(5), "text", None]}, "x") == 5


def test_samples_and_tokens_are_counted_along_the_first_two_dimensions():
    """They are counted separately: a sequence has as many tokens as it likes."""
    value = [torch.zeros(2, 5), {"mask": torch.zeros(2, 5, 7), "name": "a"}]
    assert (sample_count(value, "x"), token_count(value, "x")) == (2, 5)
    assert token_count(torch.zeros(0, 5), "x") == 5
    with pytest.raises(SettingError, match=r"in their second dimension; these have \(2,\)"):
        token_count(torch.zeros(2), "x")


@pytest.mark.parametrize("dim", [0, 1])
def test_parts_are_those_rows_or_tokens_in_order(dim):
    """A slow reference: element by element. Parts are views, and constants are in all of them."""
    x = rows(6, 6)
    value = {"x": x, "again": x, "note": "a", "pair": (x[:, :, None], None)}
    start = 0
    for size, part in zip((1, 3, 2), cut(value, [1, 3, 2], dim), strict=True):
        expected = [
            [x[i, j].item() for j in range(6) if dim == 0 or start <= j < start + size]
            for i in range(6)
            if dim == 1 or start <= i < start + size
        ]
        assert part["x"].tolist() == expected
        assert part["pair"][0].squeeze(2).tolist() == expected
        assert part["again"] is part["x"]
        assert (part["note"], part["pair"][1]) == ("a", None)
        assert part["x"].untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
        start += size
    assert torch.equal(join(cut(value, [1, 3, 2], dim), dim)["x"], x)
    assert [part.shape[dim] for part in cut(x, [1, 3, 2], dim)] == [1, 3, 2]


@st.composite
def nested(draw):
    """Nested values whose tensors have 9 samples."""
    tensor = st.sampled_from([torch.float32, torch.int64, torch.bool]).map(
        lambda dtype: rows(9).to(dtype)
    )
    leaf = st.one_of(tensor, st.none(), st.integers(), st.text(max_size=3))
    value = st.recursive(
        leaf,
        lambda inner: st.one_of(
            st.lists(inner, min_size=1, max_size=3),
            st.lists(inner, max_size=2).map(tuple),
            st.dictionaries(st.text(max_size=2), inner, max_size=3),
        ),
        max_leaves=6,
    )
    return draw(value)


@given(nested(), st.integers(1, 12))
@settings(deadline=None, max_examples=100)
def test_joining_the_parts_restores_the_whole(value, parts):
    """Outputs of micro-batches come back to the user as one, nested as the model made them;
    constants once.
    """
    pieces = cut(value, even_sizes(9, parts))
    assert len(pieces) == parts
    whole = join(pieces)
    assert pytree.tree_structure(whole) == pytree.tree_structure(value)
    for leaf, expected in zip(pytree.tree_leaves(whole), pytree.tree_leaves(value), strict=True):
        assert torch.equal(leaf, expected) if isinstance(expected, Tensor) else leaf == expected


@pytest.mark.parametrize("constant", [math.nan, -0.0, 1, True, "a", None, torch.float32, (1, 2)])
def test_a_constant_that_all_parts_have_is_joined_to_itself(constant):
    """NaN is the same as NaN."""
    joined = join([(rows(1), constant), (rows(2), constant)])
    assert len(joined[0]) == 3
    assert repr(joined[1]) == repr(constant)


@pytest.mark.parametrize(
    ("first", "second"),
    list(itertools.combinations([0, 0.0, -0.0, False, None, "0", math.nan, 1], 2)),
)
def test_constants_that_differ_between_parts_are_refused(first, second):
    """None of them is that of the whole batch; the message says which, and where."""
    with pytest.raises(SettingError) as caught:
        join(
            [
                {"y": rows(1), "n": [first]},
                {"y": rows(1), "n": [first]},
                {"y": rows(1), "n": [second]},
            ]
        )
    message = f"the model's output has {first!r} for one micro-batch and {second!r} for another, at"
    assert str(caught.value).startswith(f"{message} output['n'][0]: only tensors can be joined")


@pytest.mark.parametrize("other", [[rows(1)], (rows(1), rows(1)), {"a": rows(1)}, rows(1)])
def test_parts_that_nest_differently_cannot_be_joined(other):
    """Wherever it comes."""
    for place in range(3):
        values = [(rows(1),), (rows(1),)]
        values.insert(place, other)
        with pytest.raises(SettingError, match="nests in another way than that for another"):
            join(values)


def test_sparse_outputs_cannot_be_joined():
    """Their values have no samples."""
    with pytest.raises(SettingError, match=r"a sparse tensor in it.*return its to_dense\(\)"):
        join([[torch.eye(2).to_sparse()], [torch.eye(2).to_sparse()]])


def test_an_output_without_samples_cannot_be_joined():
    """Of several micro-batches' numbers none is the batch's: their mean, sum or maximum is the
    model's own business.
    """
    with pytest.raises(
        SettingError,
        match="the model's output has a tensor without a dimension: outputs of micro-batches are joined",
    ):
        join([(torch.ones(2), torch.tensor(1.0)), (torch.ones(2), torch.tensor(2.0))])


def test_gradients_go_through_parts_and_the_joined_value():
    """`ps.Pipe` returns gradients of its inputs."""
    x = rows(5).requires_grad_()
    factors = torch.arange(1.0, 4.0)
    parts = [part * factor for part, factor in zip(cut(x, [2, 2, 1]), factors, strict=True)]
    join(parts).sum().backward()
    assert x.grad.tolist() == [[1.0] * 2, [1.0] * 2, [2.0] * 2, [2.0] * 2, [3.0] * 2]


@pytest.mark.parametrize(
    ("shapes", "samples", "refused"),
    [
        ([(1,)], [4], False),  # one micro-batch: nothing is joined
        ([(4, 3), (3, 3)], [4, 3], False),
        ([(8, 3), (6, 3)], [4, 3], False),  # samples and tokens in one dimension
        ([(4,), (3,)], [4, 3], False),
        ([(1,), (1,)], [4, 4], True),
        ([(1,), (1,)], [4, 3], True),
        ([(4, 3), (4, 3)], [4, 3], True),
        ([(6, 3), (6, 3)], [4, 4], True),  # one and a half rows for each sample
        ([(8, 4, 5), (8, 4, 5)], [4, 4], True),  # tokens, samples, features
        ([(8, 4, 5), (6, 3, 5)], [4, 3], True),
        ([(8, 4, 5), (6, 5, 5)], [4, 3], False),
        ([(8, 4), (8, 4)], [4, 4], False),  # two tokens for each sample, four features
        ([(4, 4, 5), (4, 4, 5)], [4, 4], False),
        ([(8, 2, 4), (8, 2, 4)], [4, 4], False),
    ],
)
def test_the_first_dimension_of_outputs_must_index_the_samples(shapes, samples, refused):
    """Else the joined tensor would be none that the model returns for the whole batch."""
    fault = fault_of_rows([torch.empty(shape) for shape in shapes], samples)
    assert (fault is not None) == refused
    if fault is not None:
        first, second = shapes
        assert fault.startswith(
            f"returned tensors of shape {first}, {second}, … for micro-batches of {samples[0]}, "
            f"{samples[1]}, … samples"
        )


@pytest.mark.parametrize("total", range(9))
@pytest.mark.parametrize("parts", range(1, 6))
def test_even_sizes_are_those_of_dealing_cards(total, parts):
    """A slow reference: one at a time, to each in turn."""
    sizes = [0] * parts
    for number in range(total):
        sizes[number % parts] += 1
    assert even_sizes(total, parts) == sizes


@pytest.mark.parametrize(
    ("total", "shares", "sizes"),
    [
        (3, [5, 1, 1], [1, 1, 1]),
        (5, [5, 1, 1], [3, 1, 1]),
        (7, [5, 1, 1], [5, 1, 1]),
        (6, [0.1, 0.1, 10], [1, 1, 4]),
        (10, [2, 1, 1], [5, 3, 2]),
        (11, [1, 2, 1], [3, 5, 3]),
        (100, [0.015, 0.985], [2, 98]),
        (9, [1, 1, 1, 6], [1, 1, 1, 6]),
        (7, [0.1, 0.1, 3.2, 3.6], [1, 1, 2, 3]),
        # 1.5, 3 and 4.5, although 0.1 + 0.2 is above 0.3 in floating point.
        (9, [0.1, 0.2, 0.1 + 0.2], [2, 3, 4]),
    ],
)
def test_sizes_are_as_near_to_the_shares_as_whole_positive_numbers_can_be(total, shares, sizes):
    """The scale of the shares does not matter."""
    for scale in (1, 0.01, 7):
        assert sizes_by_share(total, [share * scale for share in shares]) == sizes


@given(
    st.integers(1, 8).flatmap(
        lambda n: st.tuples(
            st.lists(st.floats(0.01, 1), min_size=n, max_size=n), st.integers(n, 400)
        )
    )
)
@settings(deadline=None, max_examples=200)
def test_sizes_by_share_add_up_and_none_is_further_from_its_share_than_it_must(drawn):
    """Tokens must neither be lost nor be counted twice, and no slice may be empty."""
    shares, total = drawn
    sizes = sizes_by_share(total, shares)
    assert sum(sizes) == total
    assert min(sizes) >= 1
    exact_sizes = [total * share / sum(shares) for share in shares]
    if min(exact_sizes) >= 1:
        assert all(
            abs(size - exact) < 1 + 1e-6 for size, exact in zip(sizes, exact_sizes, strict=True)
        )


@pytest.mark.parametrize(("total", "shares", "sizes"), [
    (6, [1 / 6, 2 / 6, 3 / 6], [1, 2, 3]), (10, [1 / 3] * 3, [4, 3, 3]), (9, [1 / 3] * 3, [3, 3, 3]), (7, [0.5, 0.5], [4, 3]),
    (2, [0.99, 0.01], [1, 1]), (4, [0.9, 0.05, 0.05], [2, 1, 1]), (5, [1.0], [5]), (2**24 + 1, [0.5, 0.5], [2**23 + 1, 2**23]),
])  # fmt: skip
def test_sizes_by_share_of_equals_make_the_first_larger(total, shares, sizes):
    """As with micro-batches; shares that were a fraction of whole tokens give these back."""
    assert sizes_by_share(total, shares) == sizes
