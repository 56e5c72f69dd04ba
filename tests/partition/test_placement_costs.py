"""Costs of several stages per rank, and the choice among cuts, layer by layer."""

from __future__ import annotations

import random
from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import PartitionError
from penstock.partition.placement_costs import placement

SHAPES = ([0, 1, 2, 2, 1, 0], [0, 1, 0, 1], [0, 0], [0, 1, 2, 0, 1, 2], [0], [0, 2, 1, 0])


def random_options(rng, ranks, stages, layers):
    """Whole numbers: sums are exact, and often equal a limit."""

    def costs():
        rows = [[rng.randint(0, 9) for _ in range(layers)] for _ in range(ranks)]
        return rows if rng.random() < 0.5 else rows[0]

    options = {"slack": rng.choice([0.0, 0.25])}
    if rng.random() < 0.7:
        options["transfer"] = [rng.randint(0, 30) for _ in range(layers - 1)]
    if rng.random() < 0.7:
        options["fixed_bytes"] = costs()
    if rng.random() < 0.7:
        options |= {"saved_bytes": costs(), "in_flight": [rng.randint(0, 3) for _ in range(stages)]}
    options["limits"] = [rng.randint(5, 60) for _ in range(ranks)]
    return costs(), options


def cost(rows, rank, layer):
    """The cost of a layer: of all ranks, or of this one."""
    if rows is None:
        return 0
    return rows[rank][layer] if isinstance(rows[0], list) else rows[layer]


@settings(max_examples=50)
@given(st.integers(0, 2**32), st.sampled_from(SHAPES), st.integers(0, 3))
def test_figures_of_a_cut_are_sums_over_its_layers_and_the_best_is_the_evenest(seed, shape, spare):
    """Of stages, ranks and links; of cuts within the slack the one whose largest stage is least."""
    rng = random.Random(seed)
    stages, ranks, layers = len(shape), max(shape) + 1, len(shape) + spare
    seconds, options = random_options(rng, ranks, stages, layers)
    chain = placement(seconds, shape, options)
    assert (chain.stages, chain.ranks, chain.layers) == (stages, ranks, layers)
    figures = []
    cuts = [(*inner, layers) for inner in combinations(range(1, layers), stages - 1)]
    for ends in cuts:
        busy, sizes, links, largest = [0] * ranks, [0] * ranks, {}, 0
        for stage, (start, end) in enumerate(pairwise([0, *ends])):
            rank = shape[stage]
            stage_s = sum(cost(seconds, rank, layer) for layer in range(start, end))
            busy[rank] += stage_s
            largest = max(largest, stage_s)
            in_flight = options.get("in_flight", [1] * stages)[stage]
            for layer in range(start, end):
                sizes[rank] += cost(options.get("fixed_bytes"), rank, layer)
                sizes[rank] += in_flight * cost(options.get("saved_bytes"), rank, layer)
            if stage < stages - 1 and shape[stage + 1] != rank and "transfer" in options:
                pair = frozenset((rank, shape[stage + 1]))
                links[pair] = links.get(pair, 0) + options["transfer"][end - 1]
        assert chain.of_ranks(ends, chain.costs.seconds).tolist() == busy
        assert chain.of_ranks(ends, chain.costs.memory).tolist() == sizes
        assert sorted(filter(None, chain.of_links(ends))) == sorted(filter(None, links.values()))
        assert chain.largest(ends) == largest
        fits = all(size <= limit for size, limit in zip(sizes, options["limits"], strict=True))
        assert chain.fits(ends) == fits
        bottleneck = max(*busy, *links.values(), 0)
        assert chain.bottleneck(ends) == bottleneck
        figures.append((bottleneck, largest, list(ends)))
    cutoff = min(bottleneck for bottleneck, _, _ in figures) * (1 + options["slack"])
    largest, ends = min(
        ((largest, ends) for bottleneck, largest, ends in figures if bottleneck <= cutoff),
        key=lambda pair: pair[0],
    )
    assert chain.best(cuts) == ends
    assert chain.best([]) is None


def test_a_limit_is_met_exactly_and_unlimited_ranks_fit_anything():
    """One byte less does not fit."""
    chain = placement([1, 1], [0, 1], {"fixed_bytes": [3, 4], "limits": [3, 4]})
    assert chain.fits([1, 2])
    assert not placement([1, 1], [0, 1], {"fixed_bytes": [3, 4], "limits": [3, 3]}).fits([1, 2])
    assert placement([1, 1], [0, 1], {"fixed_bytes": [3, 1e300]}).fits([1, 2])


def test_sums_that_differ_by_their_rounding_only_do_not_exclude_the_evener_cut():
    """Rank 0 takes 0.9 s either way, in floats 0.9 and 0.8999999999999999."""
    chain = placement([[0.4, 0.3, 0.3, 0.2], [0.0] * 4], [0, 1, 0], {})
    assert chain.bottleneck([2, 3, 4]) != chain.bottleneck([1, 2, 4])
    assert chain.best([[2, 3, 4], [1, 2, 4]]) == [1, 2, 4]
    mirrored = placement([[0.2, 0.3, 0.3, 0.4], [0.0] * 4], [0, 1, 0], {})
    assert mirrored.best([[1, 2, 4], [2, 3, 4]]) == [2, 3, 4]


def test_without_slack_only_the_least_bottleneck_counts():
    """Both ranks have 6 s, one stage too; with slack, 7 s and 5 s with stages of at most 5 s do."""
    seconds, cuts = [4, 1, 1, 3, 1, 2], [[1, 5, 6], [1, 4, 6]]
    assert placement(seconds, [0, 1, 0], {}).slack == 0
    assert placement(seconds, [0, 1, 0], {}).best(cuts) == cuts[0]
    assert placement(seconds, [0, 1, 0], {"slack": 0.5}).best(cuts) == cuts[1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"transfer": [1, 2]}, "transfer: has 2 entries, but 1 are needed"),
        ({"limits": [1]}, "limits: .* for each of 2 ranks"),
        ({"limits": [1, "1 GiB"]}, "limits: .* for each of 2 ranks"),
        ({"slack": -0.5}, "slack is -0.5"),
        ({"in_flight": [1]}, "in_flight: has 1 entries, but 2 are needed"),
        ({"saved_bytes": [[1, 2]] * 3}, "saved_bytes: has the shape"),
    ],
)
def test_options_of_another_shape_are_refused(options, message):
    """Rows are of ranks, and entries of stages, layers or cuts."""
    with pytest.raises(PartitionError, match=message):
        placement([1, 2], [0, 1], options)
    with pytest.raises(PartitionError, match="cannot make 3 stages from 2 layers"):
        placement([1, 2], [0, 1, 0], {})
