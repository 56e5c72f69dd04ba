"""Batches: cut into micro-batches of nearly equal size, put together again, and told apart by signature."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils import _pytree as pytree

from penstock.errors import SettingError
from penstock.runtime.batch import cut, join, make_batch, sample_count


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
    """All ranks must cut alike, whether the batch divides or not; the last batch of an epoch may be smaller than the pipeline."""
    made = batch(rows(samples), torch.arange(samples), parts)
    assert [len(x) for x in made.inputs] == [len(y) for y in made.targets] == sizes
    assert made.micro_batches == len(sizes)
    assert made.shares == [size / samples for size in sizes]
    assert torch.equal(torch.cat(made.inputs), rows(samples))
    assert torch.equal(torch.cat(made.targets), torch.arange(samples))


@given(st.integers(1, 300), st.integers(1, 64))
@settings(deadline=None, max_examples=150)
def test_shares_are_those_of_the_samples_and_sum_to_1(samples, parts):
    """The mean loss of a batch weighs samples; a share that went missing would shrink every gradient."""
    made = batch(rows(samples), None, parts)
    sizes = [len(x) for x in made.inputs]
    assert sum(sizes) == samples
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)
    assert made.micro_batches == min(samples, parts) == len(made.shares)
    assert math.fsum(made.shares) == pytest.approx(1, abs=1e-12)
    assert [share * samples for share in made.shares] == pytest.approx(sizes)


@st.composite
def nested(draw):
    """Nested values whose tensors have 9 samples."""
    tensor = st.sampled_from([torch.float32, torch.int64, torch.bool]).map(lambda dtype: rows(9).to(dtype))
    leaf = st.one_of(tensor, st.none(), st.integers(), st.text(max_size=3))
    value = st.recursive(leaf, lambda inner: st.one_of(st.lists(inner, min_size=1, max_size=3), st.lists(inner, max_size=2).map(tuple),
                                                       st.dictionaries(st.text(max_size=2), inner, max_size=3)), max_leaves=6)  # fmt: skip
    return draw(value)


@given(nested(), st.integers(1, 12))
@settings(deadline=None, max_examples=100)
def test_what_was_cut_is_whole_again_when_joined(value, parts):
    """Outputs of micro-batches come back to the user as one, nested as the model made them; constants once."""
    pieces = cut(value, parts)
    assert len(pieces) == parts
    whole = join(pieces)
    assert pytree.tree_structure(whole) == pytree.tree_structure(value)
    for found, expected in zip(pytree.tree_leaves(whole), pytree.tree_leaves(value), strict=True):
        assert torch.equal(found, expected) if isinstance(expected, Tensor) else found == expected


def test_nested_inputs_are_cut_together():
    """Tokens and their mask must stay beside each other."""
    made = batch({"tokens": rows(5), "rest": (rows(5) > 3, "name")}, [torch.arange(5)], 2)
    assert [x["tokens"].shape[0] for x in made.inputs] == [3, 2]
    assert torch.equal(made.inputs[1]["rest"][0], rows(5)[3:] > 3)
    assert [x["rest"][1] for x in made.inputs] == ["name", "name"]
    assert made.targets[1][0].tolist() == [3, 4]


def test_a_batch_without_targets_has_none():
    """A forward alone asks for outputs, not losses."""
    made = batch(rows(4), None, 2, step=7, training=False)
    assert made.targets is None
    assert (made.step, made.training, made.losses, made.outputs) == (7, False, {}, {})


def test_batches_of_one_form_have_one_signature():
    """By it, receives are posted before the shapes have travelled: step, values and targets' shapes do not matter."""
    first = batch(rows(8), torch.arange(8), 4).signature
    assert batch(rows(8) + 1, torch.arange(8) * 2, 4, step=9).signature == first
    assert batch(rows(8).clone().requires_grad_(), torch.ones(8, 3), 4).signature == first
    assert len(first) == 16


def test_whatever_changes_the_shapes_between_stages_changes_the_signature():
    """Two batches with one signature and other shapes would be received into buffers that do not fit."""
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
    assert batch(rows(3), None, 8).signature == batch(rows(3), None, 4).signature == batch(rows(3), None, 3).signature


@pytest.mark.parametrize(("x", "y", "message"), [
    (torch.ones(0, 3), None, r"^the inputs of a batch must be tensors with the same number of samples, at least 1, .*; these have \(0, 3\)$"),
    (torch.tensor(1.0), None, r"these have \(\)$"),
    ((torch.ones(2, 3), torch.ones(3, 3)), None, r"these have \(2, 3\), \(3, 3\)$"),
    ((torch.ones(2, 3), torch.tensor(1.0)), None, r"these have \(2, 3\), \(\)$"),
    ([1, 2, 3], None, r"^the inputs of a batch must be .* these have no tensors$"),
    (torch.ones(4, 2), [1, 2, 3, 4], r"^the targets of a batch must be .* these have no tensors$"),
    (torch.ones(4, 2), torch.ones(3), r"^a batch has 4 inputs and 3 targets$"),
    (torch.ones(4, 2), (torch.ones(4), torch.ones(3)), r"^the targets of a batch must be .* these have \(4,\), \(3,\)$"),
])  # fmt: skip
def test_a_batch_that_cannot_be_cut_is_refused_with_its_shapes(x, y, message):
    """On every rank alike, before anything runs: a loader's short batch is the usual reason."""
    with pytest.raises(SettingError, match=message):
        batch(x, y)


def test_samples_are_counted_over_all_tensors():
    """One number, whatever the nesting."""
    assert sample_count({"a": rows(5), "b": [torch.ones(5), "text", None]}, "x") == 5


def test_an_output_without_samples_cannot_be_joined():
    """Of several micro-batches' numbers none is the batch's: their mean, sum or maximum is the model's own business."""
    with pytest.raises(
        SettingError, match="the model's output has a tensor without a dimension: outputs of micro-batches are joined"
    ):
        join([(torch.ones(2), torch.tensor(1.0)), (torch.ones(2), torch.tensor(2.0))])
