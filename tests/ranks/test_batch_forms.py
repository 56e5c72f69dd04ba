"""Batches in words, which must be the same on all ranks and differ where batches differ."""

from __future__ import annotations

import random
import zlib

import pytest
import torch

from penstock.batches.batch_parts import BatchPart
from penstock.ranks.batch_forms import (
    contents,
    crc_of,
    differ,
    is_partial,
    nested_form,
    pair_form,
    part_form,
)
from penstock.ranks.checksum import whole_checksum


def test_shapes_and_types_of_a_pair_are_in_order():
    """Inputs first; the same words as of nested values."""
    x, y = torch.zeros(2, 3), torch.zeros(2, dtype=torch.int64)
    text = "x (2, 3) float32 and y (2,) int64"
    assert pair_form(x.shape, x.dtype, y.shape, y.dtype) == text
    assert nested_form(x, y) == (text, [x, y])
    assert crc_of(text) == zlib.crc32(text.encode())


def test_nested_values_are_described_with_their_constants():
    """Objects by their type alone; a missing value not at all."""
    x, y = torch.zeros(2), torch.ones(1, dtype=torch.bool)
    form, tensors = nested_form([x, 3, "a"], None)
    assert form.startswith("x [(2,) float32; 3; 'a'] in ")
    assert tensors == [x]
    form, tensors = nested_form({"k": x, "l": None}, (y, x, torch.float64))
    assert form.startswith("x [(2,) float32; None] in ")
    assert " and y [(1,) bool; (2,) float32; dtype] in " in form
    assert [id(tensor) for tensor in tensors] == [id(x), id(y), id(x)]
    assert nested_form([x], None)[0] != nested_form(x, None)[0]
    assert nested_form([x], None)[0] != nested_form((x,), None)[0]
    assert nested_form(None, y)[0] == "y (1,) bool"


def test_a_part_has_the_words_of_the_whole_and_the_order_of_its_samples():
    """Processes that have read different parts have one order; of two orders both are there."""
    rows = torch.arange(6.0).reshape(3, 2)
    part = BatchPart(rows, [0, 2, 5], 8, 0xAB)
    form, tensors = part_form(part, None)
    assert form == "x (8, 2) float32, samples in order 000000ab"
    assert tensors == []
    both = part_form(part, BatchPart(rows, [0, 2, 5], 8, 0xAB))[0]
    assert both.endswith("y (8, 2) float32, samples in order 000000ab")
    other = part_form(BatchPart(rows, [0, 2, 5], 8, 0xCD), part)[0]
    assert other.endswith("samples in order 000000ab and 000000cd")
    whole = BatchPart(rows, range(3), 3, 0)
    form, tensors = part_form(whole, rows)
    assert form == "x (3, 2) float32 and y (3, 2) float32, samples in order 00000000"
    assert len(tensors) == 2
    assert part_form(rows, BatchPart(rows, range(3), 3))[0] == nested_form(rows, rows)[0]
    assert part_form(rows, BatchPart(rows, [0, 1, 3], 4))[1] == []


def test_checksums_are_of_what_was_read_as_a_whole():
    """None for a part, and for targets that are not there."""
    rows = torch.arange(6.0).reshape(3, 2)
    part = BatchPart(rows, [0, 2, 5], 8)
    whole = BatchPart(rows, range(3), 3)
    total = whole_checksum([rows])
    assert contents(rows, None) == [total, None]
    assert contents(part, whole) == [None, total]
    assert contents([rows, rows * 2], rows) == [whole_checksum([rows, rows * 2]), total]
    assert [is_partial(rows, part), is_partial(part, rows), is_partial(whole, rows)] == [
        True,
        True,
        False,
    ]


@pytest.mark.parametrize("seed", range(20))
def test_ranks_differ_if_two_of_them_have_read_other_numbers_of_one_column(seed):
    """What a rank has not read says nothing."""
    choose = random.Random(seed)
    rows = [
        [choose.choice([None, None, 5, 5, 5, 7]), choose.choice([None, 6, 6, 6, 8])]
        for _ in range(choose.randint(1, 4))
    ]
    expected = any(
        one[column] is not None and other[column] is not None and one[column] != other[column]
        for one in rows
        for other in rows
        for column in range(2)
    )
    assert differ(rows) is expected
