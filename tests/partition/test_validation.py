"""Validation of costs and option values."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest

from penstock.errors import PartitionError
from penstock.partition.balanced import partition_balanced
from penstock.partition.block import block_partition
from penstock.partition.bottleneck import minimax
from penstock.partition.validation import (
    LARGEST_SUM,
    bytes_of,
    check_costs,
    check_number,
    in_flight_of,
    limits_of,
    links_of,
    numbers_of,
    refuse_unknown,
    rows_of,
    sums_of,
)

every_algorithm = pytest.mark.parametrize(
    "algorithm", [partition_balanced, block_partition, minimax]
)


@every_algorithm
@pytest.mark.parametrize("bad", [-1, math.nan, math.inf, -math.inf])
def test_a_cost_that_is_no_cost_is_refused_with_its_place(algorithm, bad):
    """One nan in a profile would otherwise make every cut equally good."""
    with pytest.raises(
        PartitionError, match=r"entry 1 is .*; costs must be finite and not negative"
    ):
        algorithm([1, bad, 2], 2)


@every_algorithm
def test_more_stages_than_costs_are_refused(algorithm):
    """The plain algorithms are used without the catalogue too."""
    with pytest.raises(PartitionError, match="cannot make 3 stages from 2 layers"):
        algorithm([1, 2], 3)


@every_algorithm
def test_numpy_and_plain_costs_are_cut_alike(algorithm):
    """Costs come out of arrays as often as out of lists."""
    costs = [3, 1, 4, 1, 5, 9, 2, 6]
    assert (
        algorithm(costs, 3)
        == algorithm(np.array(costs), 3)
        == algorithm(tuple(map(float, costs)), np.int32(3))
    )


@pytest.mark.parametrize(
    ("costs", "message"),
    [
        (["a"], "is not a list of numbers"),
        ([[1, 2], [3, 4]], "must be a flat list with one number per entry, not of shape (2, 2)"),
        ([[1], [3, 4]], "is not a list of numbers"),
        (7, "must be a flat list with one number per entry, not of shape ()"),
        ([1e308, 1e308], "the sum inf is above 1e+307"),
        ([1, 2, 3], "has 3 entries, but 2 are needed"),
        ([10**400, 1], "is not a list of numbers"),
    ],
)
def test_what_is_no_list_of_costs_is_refused(costs, message):
    """NumPy's own words for these name neither the option nor the remedy."""
    with pytest.raises(PartitionError, match=f"transfer: .*{re.escape(message)}"):
        check_costs(costs, "transfer", 2)


@pytest.mark.parametrize("value", [1, 2.5, np.float32(0.5), np.int64(3)])
def test_plain_numbers_pass_as_floats(value):
    """NumPy's numbers are plain numbers too."""
    assert check_number("x", value) == float(value)


@pytest.mark.parametrize("value", ["1 GB/s", None, True, np.True_, -1, 0, math.nan, [1]])
def test_what_is_no_number_above_zero_is_refused(value):
    """Quantities with units are parsed at the command line, not here."""
    with pytest.raises(PartitionError, match=r"speed is .*; it must be a plain number above 0"):
        check_number("speed", value)


def test_zero_passes_only_where_it_is_allowed():
    """A latency may be nothing, a bandwidth may not."""
    assert check_number("latency_s", 0, zero=True) == 0.0
    with pytest.raises(
        PartitionError, match=r"latency_s is -0.5; it must be a plain number 0 or more"
    ):
        check_number("latency_s", -0.5, zero=True)


@pytest.mark.parametrize(
    "limits",
    [[1.0], [1.0, 2.0, 3.0], [1.0, math.nan], [[1.0, 2.0]], ["1 GiB", 1], [10**400, 1], [None, 1j]],
)
def test_limits_are_one_number_for_each_holder(limits):
    """No sum of bytes is above NaN: it would be no limit."""
    with pytest.raises(
        PartitionError, match=r"limits: .* must be one number of bytes for each of 2"
    ):
        limits_of(limits, "limits", 2, "ranks")
    assert limits_of([1.0, math.inf], "limits", 2, "ranks").tolist() == [1.0, math.inf]


def test_both_ends_of_the_model_have_no_link_and_costs_are_free_by_default():
    """One cost per cut: a layer has a link before it only if another layer comes before."""
    assert links_of([1.0, 2.0], 3).tolist() == [0, 1, 2, 0]
    assert links_of(None, 3).tolist() == [0, 0, 0, 0]
    assert links_of([], 1).tolist() == [0, 0]
    for transfer in ([1.0], [1.0, 2.0, 3.0]):
        expected = rf"transfer: has {len(transfer)} entries, but 2 are needed"
        with pytest.raises(PartitionError, match=expected):
            links_of(transfer, 3)
    with pytest.raises(PartitionError, match="transfer: has 1 entries, but 0 are needed"):
        links_of([1.0], 1)
    assert bytes_of(None, "x", 2, 3).tolist() == [[0, 0, 0], [0, 0, 0]]
    assert bytes_of([1, 2, 3], "x", 2, 3).tolist() == [[1, 2, 3], [1, 2, 3]]
    with pytest.raises(PartitionError, match="x: has 3 entries, but 2 are needed"):
        bytes_of([1, 2, 3], "x", 2, 2)


