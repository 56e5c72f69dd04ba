"""The loops of the dynamic programs, each against all choices."""

from __future__ import annotations

from itertools import combinations, combinations_with_replacement, pairwise
from math import inf

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.partition.dp_loops import (
    Placed,
    RankLoads,
    Tables,
    fewest_ranks,
    fold,
    least_with,
    peel,
    share,
)

#: Whole numbers below 9: sums are exact, and bounds are often met exactly.
SEEDS = st.integers(0, 2**32)


def random_tables(rng, layers, ranks):
    """Seconds of every stage on every number of ranks, with limits or without."""
    shape = (layers + 1, layers + 1, ranks + 1)
    table = rng.integers(0, 9, shape).astype(float)
    none = np.empty((0, 0, 0), np.int64)
    return Tables(table, rng.integers(0, 6, shape) if rng.random() < 0.5 else none)


def choices(tables, bound, stage_count, first):
    """End and replicas of every stage that keeps bound and limits."""
    table, most_stages = tables
    ranks = table.shape[2] - 1
    for end in range(first + 1, table.shape[0]):
        for replicas in range(1, ranks + 1):
            place = first, end, replicas
            too_deep = most_stages.size and stage_count > most_stages[place]
            if table[place] <= bound and not too_deep:
                yield end, replicas


@settings(max_examples=40)
@given(SEEDS, st.integers(1, 5), st.integers(1, 4), st.integers(0, 3), st.booleans())
def test_fewest_ranks_are_those_of_the_best_first_stage(seed, layers, ranks, stage_count, in_place):
    """In place for any number of stages; else behind what was computed for one stage less."""
    rng = np.random.default_rng(seed)
    tables, bound = random_tables(rng, layers, ranks), float(rng.integers(2, 9))
    after = rng.integers(0, ranks + 2, layers + 1)
    if in_place:
        after[:] = ranks + 1
        after[-1] = 0
    expected = after.copy()
    for first in range(layers - 1, -1, -1):
        source = expected if in_place else after
        sums = [
            replicas + source[end]
            for end, replicas in choices(tables, bound, stage_count, first)
            if replicas + source[end] <= ranks
        ]
        expected[first] = min(sums, default=ranks + 1)
    output = after if in_place else after.copy()
    fewest_ranks(tables, bound, stage_count, after, output)
    assert output.tolist() == expected.tolist()


@settings(max_examples=40)
@given(SEEDS, st.integers(1, 5), st.integers(1, 4), st.integers(0, 3), st.booleans(), st.booleans())
def test_least_values_are_those_of_the_best_first_stage(
    seed, layers, ranks, stage_count, sums, in_place
):
    """Sums of seconds, or the slowest stage, for every number of ranks in total."""
    rng = np.random.default_rng(seed)
    tables, bound = random_tables(rng, layers, ranks), float(rng.integers(2, 9))
    after = rng.choice([0.0, 3.0, 5.0, inf], (layers + 1, ranks + 1))
    if in_place:
        after[:] = inf
        after[-1, 0] = 0.0
    expected = after.copy() if in_place else np.full_like(after, inf)
    for first in range(layers - 1, -1, -1):
        source = expected if in_place else after
        for end, replicas in choices(tables, bound, stage_count, first):
            seconds = tables.table[first, end, replicas]
            for used in range(replicas, ranks + 1):
                rest = source[end, used - replicas]
                value = seconds + rest if sums else max(seconds, rest)
                expected[first, used] = min(expected[first, used], value)
    output = after if in_place else np.full_like(after, inf)
    least_with(tables, bound, stage_count, sums, after, output)
    assert output.tolist() == expected.tolist()


def random_placed(rng, stages, ranks, layers):
    """Prefix sums of whole numbers, unlike for every stage."""

    def prefix_sums():
        rows = rng.integers(0, 5, (stages, layers))
        return np.concatenate([np.zeros((stages, 1)), np.cumsum(rows, axis=1)], axis=1)

    # In half of the cases links are often the busiest.
    links = rng.integers(0, 5, layers + 1) * rng.choice([1.0, 3.0])
    return Placed(prefix_sums(), prefix_sums(), links, rng.integers(3, 16, ranks).astype(float))


