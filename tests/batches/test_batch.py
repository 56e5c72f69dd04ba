"""Batches: split into micro-batches of nearly equal size, joined again, and distinguished by
signature. Slices are in test_batch_slices.py.
"""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.batches.batch import make_batch, parse_pair
from penstock.errors import SettingError


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
        (torch.eye(4).to_sparse(), torch.ones(4), r"^the inputs of a batch have a sparse tensor"),
        (torch.eye(4), torch.eye(4).to_sparse(), r"^the targets of a batch have a sparse tensor"),
        (torch.ones(4, 2), torch.ones(3), r"^a batch has 4 inputs and 3 targets$"),
        (torch.ones(3, 2), torch.ones(4), r"^a batch has 3 inputs and 4 targets$"),
        (torch.ones(0, 3), torch.ones(0), r"^the inputs of a batch must be .* have \(0, 3\)$"),
        (torch.tensor(1.0), torch.tensor(1.0), r"^the inputs of a batch must be .* have \(\)$"),
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


@pytest.mark.parametrize(
    "nest",
    [lambda value: value, lambda value: (value, 1), lambda value: [torch.zeros(4), {"a": value}]],
)
def test_inputs_and_targets_that_require_a_gradient_are_refused_in_training(nest):
    """A pipeline computes none for them, and they would silently get none."""
    x, y = rows(4), torch.ones(4)
    for inputs, targets, name in (
        (rows(4).requires_grad_(), y, "inputs"),
        (x, torch.ones(4, requires_grad=True), "targets"),
    ):
        message = rf"the {name} of a batch have a tensor of shape \(4.*\) that requires a gradient"
        with pytest.raises(SettingError, match=message):
            batch(nest(inputs), nest(targets))
        assert batch(nest(inputs), nest(targets), training=False).micro_batches == 2
    assert batch(nest(x.requires_grad_().detach()), nest(y)).training


def test_strides_and_shared_memory_of_inputs_are_part_of_the_signature():
    """The first stage may pass them on, with other strides or as other parts of one tensor."""
    x, y = rows(4), torch.arange(4)
    separate, same = (x, x.clone()), (x, x[:, :])
    signatures = {
        batch(value, y).signature
        for value in (x, x.t().contiguous().t(), rows(4, width=4)[:, :2], separate, same, (x, x))
    }
    assert len(signatures) == 6


def test_plain_and_nested_targets_make_one_signature():
    """The targets' nesting does not matter to what stages pass on; the fast way of plain tensors
    gives the same batch.
    """
    x, y = rows(7), torch.arange(7)
    plain, nested_batch = batch(x, y, 3, step=2), batch(x, [y], 3, step=2)
    assert plain.signature == nested_batch.signature
    assert plain.shares == nested_batch.shares == [3 / 7, 2 / 7, 2 / 7]
    assert (plain.step, plain.training, plain.slicing) == (2, True, None)
    for one, other in zip(plain.targets, nested_batch.targets, strict=True):
        assert torch.equal(one, other[0])
    assert plain.whole[0] is x
    assert plain.whole[1] is y
    assert nested_batch.whole[1][0] is y


def test_batches_do_not_share_their_lists():
    """What is known of a batch size is kept: a change of one batch must not reach the next one."""
    first = batch(rows(5), torch.arange(5))
    first.shares[0] = 7.0
    first.losses[0] = torch.zeros(())
    second = batch(rows(5), torch.arange(5))
    assert second.shares == [3 / 5, 2 / 5]
    assert second.losses == {}


def test_numbers_of_one_batch_have_different_forms_and_batches_of_one_form_the_same():
    """Receives are posted by them; micro-batches of a batch may differ in size."""
    first, second = batch(rows(5), None), batch(rows(5) + 1, None, step=1)
    assert first.forms == second.forms
    assert len(set(first.forms)) == 2
    assert set(first.forms).isdisjoint(batch(rows(6), None).forms)


def losses_of(values, factors):
    """A batch with losses and factors by number."""
    loss_batch = batch(rows(len(values)), None, len(values))
    loss_batch.losses = {number: torch.tensor(value) for number, value in enumerate(values)}
    loss_batch.loss_factors = factors
    return loss_batch


@pytest.mark.parametrize(
    ("factors", "numbers", "expected"),
    [
        ({}, [0, 1, 2], [2.0, 3.0, 5.0]),
        ({}, [2, 0], [5.0, 2.0]),
        ({0: 0.5, 1: 0.5, 2: 0.5}, [0, 1, 2], [1.0, 1.5, 2.5]),
        ({0: 0.5, 1: 0.25, 2: 0.5}, [0, 1, 2], [1.0, 0.75, 2.5]),
        ({0: 0.5}, [0, 1, 2], [1.0, 3.0, 5.0]),
        ({2: 0.5}, [0, 1, 2], [2.0, 3.0, 2.5]),
        ({2: 0.5}, [2], [2.5]),
    ],
)
def test_losses_are_multiplied_by_the_factors_of_their_numbers(factors, numbers, expected):
    """Without a factor a loss is its share; equal factors take a shorter way."""
    assert losses_of([2.0, 3.0, 5.0], factors).loss_shares(numbers).tolist() == expected


def test_a_checksum_that_was_put_off_is_computed_once():
    """When the rank waits anyway; reading it twice must not read the batch twice."""
    checksum_batch, calls = batch(rows(2), None), []

    def pending():
        calls.append(1)
        return 17

    assert checksum_batch.checksum() == 0
    checksum_batch.pending_check = pending
    assert [checksum_batch.checksum(), checksum_batch.checksum(), checksum_batch.check] == [17] * 3
    assert calls == [1]


def test_micro_batches_joined_in_any_order_are_in_that_of_their_numbers():
    """Ranks finish them out of order."""
    outputs = {2: torch.tensor([4]), 0: torch.tensor([0, 1]), 1: torch.tensor([2, 3])}
    assert batch(rows(5), None, 3).joined(outputs).tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("item", [("x", "y"), ["x", "y"]])
def test_a_loader_yields_pairs(item):
    """Tuples as of a TensorDataset, lists as of the default collation."""
    assert parse_pair(item) == ("x", "y")


@pytest.mark.parametrize(
    ("item", "description"),
    [
        ({"ids": 1, "labels": 2}, "a dict with the keys 'ids', 'labels'"),
        ((1, 2, 3), "a tuple of 3"),
        ([1], "a list of 1"),
        ("xy", "a str"),
        (torch.zeros(2, 3), "a Tensor"),
    ],
)
def test_other_items_of_a_loader_are_refused_with_what_they_are(item, description):
    """Two rows of a tensor, or two letters, are no pair."""
    with pytest.raises(SettingError, match=f"^the loader yields {description}, and train takes"):
        parse_pair(item)


@pytest.mark.parametrize("place", [0, 1, 2])
def test_every_tensor_of_an_output_must_index_the_samples(place):
    """Also one that comes after others that do."""
    split_batch = batch(rows(8), None, 2)
    outputs = {}
    for number, x in enumerate(split_batch.inputs):
        output = [x, x * 2, x[:, 0]]
        output[place] = x.mean(0, keepdim=True)
        outputs[number] = output
    with pytest.raises(
        SettingError, match=r"the model returned tensors of shape \(1, 2\), \(1, 2\)"
    ):
        split_batch.joined(outputs)
