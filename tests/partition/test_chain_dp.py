"""The dynamic program over a chain against all cuts."""

from __future__ import annotations

from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.partition.chain_dp import MAXIMUM, RANGE, SUM, at_starts, best_cut, stage_sums

VALUES = {MAXIMUM: max, SUM: sum, RANGE: lambda costs: max(costs) - min(costs)}


@st.composite
def chains(draw):
    """Layers, and per stage a table of few numbers, many of them equal or infinite."""
    layers = draw(st.integers(1, 7))
    stages = draw(st.integers(1, layers))
    cost = st.sampled_from([0.0, 1.0, 2.0, 2.5, 4.0, np.inf])
    tables = []
    for _ in range(stages):
        longest = draw(st.integers(1, layers))
        rows = draw(st.sampled_from([1, layers]))
        entries = draw(st.lists(cost, min_size=rows * longest, max_size=rows * longest))
        tables.append(np.array(entries).reshape(rows, longest))
    return layers, tables


def costs_of(tables, lengths):
    """The stages' costs of a cut; infinite where a stage has too many layers."""
    costs, end = [], 0
    for table, length in zip(tables, lengths, strict=True):
        end += length
        row = table[end - 1 if len(table) > 1 else 0]
        costs.append(row[len(row) - length] if length <= len(row) else np.inf)
    return costs


def all_cuts(layers, stages):
    """The lengths of the stages of all cuts."""
    for inner in combinations(range(1, layers), stages - 1):
        yield [stop - start for start, stop in pairwise((0, *inner, layers))]


@pytest.mark.parametrize("objective", [MAXIMUM, SUM], ids=["maximum", "sum"])
@settings(deadline=None)
@given(chains())
def test_the_cut_is_the_best_of_all(objective, chain):
    """Each stage has costs and a longest length of its own, and some cuts are impossible."""
    layers, tables = chain
    value = VALUES[objective]
    least = min(value(costs_of(tables, cut)) for cut in all_cuts(layers, len(tables)))
    cut = best_cut(tables.__getitem__, len(tables), layers, objective)
    assert cut.value == least
    assert bool(cut.lengths) == (least < np.inf)
    if cut.lengths:
        assert sum(cut.lengths) == layers
        assert value(costs_of(tables, cut.lengths)) == least


@settings(deadline=None)
@given(chains())
def test_the_range_is_that_of_the_cut_and_of_two_stages_the_least(chain):
    """The best prefixes do not always lead to the best cut, but a single stage is one prefix."""
    layers, tables = chain
    cut = best_cut(tables.__getitem__, len(tables), layers, RANGE)
    if cut.lengths:
        assert cut.value == VALUES[RANGE](costs_of(tables, cut.lengths))
    if len(tables) <= 2:
        costs = [costs_of(tables, lengths) for lengths in all_cuts(layers, len(tables))]
        ranges = [max(c) - min(c) if max(c) < np.inf else np.inf for c in costs]
        assert cut.value == min(ranges)


@pytest.mark.parametrize(("longest_last", "lengths"), [(True, [1, 1, 3]), (False, [3, 1, 1])])
def test_of_equal_cuts_the_rule_for_ties_takes_the_longest_or_the_shortest_last_stage(
    longest_last, lengths
):
    """Plans must not depend on the order in which a loop happens to run."""
    table = np.zeros((5, 5))
    assert best_cut(lambda _: table, 3, 5, SUM, longest_last=longest_last).lengths == lengths


def test_tables_are_built_from_numbers_at_the_boundaries():
    """Row: the end of the stage. Column: its start; outside of the chain 0 stands in."""
    prefix = np.array([0.0, 1.0, 3.0, 7.0])
    np.testing.assert_array_equal(at_starts(prefix, 2), [[0, 0], [0, 1], [1, 3]])
    np.testing.assert_array_equal(at_starts(prefix, 2, 9.0), [[9, 0], [0, 1], [1, 3]])
    np.testing.assert_array_equal(stage_sums(prefix, 2), [[1, 1], [3, 2], [6, 4]])
