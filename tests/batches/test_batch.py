"""Batches: split into micro-batches of nearly equal size, joined again, and distinguished by
signature.
"""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils import _pytree as pytree

from penstock.batches.batch import make_batch
from penstock.batches.splitting import cut, even_sizes, join, sample_count, sizes_by_share
from penstock.errors import SettingError
from penstock.schedule.slicing import Slicing


def batch(x, y=None, parts=2, *, step=0, training=True):
    """A batch of x."""
    return make_batch(x, y, parts, step=step, training=training)


def rows(samples, width=2):
    """Samples that can be told apart."""
    return torch.arange(samples * width, dtype=torch.float32).reshape(samples, width)


@pytest.mark.parametrize(("samples", "parts", "sizes"), [
    (37, 8, [5, 5, 5, 5, 5, 4, 4, 4]), (16, 4, [4, 4, 4, 4]), (3, 8, [1, 1, 1]), (1, 1, [1]), (5, 1, [5]), (7, 6, [2, 1, 1, 1, 1, 1]),
])  # fmt: skip
def test_micro_batches_are_nearly_equal_larger_ones_first_and_never_empty(samples, parts, sizes):
    """All ranks must cut alike, whether the batch divides or not; the last batch of an epoch may be
    smaller than the pipeline.
    """
    split_batch = batch(rows(samples), torch.arange(samples), parts)
    assert [len(x) for x in split_batch.inputs] == [len(y) for y in split_batch.targets] == sizes
    assert split_batch.micro_batches == len(sizes)
    assert split_batch.shares == [size / samples for size in sizes]
    assert torch.equal(torch.cat(split_batch.inputs), rows(samples))
    assert torch.equal(torch.cat(split_batch.targets), torch.arange(samples))


@given(st.integers(1, 300), st.integers(1, 64))
@settings(deadline=None, max_examples=150)
def test_shares_are_those_of_the_samples_and_sum_to_1(samples, parts):
    """The mean loss of a batch weighs samples; a share that went missing would shrink every
    gradient.
    """
    split_batch = batch(rows(samples), None, parts)
    sizes = [len(x) for x in split_batch.inputs]
    assert sum(sizes) == samples
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)
    assert split_batch.micro_batches == min(samples, parts) == len(split_batch.shares)
    assert math.fsum(split_batch.shares) == pytest.approx(1, abs=1e-12)
    assert [share * samples for share in split_batch.shares] == pytest.approx(sizes)


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


def test_nested_inputs_are_cut_together():
    """Tokens and their mask must stay beside each other."""
    nested_batch = batch({"tokens": rows(5), "rest": (rows(5) > 3, "name")}, [torch.arange(5)], 2)
    assert [x["tokens"].shape[0] for x in nested_batch.inputs] == [3, 2]
    assert torch.equal(nested_batch.inputs[1]["rest"][0], rows(5)[3:] > 3)
    assert [x["rest"][1] for x in nested_batch.inputs] == ["name", "name"]
    assert nested_batch.targets[1][0].tolist() == [3, 4]


def test_a_batch_without_targets_has_none():
    """A forward alone asks for outputs, not losses."""
    input_batch = batch(rows(4), None, 2, step=7, training=False)
    assert input_batch.targets is None
    assert (input_batch.step, input_batch.training, input_batch.losses, input_batch.outputs) == (
        7,
        False,
        {},
        {},
    )


def test_batches_of_one_form_have_one_signature():
    """By it, receives are posted before the shapes have travelled: step, values and targets' shapes
    do not matter.
    """
    first = batch(rows(8), torch.arange(8), 4).signature
    assert batch(rows(8) + 1, torch.arange(8) * 2, 4, step=9).signature == first
    assert batch(rows(8) * 3, torch.ones(8, 3), 4).signature == first
    assert len(first) == 16


