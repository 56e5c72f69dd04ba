"""Costs as arrays: every form of a field, its defaults, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import SettingError
from penstock.simulate.cost_arrays import Amounts
from penstock.simulate.costs import Costs

STAGES, NUMBERS = 3, (4, 5)


def entry(array, vector, stage, column):
    """The value of one vector, stage and micro-batch: an axis of length 1 holds for all."""
    index = zip((vector, stage, column), array.shape, strict=True)
    return array[tuple(place if length > 1 else 0 for place, length in index)]


def meaning(value, stage, column):
    """The number that a field of `Costs` has for one stage or boundary, and micro-batch."""
    if callable(value):
        return value(stage, NUMBERS[column])
    if not isinstance(value, tuple):
        return value
    return value[stage][column] if isinstance(value[stage], tuple) else value[stage]


def fields(count):
    """Every form of a field: a number, one per stage, lists among them, and a function."""
    number = st.floats(0.5, 9.0)
    pair = st.tuples(number, number)
    return st.one_of(
        number,
        st.tuples(*[number] * count),
        st.tuples(*[pair] * count),
        st.tuples(*[st.one_of(number, pair)] * count),
        number.map(lambda factor: lambda stage, number: factor * (10 * stage + number)),
    )


@settings(max_examples=30)
@given(st.lists(st.tuples(fields(STAGES), fields(STAGES - 1)), min_size=1, max_size=3))
def test_each_form_of_a_field_gives_its_value_at_every_stage_boundary_and_micro_batch(rows):
    """Vectors of unlike forms stand in one array; one vector alone has its own values."""
    costs = [Costs(forward=forward, transfer=transfer) for forward, transfer in rows]
    amounts = Amounts.of(costs, STAGES, NUMBERS)
    assert (amounts.vectors, amounts.stages) == (len(rows), STAGES)
    for name, count in (("forward", STAGES), ("transfer", STAGES - 1)):
        places = product(range(len(rows)), range(count), range(len(NUMBERS)))
        for vector, stage, column in places:
            expected = meaning(getattr(costs[vector], name), stage, column)
            assert entry(amounts.get(name), vector, stage, column) == expected
            alone = amounts.vector(vector)
            assert alone.vectors == 1
            assert entry(alone.get(name), 0, stage, column) == expected
    differs = any(
        callable(value) or (isinstance(value, tuple) and any(isinstance(e, tuple) for e in value))
        for row in rows
        for value in row
    )
    assert amounts.by_micro_batch == differs
    assert amounts.get("offload") is None
    assert amounts.get_or("offload", 7.0).tolist() == [[[7.0]]]
    assert amounts.get_or("forward", 7.0) is amounts.get("forward")


@pytest.mark.parametrize(
    ("given_fields", "expected"),
    [
        ({}, (8, 4, 4)),
        ({"backward": 5.0}, (5, 2.5, 2.5)),
        ({"input_grad": 3.0}, (8, 3, 5)),
        ({"weight_grad": 3.0}, (8, 5, 3)),
        ({"input_grad": 3.0, "weight_grad": 2.0}, (5, 3, 2)),
        ({"backward": 6.0, "input_grad": 1.0}, (6, 1, 5)),
        ({"backward": 6.0, "weight_grad": 1.0}, (6, 5, 1)),
        ({"backward": 6.0, "input_grad": 7.0}, (6, 7, 0)),
        ({"backward": 6.0, "weight_grad": 7.0}, (6, 0, 7)),
        ({"backward": 6.0, "input_grad": 4.0, "weight_grad": 3.0}, (6, 4, 3)),
    ],
)
def test_parts_of_a_backward_that_are_not_given_follow_from_the_others(given_fields, expected):
    """As the docstring of `Costs` says; a difference is never below 0."""
    amounts = Amounts.of([Costs(forward=4.0, **given_fields)], 1, (0,))
    forward, *backward = (array.item() for array in amounts.work())
    assert (forward, *backward) == (4.0, *expected)


def test_work_needs_forward_and_links_one_way_to_give_their_seconds():
    """Arrays have a forward of 1 by default; amounts without one are refused."""
    with pytest.raises(SettingError, match="forward is needed"):
        replace(Amounts.of([Costs()], 1, (0,)), arrays={}).work()
    for both in ({"bandwidth": 2.0}, {"latency": 0.0}):
        with pytest.raises(SettingError, match="transfer and latency or bandwidth both set"):
            Amounts.batched({"transfer": 1.0, **both}, 2, (0,)).crossing()
    with pytest.raises(SettingError, match="bandwidth is 0 bytes/s at a boundary"):
        Amounts.batched({"bandwidth": np.array([[1.0, 0.0]])}, 3, (0,)).crossing()


def test_a_message_takes_its_bytes_over_the_bandwidth_both_ways_unless_told_otherwise():
    """Latency is added later, since it does not shrink with a slice."""

    def crossing(**fields):
        up, down = Amounts.of([Costs(**fields)], 2, (0,)).crossing()
        return up.item(), down.item()

    assert crossing() == (0, 0)
    assert crossing(boundary_bytes=6.0) == (0, 0)
    assert crossing(boundary_bytes=6.0, bandwidth=2.0, latency=1.0) == (3, 3)
    assert crossing(transfer=3.0) == (3, 3)
    assert crossing(transfer=3.0, transfer_back=2.0) == (3, 2)
    assert crossing(transfer_back=2.0) == (0, 2)


def test_arrays_of_vectors_take_the_axes_that_they_have():
    """A single number is for all vectors, a first axis for each its own."""
    rng = np.random.default_rng(0)
    given_arrays = {
        "update": 2.0,
        "forward": rng.random((5, STAGES, 2)),
        "transfer": rng.random((5, STAGES - 1)),
        "backward": rng.random(5),
    }
    amounts = Amounts.batched(given_arrays, STAGES, NUMBERS)
    assert (amounts.vectors, amounts.stages) == (5, STAGES)
    for name, field in given_arrays.items():
        array = np.asarray(field)
        for place in product(range(5), range(2), range(2)):
            expected = array[place[: array.ndim]]
            assert entry(amounts.get(name), *place) == expected
    alone = Amounts.batched({"update": 2.0}, STAGES, NUMBERS)
    assert (alone.vectors, alone.get("forward").item()) == (1, 1.0)
    small = Amounts.batched({"forward": np.array([200], np.uint8)}, STAGES, NUMBERS)
    assert [array.item() for array in small.work()] == [200, 400, 200, 200], "2 x 200 is no uint8"


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"forwards": 1.0}, "there is no 'forwards'; there are forward, backward"),
        ({"forward": np.ones((2, 3)), "update": np.ones(3)}, "update has 3 vectors, .* have 2"),
        ({"forward": np.ones((2, 2))}, r"forward has shape \(2, 2\); .* \(vectors, 3\) or"),
        ({"transfer": np.ones((2, 3))}, r"transfer has shape \(2, 3\); .* \(vectors, 2\) or"),
        ({"forward": np.ones((2, 3, 3))}, r"has shape \(2, 3, 3\); .* \(vectors, 3, 2\)"),
        ({"forward": np.array([1.0, -0.5])}, "forward has .*-0.5.*finite and not negative"),
        ({"forward": np.array([1.0, np.inf])}, "forward has .*inf.*finite and not negative"),
        ({"forward": np.array([1.0, np.nan])}, "forward has .*nan.*finite and not negative"),
    ],
)
def test_arrays_of_a_wrong_name_shape_or_value_are_refused(arrays, message):
    """NaN and infinity would make every comparison of a search false."""
    with pytest.raises(SettingError, match=message):
        Amounts.batched(arrays, STAGES, NUMBERS)


def test_entries_of_a_wrong_number_are_refused_with_both_numbers():
    """A boundary has one entry less than stages; a list one per micro-batch."""
    with pytest.raises(SettingError, match="forward has 2 entries, the schedule needs 3"):
        Amounts.of([Costs(forward=(1.0, 2.0))], 3, (0,))
    with pytest.raises(SettingError, match="transfer has 3 entries, the schedule needs 2"):
        Amounts.of([Costs(transfer=(1.0, 2.0, 3.0))], 3, (0,))
    with pytest.raises(
        SettingError, match="forward of stage 1 has 3 entries, but the schedule has 2 micro-batches"
    ):
        Amounts.of([Costs(forward=((1.0, 2.0), (1.0, 2.0, 3.0)))], 2, (0, 1))
    with pytest.raises(
        SettingError, match=r"forward of stage 0 has 1 entries, but .* 2 micro-batch"
    ):
        Amounts.of([Costs(forward=((1.0,), (1.0, 2.0)))], 2, (0, 1))
    with pytest.raises(SettingError, match="forward of stage 1, micro-batch 5"):
        Amounts.of([Costs(forward=lambda stage, number: 4.5 - number * stage)], 2, NUMBERS)
    assert Amounts.of([Costs(transfer=())], 1, (0,)).get("transfer").shape == (1, 0, 1)


def test_a_single_stage_or_boundary_may_differ_by_micro_batch():
    """Then no entry stands for all micro-batches."""
    for fields in ({"forward": ((1.0, 2.0),)}, {"forward": lambda stage, number: number}):
        assert Amounts.of([Costs(**fields)], 1, NUMBERS).by_micro_batch
    amounts = Amounts.of([Costs(transfer=((1.0, 2.0),))], 2, NUMBERS)
    assert amounts.by_micro_batch
    assert amounts.get("transfer").tolist() == [[[1.0, 2.0]]]
    assert not Amounts.of([Costs(forward=(1.0,))], 1, NUMBERS).by_micro_batch


def test_arrays_without_any_vector_are_no_vector():
    """A search may have nothing left to try."""
    amounts = Amounts.batched({"forward": np.empty((0, STAGES)), "update": 1.0}, STAGES, NUMBERS)
    assert (amounts.vectors, amounts.get("forward").shape) == (0, (0, STAGES, 1))
