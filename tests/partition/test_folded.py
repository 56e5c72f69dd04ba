"""Cuts of a V against every other cut."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from tests.partition.test_looped import binding_case, chains, check

from penstock.errors import PartitionError
from penstock.partition.folded import folded

V = {(ranks,): [*range(ranks), *range(ranks - 1, -1, -1)] for ranks in (1, 2, 3, 4)}


@pytest.mark.usefixtures("loops")
@settings(deadline=None, max_examples=80)
@given(case=chains(V))
def test_no_v_has_a_faster_busiest_rank_and_none_as_fast_a_smaller_largest_stage(case):
    """Unlike ranks, links, and memory of both stages together included; what is said not to fit
    must not.
    """
    check(folded(case[1], case[0][0], **case[2]), case, V[case[0]])


def test_a_hundred_layers_in_a_v_are_nearly_even():
    """Beyond brute force: two stages per rank leave little to chance."""
    costs = np.random.default_rng(1).random(100)
    lengths = folded(costs, 8)
    edges = np.cumsum([0, *lengths])
    stages = [costs[a:b].sum() for a, b in pairwise(edges)]
    ranks = [stages[rank] + stages[15 - rank] for rank in range(8)]
    assert max(ranks) <= 1.02 * costs.sum() / 8
    smooth = np.cumsum([0, *folded(costs, 8, slack=0.05)])
    assert max(costs[a:b].sum() for a, b in pairwise(smooth)) < max(stages)


def test_both_stages_of_a_rank_share_its_memory():
    """Rank 1 has 10 bytes: the cut 3, 1, 2, 2 would be faster, and needs 12 there."""
    seconds, layer_bytes = [1, 2, 2, 4, 2, 3, 1, 4], [2, 3, 3, 6, 0, 6, 1, 4]
    options = {"fixed_bytes": layer_bytes, "saved_bytes": [0] * 8, "in_flight": [1] * 4}
    assert folded(seconds, 2, **options, limits=[18, 10]) == [2, 2, 1, 3]


@pytest.mark.parametrize("ranks", [0, -1, True, 1.5, "2"])
def test_ranks_are_a_whole_number_of_1_or_more(ranks):
    """A bool counts as an int in Python."""
    with pytest.raises(PartitionError) as caught:
        folded([1] * 6, ranks)
    assert str(caught.value) == f"ranks is {ranks!r}; it must be a whole number of 1 or more"
    assert folded([1] * 6, np.int64(1)) == [3, 3]


def test_two_stages_need_two_layers_and_a_limit_below_what_any_cut_needs_has_no_cut():
    """As many layers as stages are enough; a limit may be met exactly."""
    with pytest.raises(PartitionError, match="cannot make 4 stages from 3 layers"):
        folded([1] * 3, 2)
    assert folded([1] * 4, 2) == [1, 1, 1, 1]
    assert folded([0.0] * 5, 2) is not None
    # Without links a bound of 0 would do; the search must go on from there.
    assert folded([0.0] * 4, 2, transfer=[1.0, 1.0, 1.0]) == [1, 1, 1, 1]
    assert folded([0.0] * 5, 2, transfer=[9.0, 1.0, 1.0, 2.0]) == [2, 1, 1, 1]
    assert folded([1, 1], 1, fixed_bytes=[3, 4], limits=[7]) == [1, 1]
    assert folded([1, 1], 1, fixed_bytes=[3, 4], limits=[6]) is None


@pytest.mark.parametrize("slack", [0.0, 0.3])
@pytest.mark.parametrize("kind", ["nothing", "transfer", "limits", "both"])
def test_of_all_vs_of_unlike_ranks_under_limits_that_bind_the_best_is_taken(kind, slack):
    """Limits and bounds hold for both stages of a rank together, and for every rank."""
    for seed in range(3):
        for shape, layers in (((2,), 8), ((1,), 5), ((3,), 10)):
            ranks_of = V[shape]
            case = binding_case(seed, layers, shape, kind, slack, ranks_of)
            check(folded(case[1], *shape, **case[2]), case, ranks_of)