def keeps_bounds(placed, ends, bound, largest, with_links):
    """Whether a V with these ends keeps all bounds: stage by stage."""
    ranks, stages = len(placed.limits), 2 * len(placed.limits)
    edges = list(pairwise([0, *ends]))
    loads = [row[b] - row[a] for row, (a, b) in zip(placed.seconds, edges, strict=True)]
    sizes = [row[b] - row[a] for row, (a, b) in zip(placed.memory, edges, strict=True)]
    if max(loads) > largest:
        return False
    for rank in range(ranks):
        partner = stages - 1 - rank
        if loads[rank] + loads[partner] > bound:
            return False
        if sizes[rank] + sizes[partner] > placed.limits[rank]:
            return False
        crossing = placed.links[ends[rank]] + placed.links[ends[partner - 1]]
        if with_links and rank < ranks - 1 and crossing > bound:
            return False
    return True


def tight_bounds(rng, placed, ends):
    """The limits, the bound and the largest stage with which a V just keeps them, or just not."""
    ranks, edges = len(placed.limits), np.array([0, *ends])
    stages = np.arange(2 * ranks)
    loads = placed.seconds[stages, edges[1:]] - placed.seconds[stages, edges[:-1]]
    sizes = placed.memory[stages, edges[1:]] - placed.memory[stages, edges[:-1]]
    limits = sizes[:ranks] + sizes[: ranks - 1 : -1] + rng.integers(-1, 4, ranks)
    crossings = placed.links[edges[1:ranks]] + placed.links[edges[-2:ranks:-1]]
    busiest = max(*(loads[:ranks] + loads[: ranks - 1 : -1]), *crossings, 0.0)
    return limits, busiest - rng.integers(0, 2), loads.max() - rng.integers(-1, 2)


@settings(max_examples=100)
@given(SEEDS, st.integers(1, 3), st.integers(0, 2))
def test_a_v_within_bounds_is_recognised_whether_stages_may_be_empty_or_not(seed, ranks, spare):
    """`peel` ignores links and allows empty stages; `fold` does neither."""
    rng = np.random.default_rng(seed)
    layers, stages = 2 * ranks + spare, 2 * ranks
    placed = random_placed(rng, stages, ranks, layers)
    cut = sorted(rng.choice(np.arange(1, layers), stages - 1, replace=False).tolist())
    limits, bound, largest = tight_bounds(rng, placed, [*cut, layers])
    placed = placed._replace(limits=limits)
    loose = combinations_with_replacement(range(layers + 1), stages - 1)
    possible = any(
        keeps_bounds(placed, (*cuts, layers), bound, largest, with_links=False) for cuts in loose
    )
    work = np.empty((2, layers + 1), np.int64)
    assert bool(peel(placed, bound, largest, work[0], work[1])) == possible
    strict = [
        (*cuts, layers)
        for cuts in combinations(range(1, layers), stages - 1)
        if keeps_bounds(placed, (*cuts, layers), bound, largest, with_links=True)
    ]
    fastest = np.concatenate([[0], np.cumsum(np.diff(placed.seconds, axis=1).min(axis=0))])
    reached = np.zeros((ranks + 1, layers + 1, layers + 1), np.uint8)
    is_possible = fold(placed, fastest, bound, largest, np.empty(layers + 1, np.int64), reached)
    assert bool(is_possible) == bool(strict)
    innermost = {ends[ranks - 1] for ends in strict}
    assert set(np.flatnonzero(np.diagonal(reached[-1]))) == innermost


