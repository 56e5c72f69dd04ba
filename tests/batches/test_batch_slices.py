"""Slices of micro-batches: sequences cut into tokens, and micro-batches of unequal samples."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.batches.batch import Batch, make_batch, micro_batch_sizes
from penstock.errors import SettingError
from penstock.schedule.slicing import Slicing


def batch(x, y, parts):
    """A batch without slices."""
    return make_batch(x, y, parts, step=0, training=True)


def rows(samples, width=2):
    """Samples that can be told apart."""
    return torch.arange(samples * width, dtype=torch.float32).reshape(samples, width)


def sliced(x, y, slicing, **options):
    """A batch of x in the micro-batches and slices of `slicing`."""
    return make_batch(x, y, len(slicing.shares), step=0, training=True, slicing=slicing, **options)


def text(samples, tokens):
    """Tokens that can be told apart."""
    return torch.arange(samples * tokens).reshape(samples, tokens)


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
        (text(4, 8), text(4, 9), r"the inputs have 8 tokens each, the targets 9, and must"),
    ],
)
def test_sequences_that_cannot_be_cut_are_refused_with_their_shapes(x, y, message):
    """A target without tokens has no slices, and its share of the loss would be counted several
    times.
    """
    for shares in (((0.5, 0.25, 0.25),), ((1.0,), (0.5, 0.25, 0.25))):
        with pytest.raises(SettingError, match=message):
            sliced(x, y, Slicing("tokens", shares))


@pytest.mark.parametrize(
    "output",
    [torch.ones(2), torch.ones(2, 5), torch.ones(2, 3), torch.tensor(1.0)],
    ids=["no tokens", "more", "fewer", "no samples"],
)
def test_outputs_of_slices_that_cannot_be_joined_are_refused(output):
    """A pooled output of half a sequence is none of the whole one's."""
    sliced_batch = sliced(text(2, 8), None, Slicing("tokens", ((0.5, 0.5),)))
    with pytest.raises(
        SettingError,
        match=r"the model's output for a slice of 4 tokens has a tensor of \(.*\): outputs of slices are",
    ):
        sliced_batch.joined({0: output, 1: output})


def test_joining_slices_keeps_all_else_of_the_batch():
    """The self-check runs the same step on it."""
    x = text(3, 8)
    slicing = Slicing("tokens", ((0.5, 0.5), (1.0,)))
    for y, training in ((x, True), (None, False)):
        sliced_batch = make_batch(x, y, 2, step=5, training=training, slicing=slicing)
        whole = sliced_batch.with_whole_sequences()
        assert isinstance(whole, Batch)
        assert (whole.step, whole.training, whole.slicing) == (5, training, None)
        assert whole.signature == sliced_batch.signature
        assert whole.whole[0] is x
        assert (whole.targets is None) == (y is None)
        assert sliced_batch.rows() == [[0, 1], [2]]
        assert whole.rows() == [[0], [1]]


@pytest.mark.parametrize(
    ("samples", "parts", "along", "sizes", "sliced_after"),
    [
        (5, 2, None, [3, 2], False),
        (1, 2, None, [1], False),
        (5, 2, "tokens", [3, 2], True),
        (8, 2, "samples", [2, 2, 1, 3], True),
        (4, 2, "samples", [1, 1, 1, 1], True),
        (3, 2, "samples", [1, 1, 1], False),
    ],
)
def test_sizes_of_micro_batches_follow_the_slicing_if_there_are_samples_enough(
    samples, parts, along, sizes, sliced_after
):
    """Every slice needs one sample."""
    slicing = None if along is None else Slicing(along, ((0.5, 0.5), (0.25, 0.75)))
    computed, remaining = micro_batch_sizes(samples, parts, slicing)
    assert computed == sizes
    assert (remaining is not None) == sliced_after