def test_whatever_changes_the_shapes_between_stages_changes_the_signature():
    """Two batches with one signature and other shapes would be received into buffers that do not
    fit.
    """
    y = torch.arange(8)
    signatures = [
        batch(rows(8), y, 4).signature,
        batch(rows(8), y, 3).signature,
        batch(rows(7), y[:7], 4).signature,
        batch(rows(8, width=3), y, 4).signature,
        batch(rows(8).double(), y, 4).signature,
        batch((rows(8),), y, 4).signature,
        batch([rows(8)], y, 4).signature,
        batch({"a": rows(8)}, y, 4).signature,
        batch({"b": rows(8)}, y, 4).signature,
        batch((rows(8), 1), y, 4).signature,
        batch((rows(8), 2), y, 4).signature,
        batch(rows(8), y, 4, training=False).signature,
        batch(rows(8), None, 4).signature,
        batch(rows(8), None, 4, training=False).signature,
    ]
    assert len(set(signatures)) == len(signatures)


def test_more_parts_than_samples_is_the_same_as_single_samples():
    """3 samples in 4 or in 8 parts are 3 micro-batches of 1, with one set of shapes."""
    assert (
        batch(rows(3), None, 8).signature
        == batch(rows(3), None, 4).signature
        == batch(rows(3), None, 3).signature
    )


@pytest.mark.parametrize(
    ("x", "y", "message"),
    [
        (
            torch.ones(0, 3),
            None,
            r"^the inputs of a batch must be tensors with the same number of samples, at least 1, .*; these have \(0, 3\)$",
        ),
        (torch.tensor(1.0), None, r"these have \(\)$"),
        ((torch.ones(2, 3), torch.ones(3, 3)), None, r"these have \(2, 3\), \(3, 3\)$"),
        ((torch.ones(2, 3), torch.tensor(1.0)), None, r"these have \(2, 3\), \(\)$"),
        ([1, 2, 3], None, r"^the inputs of a batch must be .* these have no tensors$"),
        (
            torch.ones(4, 2),
            [1, 2, 3, 4],
            r"^the targets of a batch must be .* these have no tensors$",
        ),
        (torch.ones(4, 2), torch.ones(3), r"^a batch has 4 inputs and 3 targets$"),
        (
            torch.ones(4, 2),
            (torch.ones(4), torch.ones(3)),
            r"^the targets of a batch must be .* these have \(4,\), \(3,\)$",
        ),
    ],
)
def test_a_batch_that_cannot_be_cut_is_refused_with_its_shapes(x, y, message):
    """On every rank alike, before anything runs: a loader's short batch is the usual reason."""
    with pytest.raises(SettingError, match=message):
        batch(x, y)


def test_samples_are_counted_over_all_tensors():
    """One number, whatever the nesting."""
    assert sample_count({"a": rows(5), "b": [torch.ones(5), "text", None]}, "x") == 5


@pytest.mark.parametrize(
    "output",
    [
        lambda x: x.mean(0, keepdim=True),
        lambda x: x.transpose(0, 1),
        lambda x: torch.ones(6, 3),
    ],
)
def test_outputs_whose_first_dimension_is_not_the_samples_are_refused(output):
    """The joined tensor would be none that the model returns; samples and tokens may be one."""
    batch = make_batch(torch.rand(8, 6, 3), None, 2, step=0, training=False)
    with pytest.raises(SettingError, match="for micro-batches of 4, 4, … samples: outputs of"):
        batch.joined({number: output(x) for number, x in enumerate(batch.inputs)})
    flat = batch.joined({number: x.flatten(0, 1) for number, x in enumerate(batch.inputs)})
    assert len(flat) == 48


def test_an_output_without_samples_cannot_be_joined():
    """Of several micro-batches' numbers none is the batch's: their mean, sum or maximum is the
    model's own business.
    """
    with pytest.raises(
        SettingError,
        match="the model's output has a tensor without a dimension: outputs of micro-batches are joined",
    ):
        join([(torch.ones(2), torch.tensor(1.0)), (torch.ones(2), torch.tensor(2.0))])