def test_a_v_of_equal_stages_keeps_bounds_that_no_other_v_keeps():
    """Rank 0 must have two layers in front: with one, the layers that are left exceed rank 1."""
    ones = np.tile(np.arange(9.0), (4, 1))
    placed = Placed(ones, np.zeros((4, 9)), np.zeros(9), np.zeros(2))
    for bound, largest, exists in ((4.0, 2.0, True), (4.0, 1.5, False), (3.5, 2.0, False)):
        work, reached = np.empty((2, 9), np.int64), np.zeros((3, 9, 9), np.uint8)
        assert bool(peel(placed, bound, largest, work[0], work[1])) == exists
        assert bool(fold(placed, ones[0], bound, largest, work[0], reached)) == exists
        assert np.flatnonzero(np.diagonal(reached[-1])).tolist() == [4] * exists


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_bounds_of_a_v_count_for_every_rank_and_not_for_all_ranks_inside_together(ranks):
    """Ranks of equal layers, of which each can compute four; wide bounds exclude nothing."""
    layers = 4 * ranks
    ones = np.tile(np.arange(layers + 1.0), (2 * ranks, 1))
    free = np.zeros(layers + 1)
    placed = Placed(ones, np.zeros_like(ones), free, np.zeros(ranks))
    for bound, largest, exists in ((4.0, 2.0, True), (3.5, 2.0, False), (99.0, 99.0, True)):
        work = np.empty((2, layers + 1), np.int64)
        reached = np.zeros((ranks + 1, layers + 1, layers + 1), np.uint8)
        assert bool(peel(placed, bound, largest, work[0], work[1])) == exists
        assert bool(fold(placed, ones[0], bound, largest, work[0], reached)) == exists
        middles = np.flatnonzero(np.diagonal(reached[-1])).tolist()
        everywhere = list(range(ranks, layers - ranks + 1))
        assert middles == (everywhere if bound == 99 else [2 * ranks] * exists)


@settings(max_examples=100)
@given(
    SEEDS, st.integers(1, 4), st.integers(0, 3), st.sampled_from([(0, 0), (1, 0), (0, 2), (2, 3)])
)
def test_a_window_is_shared_as_well_as_its_best_cut(seed, stages, spare, weights):
    """Ranks have loads from outside, a link within a rank costs nothing, and bounds hold."""
    rng = np.random.default_rng(seed)
    first, size = int(rng.integers(0, 3)), stages + spare
    layers, last = first + size + int(rng.integers(0, 2)), first + size
    placed = random_placed(rng, stages, stages, layers)
    others = RankLoads(*(rng.integers(0, 4, stages).astype(float) for _ in range(3)))
    others.links[rng.random(stages) < 0.3] = -inf
    inner = rng.choice(np.arange(first + 1, last), stages - 1, replace=False)
    edges = list(pairwise([first, *np.sort(inner).tolist(), last]))
    unlimited = placed._replace(limits=np.full(stages, inf))
    # A bound that some cut keeps exactly, or just not.
    bound = value_of(unlimited, others, edges, (0, 0, inf), stages) - rng.integers(-1, 2)
    best = {}
    for count in range(1, stages + 1):
        for cuts in combinations(range(first + 1, last), count):
            edges = list(pairwise([first, *cuts]))
            value = value_of(placed, others, edges, (*weights, bound), stages)
            if last - cuts[-1] >= stages - count:
                best[count, cuts[-1]] = min(best.get((count, cuts[-1]), inf), value)
        for cuts in combinations(range(first + 1, last), count - 1):
            if count == stages:
                edges = list(pairwise([first, *cuts, last]))
                value = value_of(placed, others, edges, (*weights, bound), stages)
                best[count, last] = min(best.get((count, last), inf), value)
    values = np.full((stages + 1, layers + 1), inf)
    cuts = np.zeros((stages + 1, layers + 1), np.int64)
    share(placed, others, (first, last), (*weights, bound), values, cuts)
    for (count, end), value in best.items():
        assert values[count, end] == pytest.approx(value)
    if values[stages, last] < inf:
        edges, end = [], last
        for count in range(stages, 0, -1):
            edges.insert(0, (int(cuts[count, end]), end))
            end = int(cuts[count, end])
        value = value_of(placed, others, edges, (*weights, bound), stages)
        assert (end, value) == (first, pytest.approx(values[stages, last]))


def value_of(placed, others, edges, goal, stages):
    """The value of the first stages of a window with these edges; infinite beyond a bound."""
    rank_weight, stage_weight, bound = goal
    value = 0.0
    for stage, (start, end) in enumerate(edges):
        load = placed.seconds[stage, end] - placed.seconds[stage, start]
        size = placed.memory[stage, end] - placed.memory[stage, start]
        rank_load = others.seconds[stage] + load
        link_load = others.links[stage] + placed.links[end] if stage < stages - 1 else 0.0
        if max(rank_load, link_load) > bound or others.memory[stage] + size > placed.limits[stage]:
            return inf
        if rank_weight == stage_weight == 0:
            value = max(value, rank_load, link_load)
        else:
            value += rank_weight * rank_load**2 + stage_weight * load**2
    return value
