"""Searches over stages on several ranks, on small tables against all ways."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.partition.test_replicated import every_way, spans, times

from penstock.errors import PartitionError
from penstock.partition.replica_search import chain_of, seconds_of


def random_chain(rng, layers, ranks):
    """Whole numbers, some stages impossible, with limits on what comes after, or without."""
    shape = (layers + 1, layers + 1, ranks + 1)
    table = rng.choice([1.0, 2.0, 3.0, 4.0, 6.0, 9.0, np.inf], shape)
    return chain_of(table, rng.integers(1, 6, shape) if rng.random() < 0.4 else None)


def ways_of(chain, stages, *, exactly):
    """All ways that the limits allow, with their slowest stage, and the sum of seconds."""
    for way in every_way(chain.layers, chain.ranks):
        used = sum(replicas for _, replicas in way)
        if stages not in (None, len(way)) or (exactly and used != chain.ranks):
            continue
        keeps_depth = not chain.most_stages.size or all(
            chain.most_stages[first, end, replicas] >= after
            for first, end, replicas, after in spans(way)
        )
        seconds = times(chain.table, way)
        if keeps_depth and max(seconds) < np.inf:
            yield way, max(seconds), sum(seconds)


CASES = st.tuples(
    st.integers(0, 2**32), st.integers(1, 4), st.integers(1, 4), st.none() | st.integers(1, 4)
)


@settings(max_examples=60)
@given(CASES)
def test_the_least_bound_is_that_of_the_best_way_and_its_stages_keep_it(case):
    """One or any number of stages; impossible is said so."""
    seed, layers, ranks, stages = case
    chain = random_chain(np.random.default_rng(seed), layers, ranks)
    stages = None if stages is None else min(stages, layers)
    ways = list(ways_of(chain, stages, exactly=False))
    result = chain.search(stages)
    if not ways:
        assert result is None
        return
    bound, best_way = result
    assert bound == min(slowest for _, slowest, _ in ways)
    assert (best_way, bound) in [(way, slowest) for way, slowest, _ in ways]
    assert (
        chain.seconds(best_way) == seconds_of(chain.table, best_way) == times(chain.table, best_way)
    )
    assert chain.suffices(bound, stages)
    assert not chain.suffices(np.nextafter(bound, -1), stages)


@settings(max_examples=60)
@given(CASES, st.booleans(), st.booleans())
def test_the_least_sum_or_maximum_within_a_bound_is_that_of_the_best_way(case, sums, exactly):
    """Whether all ranks must be used, or fewer may be."""
    seed, layers, ranks, stages = case
    rng = np.random.default_rng(seed)
    chain, bound = random_chain(rng, layers, ranks), float(rng.choice([3.0, 6.0, 9.0]))
    stages = None if stages is None else min(stages, layers)
    ways = [
        (way, total if sums else slowest)
        for way, slowest, total in ways_of(chain, stages, exactly=exactly)
        if slowest <= bound
    ]
    best_way = chain.least(bound=bound, sums=sums, stages=stages, exactly=exactly)
    if not ways:
        assert best_way is None
        return
    assert (best_way, min(value for _, value in ways)) in ways


@settings(max_examples=40)
@given(st.integers(0, 2**32), st.integers(1, 4), st.integers(1, 4))
def test_ranks_that_are_left_make_the_stages_of_a_cut_as_even_as_possible(seed, layers, ranks):
    """All of them are used, within the bound and the limits, or it is said to be impossible."""
    rng = np.random.default_rng(seed)
    chain, bound = random_chain(rng, layers, ranks), float(rng.choice([4.0, 9.0]))
    for way, *_ in list(ways_of(chain, None, exactly=False))[:3]:
        lengths = [length for length, _ in way]
        squares = {
            tuple(other): sum(second**2 for second in times(chain.table, other))
            for other, *_ in ways_of(chain, None, exactly=True)
            if [length for length, _ in other] == lengths
            and max(times(chain.table, other)) <= bound
        }
        best_way = chain.spread_ranks(way, bound)
        if not squares:
            assert best_way is None
        else:
            assert squares[tuple(best_way)] == pytest.approx(min(squares.values()))


def test_a_depth_is_exceeded_only_by_more_stages_than_the_limit():
    """The stage itself counts."""
    shape = (3, 3, 3)
    table, most = np.ones(shape), np.full(shape, 2)
    most[0, 1, 1] = 1
    chain = chain_of(table, most)
    assert chain.exceeds_depth([(1, 1), (1, 1)])
    assert not chain.exceeds_depth([(1, 2), (1, 1)])
    assert not chain.exceeds_depth([(2, 1)])
    assert not chain.without_depth().exceeds_depth([(1, 1), (1, 1)])
    assert chain.below(2).table[0, 1, 1] == np.inf
    assert chain.below(1).table[0, 1, 1] == 1
    assert chain.without_depth().below(9).table is chain.table


@pytest.mark.parametrize(
    ("shape", "entry", "arguments", "message"),
    [
        ((3, 2, 2), None, {}, r"table: has the shape \(3, 2, 2\)"),
        ((3, 3), None, {}, r"table: has the shape \(3, 3\)"),
        ((3, 3, 1), None, {}, r"table: has the shape \(3, 3, 1\)"),
        ((3, 3, 2), ((1, 2, 1), -1.0), {}, r"entry \[1, 2, 1\] is -1.0; .* 0 or more"),
        ((3, 3, 2), ((0, 2, 1), np.nan), {}, r"entry \[0, 2, 1\] is nan"),
        ((3, 3, 2), ((2, 1, 1), np.nan), {}, None),
        ((3, 3, 2), ((0, 1, 0), -1.0), {}, None),
        ((1, 1, 2), None, {}, r"table: has the shape \(1, 1, 2\)"),
        (
            (3, 3, 2),
            None,
            {"most_stages": np.ones((3, 3, 3))},
            r"most_stages: has the shape \(3, 3, 3\), and the table \(3, 3, 2\)",
        ),
        (
            (3, 3, 2),
            None,
            {"most_stages": np.ones((2, 2))},
            r"most_stages: has the shape \(2, 2\), and the table \(3, 3, 2\)",
        ),
    ],
)
def test_tables_that_make_no_sense_are_refused_and_unused_entries_ignored(
    shape, entry, arguments, message
):
    """Entries of no stage, backwards or on no rank, may be anything."""
    table = np.ones(shape)
    if entry is not None:
        table[entry[0]] = entry[1]
    limits = {"most_stages": None} | arguments
    if message is None:
        assert chain_of(table, **limits).layers == 2
        return
    with pytest.raises(PartitionError, match=message):
        chain_of(table, **limits)


@pytest.mark.parametrize("limited", [True, False])
def test_every_search_is_exact_where_limits_on_later_stages_bind(limited):
    """Columns of no rank are attractive and must not be read; many seconds are equal, or 0."""
    for seed in range(25):
        rng = np.random.default_rng(seed)
        layers, ranks = int(rng.integers(2, 5)), int(rng.integers(1, 4))
        shape = (layers + 1, layers + 1, ranks + 1)
        table = rng.choice([0.0, 1.0, 2.0, 3.0, 5.0, np.inf], shape)
        table[:, :, 0] = 0.0
        chain = chain_of(table, rng.integers(1, 4, shape) if limited else None)
        ways = list(ways_of(chain, None, exactly=False))
        result = chain.search(None)
        assert (result is None) == (not ways)
        if result is not None:
            assert result[0] == min(slowest for _, slowest, _ in ways)
            assert result in [(slowest, way) for way, slowest, _ in ways]
        for sums in (True, False):
            for bound in (2.0, 9.0):
                values = {
                    tuple(way): total if sums else slowest
                    for way, slowest, total in ways
                    if slowest <= bound
                }
                best_way = chain.least(bound=bound, sums=sums, stages=None, exactly=False)
                if values:
                    assert values[tuple(best_way)] == min(values.values())
                else:
                    assert best_way is None


def test_bounds_that_differ_by_little_are_told_apart():
    """Halving the range of all bounds leaves both of them."""
    table = np.full((3, 3, 2), np.inf)
    table[0, 1, 1], table[1, 2, 1], table[0, 2, 1] = 1.0, 1.0, 1.0 + 1e-9
    assert chain_of(table, None).search(1) == (1.0 + 1e-9, [(2, 1)])


def test_of_stages_that_keep_the_bound_on_as_few_ranks_the_fastest_is_taken():
    """The last stage has 3 s either way, and the first 3 s or 1 s."""
    table = np.full((4, 4, 3), np.inf)
    table[0, 1, 1], table[1, 3, 1] = 3.0, 3.0
    table[0, 2, 1], table[2, 3, 1] = 1.0, 3.0
    assert chain_of(table, None).search(2) == (3.0, [(2, 1), (1, 1)])


def test_a_stage_of_every_layer_is_possible_under_limits():
    """The most stages that there can be."""
    table = np.full((4, 4, 4), np.inf)
    for layer in range(3):
        table[layer, layer + 1, 1] = 1.0
    chain = chain_of(table, np.full(table.shape, 3))
    expected = [(1, 1)] * 3
    assert chain.search(None) == (1.0, expected)
    for sums in (True, False):
        assert chain.least(bound=1.0, sums=sums, stages=None, exactly=True) == expected
    tight = chain_of(table, np.full(table.shape, 2))
    assert tight.search(None) is None
    assert tight.least(bound=1.0, sums=True, stages=None, exactly=True) is None


def test_seconds_of_any_magnitude_can_be_spread():
    """Squares of large numbers would leave the range of floats."""
    table = np.full((3, 3, 4), 4.0)
    table[:, :, 2:] = 2.0
    for unit in (1e-200, 1.0, 1e200):
        assert chain_of(table * unit, None).spread_ranks([(1, 1), (1, 1)], 4.0 * unit) in (
            [(1, 2), (1, 1)],
            [(1, 1), (1, 2)],
        )