# -- slices
# -----------------------------------------------------------------------------------------------------------


def sliced(x, y, slicing, **options):
    """A batch of x in the micro-batches and slices of `slicing`."""
    return make_batch(x, y, len(slicing.shares), step=0, training=True, slicing=slicing, **options)


def text(samples, tokens):
    """Tokens that can be told apart."""
    return torch.arange(samples * tokens).reshape(samples, tokens)


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


def test_sequences_are_cut_within_their_micro_batches():
    """Numbers go through: all slices of micro-batch 0 first. A slice's share is that of its tokens
    in its micro-batch's samples.
    """
    x = text(5, 8)
    sliced_batch = sliced(
        {"tokens": x, "name": "a"}, (x + 1,), Slicing("tokens", ((0.5, 0.25, 0.25), (1.0,)))
    )
    assert [tuple(part["tokens"].shape) for part in sliced_batch.inputs] == [
        (3, 4),
        (3, 2),
        (3, 2),
        (2, 8),
    ]
    assert torch.equal(sliced_batch.inputs[1]["tokens"], x[:3, 4:6])
    assert [part["name"] for part in sliced_batch.inputs] == ["a"] * 4
    assert all(
        torch.equal(target[0], part["tokens"] + 1)
        for target, part in zip(sliced_batch.targets, sliced_batch.inputs, strict=True)
    )
    assert sliced_batch.shares == pytest.approx([0.3, 0.15, 0.15, 0.4])
    assert (sliced_batch.micro_batches, sliced_batch.numbers, sliced_batch.cuts_tokens) == (
        2,
        range(4),
        True,
    )
    assert [sliced_batch.place(n) for n in sliced_batch.numbers] == [(0, 2), (0, 2), (0, 2), (1, 2)]
    assert [sliced_batch.next_slice(n) for n in sliced_batch.numbers] == [1, 2, None, None]


@given(
    st.integers(1, 9),
    st.integers(3, 12),
    st.lists(st.sampled_from([(1.0,), (0.5, 0.5), (0.2, 0.5, 0.3)]), min_size=1, max_size=4),
)
@settings(deadline=None, max_examples=60)
def test_cut_sequences_are_whole_again_when_joined(samples, tokens, shares):
    """Outputs come back along tokens, then samples; and the self-check sees the sequences whole."""
    x = text(samples, tokens)
    sliced_batch = sliced(x, x, Slicing("tokens", tuple(shares)))
    assert torch.equal(sliced_batch.joined(dict(enumerate(sliced_batch.inputs))), x)
    assert math.fsum(sliced_batch.shares) == pytest.approx(1)
    whole = sliced_batch.with_whole_sequences()
    assert torch.equal(torch.cat(whole.inputs), x)
    assert torch.equal(torch.cat(whole.targets), x)
    assert whole.shares == pytest.approx(batch(x, x, len(shares)).shares)
    assert [len(part) for part in whole.inputs] == [
        len(part) for part in batch(x, x, len(shares)).inputs
    ]


def test_slices_of_samples_are_micro_batches_of_the_sizes_of_their_shares():
    """AutoPipe's halves. They hand nothing on."""
    sliced_batch = sliced(
        rows(16), torch.arange(16), Slicing("samples", ((0.5, 0.5), (1.0,), (1.0,), (0.25, 0.75)))
    )
    assert [len(part) for part in sliced_batch.inputs] == [2, 2, 4, 4, 1, 3]
    assert sliced_batch.shares == [size / 16 for size in (2, 2, 4, 4, 1, 3)]
    assert (sliced_batch.micro_batches, sliced_batch.cuts_tokens) == (6, False)
    assert [sliced_batch.place(n) for n in sliced_batch.numbers] == [
        (0, 4),
        (0, 4),
        (1, 4),
        (2, 4),
        (3, 4),
        (3, 4),
    ]
    assert [sliced_batch.next_slice(n) for n in sliced_batch.numbers] == [None] * 6
    assert torch.equal(sliced_batch.joined(dict(enumerate(sliced_batch.inputs))), rows(16))