def test_the_largest_sum_is_allowed_and_the_first_bad_entry_named():
    """Of several; -0.0 is 0."""
    assert check_costs([LARGEST_SUM, 0.0, -0.0]).sum() == LARGEST_SUM
    with pytest.raises(PartitionError, match=r"costs: the sum 1.1e\+307 is above 1e\+307"):
        check_costs([LARGEST_SUM, LARGEST_SUM / 10])
    with pytest.raises(PartitionError, match=r"costs: entry 2 is -3.0; costs must be finite"):
        check_costs([0, 1, -3, math.nan, -1])
    assert check_costs([], "x").shape == (0,)


def test_an_option_that_a_method_does_not_take_is_refused_with_those_that_it_takes():
    """Known ones are not named as unknown."""
    refuse_unknown("m", ["a", "b"], iter(["b", "a", "c"]))
    refuse_unknown("m", [], [])
    with pytest.raises(PartitionError) as caught:
        refuse_unknown("m", ["z", "a", "y"], iter(["b", "a"]))
    assert str(caught.value) == "m does not take z, y: it takes b, a"
    with pytest.raises(PartitionError) as caught:
        refuse_unknown("m", ["a"], ())
    assert str(caught.value) == "m does not take a: it takes no options"


def test_rows_are_one_for_all_stages_or_one_for_each():
    """A single row is repeated; the message names the row of a bad entry, of several rows."""
    assert numbers_of([1, 2], "x").dtype == np.float64
    assert rows_of(numbers_of([1, 2], "x"), "x", 3, 2).tolist() == [[1, 2]] * 3
    assert rows_of(numbers_of([[1, 2]], "x"), "x", 3, 2).tolist() == [[1, 2]] * 3
    assert rows_of(numbers_of([[1, 2], [3, 4]], "x"), "x", 2, 2).tolist() == [[1, 2], [3, 4]]
    assert sums_of(np.array([[1.0, 2.0], [4.0, 0.5]])).tolist() == [[0, 1, 3], [0, 4, 4.5]]
    with pytest.raises(PartitionError) as caught:
        rows_of(np.ones((2, 4)), "x", 3, 4)
    assert str(caught.value) == "x: has the shape (2, 4); it must be (4,) or (3, 4)"
    with pytest.raises(
        PartitionError, match=r"has the shape \(4, 4\); it must be \(4,\) or \(3, 4\)"
    ):
        rows_of(np.ones((4, 4)), "x", 3, 4)
    bad = np.array([[1.0, 2.0], [3.0, -1.0]])
    with pytest.raises(PartitionError, match=r"^x\[1\]: entry 1 is -1.0"):
        rows_of(bad, "x", 2, 2)
    with pytest.raises(PartitionError, match=r"^x: entry 1 is -1.0"):
        rows_of(bad[1], "x", 2, 2)
    with pytest.raises(PartitionError, match=r"^x: has 2 entries, but 3 are needed"):
        rows_of(bad[0], "x", 2, 3)
    for shape in ((1, 1, 1), ()):
        with pytest.raises(PartitionError, match=r"^x: has the shape \(.*one number per layer"):
            numbers_of(np.ones(shape), "x")
    with pytest.raises(
        PartitionError, match=r"^x: must be a list of numbers, or one list of equal"
    ):
        numbers_of([[1, 2], [3]], "x")


def test_one_micro_batch_is_in_flight_and_memory_unlimited_unless_told_otherwise():
    """A limit may be negative or infinite, a number in flight may not."""
    assert in_flight_of(None, 3).tolist() == [1, 1, 1]
    assert in_flight_of([0, 2.5], 2).tolist() == [0, 2.5]
    with pytest.raises(PartitionError, match="in_flight: has 1 entries, but 2 are needed"):
        in_flight_of([1.0], 2)
    with pytest.raises(PartitionError, match="in_flight: entry 0 is inf"):
        in_flight_of([math.inf], 1)
    assert limits_of(None, "limits", 2, "ranks").tolist() == [math.inf] * 2
    assert limits_of([-1, 0], "limits", 2, "ranks").tolist() == [-1, 0]
    with pytest.raises(PartitionError) as caught:
        limits_of([1], "memory", 3, "kinds")
    assert str(caught.value) == "memory: [1] must be one number of bytes for each of 3 kinds"
    assert check_number("bandwidth", math.inf) == math.inf
