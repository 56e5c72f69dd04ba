"""Reachability over ranks of several kinds, against sets of all states."""

from __future__ import annotations

from itertools import product

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.partition.reachability_loops import reach, reach_furthest


@st.composite
def problems(draw):
    """Ends that ranks of unlike kinds reach, which may be none, and cuts that are not allowed."""
    stages, kinds = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    layers = draw(st.integers(stages, 7))
    counts = draw(st.lists(st.integers(1, 3), min_size=kinds, max_size=kinds))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    far = rng.integers(-1, layers + 1, (kinds, stages, layers + 1))
    far = np.maximum(far, rng.integers(-1, 4, far.shape) + np.arange(layers + 1)).clip(-1, layers)
    free = (rng.random(layers + 1) < 0.8).astype(np.uint8)
    free[[0, layers]] = 1
    return far, free, np.array(counts)


def states(counts):
    """All counts of ranks used, in the order of their numbers: the last kind is the fastest."""
    return list(product(*(range(count + 1) for count in counts)))


def before(used):
    """The states with one rank less, and the kind of that rank."""
    for kind, number in enumerate(used):
        if number:
            yield kind, (*used[:kind], number - 1, *used[kind + 1 :])


@settings(max_examples=60)
@given(problems())
def test_a_layer_is_reached_exactly_if_the_ranks_reach_it_in_some_order(problem):
    """Every later stage keeps a layer, and no cut is where none is allowed."""
    far, free, counts = problem
    _, stages, size = far.shape
    reached = {(0,) * len(counts): {0}}
    complete = -1
    for number, used in enumerate(states(counts)):
        total = sum(used)
        if total == 0 or total > stages:
            continue
        most = size - 1 - (stages - total)
        reached[used] = {
            end
            for kind, earlier in before(used)
            for start in reached[earlier]
            for end in range(start + 1, min(far[kind, total - 1, start], most) + 1)
            if free[end]
        }
        if total == stages and size - 1 in reached[used]:
            complete = number
            break
    table = np.zeros((len(states(counts)), size), np.uint8)
    assert reach(far, free, counts, table) == complete
    for number, used in enumerate(states(counts)):
        assert set(np.flatnonzero(table[number])) == reached.get(used, set())


@settings(max_examples=60)
@given(problems())
def test_the_furthest_layer_is_that_of_the_best_last_rank(problem):
    """What no rank reaches stays at -1, and nothing is reached from there."""
    far, _, counts = problem
    _, stages, size = far.shape
    furthest = {(0,) * len(counts): 0}
    complete = -1
    for number, used in enumerate(states(counts)):
        total = sum(used)
        if total == 0 or total > stages:
            continue
        furthest[used] = max(
            (
                far[kind, total - 1, furthest[earlier]]
                for kind, earlier in before(used)
                if furthest[earlier] >= 0
            ),
            default=-1,
        )
        if total == stages and furthest[used] == size - 1:
            complete = number
            break
    table = np.full(len(states(counts)), -1)
    assert reach_furthest(far, counts, table) == complete
    assert table.tolist() == [furthest.get(used, -1) for used in states(counts)]