def test_a_batch_too_small_for_its_slices_fills_the_first_of_them():
    """Of samples: single samples. Of tokens: fewer micro-batches, cut as ever."""
    sliced_batch = sliced(rows(3), None, Slicing("samples", ((0.5, 0.5), (0.5, 0.5))))
    assert [len(part) for part in sliced_batch.inputs] == [1, 1, 1]
    assert (sliced_batch.micro_batches, sliced_batch.slicing, sliced_batch.place(2)) == (
        3,
        None,
        (2, 3),
    )
    sliced_batch = sliced(text(2, 4), None, Slicing("tokens", ((0.5, 0.5), (0.25, 0.75), (1.0,))))
    assert [tuple(part.shape) for part in sliced_batch.inputs] == [(1, 2), (1, 2), (1, 1), (1, 3)]
    assert (sliced_batch.micro_batches, sliced_batch.slicing.shares) == (
        2,
        ((0.5, 0.5), (0.25, 0.75)),
    )


def test_each_slicing_has_a_separate_signature():
    """The shapes between stages depend on it."""
    x = text(4, 8)
    ways = [
        ("tokens", ((0.5, 0.5),)),
        ("tokens", ((0.25, 0.75),)),
        ("samples", ((0.5, 0.5),)),
        ("tokens", ((0.5, 0.5), (0.5, 0.5))),
    ]
    signatures = [sliced(x, None, Slicing(*way)).signature for way in ways]
    assert len({*signatures, batch(x, None, 1).signature, batch(x, None, 2).signature}) == 6


@pytest.mark.parametrize(
    ("x", "y", "message"),
    [
        (
            text(4, 2),
            None,
            r"^sequences of 2 tokens cannot be cut into 3 slices: use a schedule with at most 2 slices, or longer sequences$",
        ),
        (
            torch.ones(4),
            None,
            r"^the schedule cuts sequences, so the inputs of a batch must be tensors with the same number of tokens, .* these have \(4,\)$",
        ),
        (torch.ones(4, 0), None, r"second dimension; these have \(4, 0\)$"),
        (
            (text(4, 8), torch.ones(4)),
            None,
            r"the inputs of a batch must be .* these have \(4, 8\), \(4,\)$",
        ),
        ((text(4, 8), torch.ones(4, 1)), None, r"these have \(4, 8\), \(4, 1\)$"),
        (text(4, 8), torch.arange(4), r"the targets of a batch must be .* these have \(4,\)$"),
        (
            text(4, 8),
            text(4, 7),
            r"^the schedule cuts sequences: the inputs have 8 tokens each, the targets 7, and must have as many$",
        ),
    ],
)
def test_sequences_that_cannot_be_cut_are_refused_with_their_shapes(x, y, message):
    """A target without tokens has no slices, and its share of the loss would be counted several
    times.
    """
    with pytest.raises(SettingError, match=message):
        sliced(x, y, Slicing("tokens", ((0.5, 0.25, 0.25),)))


@pytest.mark.parametrize(
    "output",
    [torch.ones(2), torch.ones(2, 5), torch.tensor(1.0)],
    ids=["no tokens", "others", "no samples"],
)
def test_outputs_of_slices_that_cannot_be_joined_are_refused(output):
    """A pooled output of half a sequence is none of the whole one's."""
    sliced_batch = sliced(text(2, 8), None, Slicing("tokens", ((0.5, 0.5),)))
    with pytest.raises(
        SettingError,
        match=r"the model's output for a slice of 4 tokens has a tensor of \(.*\): outputs of slices are",
    ):
        sliced_batch.joined({0: output, 1: output})
