"""Paths through tables of steps against all paths."""

from __future__ import annotations

from itertools import combinations, pairwise

import numpy as np
import pytest

from penstock.partition.stage_paths import least_bottleneck, least_sum, spans


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("longest", [2, 4, 6])
def test_the_least_maximum_and_the_least_sum_are_those_of_all_ways(seed, longest):
    """Tables of their own for every stage, with steps that cannot be, and no step longer than a
    table is wide.
    """
    rng = np.random.default_rng(seed)
    ends, starts, possible = spans(6, longest)
    tables = [
        np.where(possible & (rng.random(possible.shape) < 0.9), rng.random(possible.shape), np.inf)
        for _ in range(3)
    ]

    def step(stage, start, end):
        column = start - end + longest
        return tables[stage][end - 1, column] if column >= 0 else np.inf

    ways = [
        [step(stage, *edge) for stage, edge in enumerate(pairwise((0, *cut, 6)))]
        for cut in combinations(range(1, 6), 2)
    ]
    assert least_bottleneck(tables.__getitem__, 3, 6) == min(map(max, ways))
    best = min(map(sum, ways))
    if best < np.inf:
        edges = np.cumsum([0, *least_sum(tables.__getitem__, 3, 6)]).tolist()
        assert sum(
            step(stage, *edge) for stage, edge in enumerate(pairwise(edges))
        ) == pytest.approx(best)
    assert (ends - starts)[possible].max() == longest
