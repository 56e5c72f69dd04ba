"""Batches in flight: which batch an op's number belongs to."""

from __future__ import annotations

import pytest
import torch

from penstock.batches.batch import Batch, make_batch
from penstock.batches.in_flight import BatchesInFlight
from penstock.schedule.slicing import Slicing


def batch(samples, step=0):
    """A batch with a micro-batch for each sample."""
    return make_batch(torch.zeros(samples, 2), None, samples, step=step, training=True)


def test_numbers_are_counted_through_all_batches_of_a_stream():
    """An op of a later batch must not get the inputs of an earlier one; a small batch has gaps."""
    in_flight = BatchesInFlight(4)
    batches = {0: batch(4), 1: batch(3, step=1), 2: batch(1, step=2)}
    for index, entry in batches.items():
        in_flight.add(index, entry)
    expected = {
        number: (index, place)
        for index, entry in batches.items()
        for place in range(len(entry.inputs))
        for number in [4 * index + place]
    }
    for number in range(12):
        entry = in_flight.find(number)
        if number not in expected:
            assert entry is None
            continue
        index, place = expected[number]
        assert entry is not None
        assert entry[0] is batches[index]
        assert entry[1] == place


def test_numbers_are_those_of_slices_where_sequences_are_cut():
    """A batch of two micro-batches in four slices has the numbers of four ops."""
    slicing = Slicing("tokens", ((0.5, 0.5), (0.5, 0.5)))
    entry = make_batch(torch.zeros(2, 4), None, 2, step=0, training=True, slicing=slicing)
    in_flight = BatchesInFlight(4)
    in_flight.add(1, entry)
    for batches, first in ((in_flight, 4), (BatchesInFlight.alone(entry), 0)):
        assert [batches.find(first + number) for number in range(4)] == [
            (entry, number) for number in range(4)
        ]


def test_a_batch_that_was_taken_or_cleared_is_not_there_any_more():
    """It would keep the memory of its inputs and outputs."""
    in_flight = BatchesInFlight(2)
    first, second = batch(2), batch(2, step=1)
    in_flight.add(0, first)
    in_flight.add(1, second)
    assert in_flight.take(0) is first
    with pytest.raises(KeyError):
        in_flight.find(1)
    assert in_flight.find(2) == (second, 0)
    in_flight.clear()
    with pytest.raises(KeyError):
        in_flight.find(2)


@pytest.mark.parametrize("count", [1, 3])
def test_a_single_batch_has_its_numbers_and_no_others(count):
    """The program of a schedule may have more micro-batches than a small batch."""
    entry = batch(count)
    alone = BatchesInFlight.alone(entry)
    assert alone.size == count
    for number in range(count):
        assert alone.find(number) == (entry, number)
    assert alone.find(count) is None
    assert alone.find(count + 1) is None
    assert alone.take(0) is entry


def test_a_batch_without_micro_batches_has_no_numbers():
    """Records of batches have none; a size of 0 would divide by it."""
    alone = BatchesInFlight.alone(Batch(0, [], None, [], "", training=True))
    assert alone.size == 1
    assert alone.find(0) is None
