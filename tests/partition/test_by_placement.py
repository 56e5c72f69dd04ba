"""Cuts for ranks with several stages, from a profile."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from penstock.errors import PartitionError
from penstock.partition.catalogue import partition
from penstock.partition.looped import folded, looped
from penstock.profile.profile import Timing


def ranks_of(by, stages, ranks):
    return (
        [*range(ranks)] * (stages // ranks)
        if by == "looped"
        else [*range(stages // 2), *range(stages // 2 - 1, -1, -1)]
    )


@pytest.mark.parametrize(("by", "options"), [("looped", {"ranks": 4}), ("folded", {})])
def test_ranks_are_evener_than_with_the_cut_that_evens_out_stages(vgg, by, options):
    """What a rank has to do is the sum of its stages; the slowest single stage is another question."""
    costs = np.array(vgg.step_seconds(32))

    def busiest(lengths):
        edges = np.cumsum([0, *lengths])
        stages = [costs[a:b].sum() for a, b in zip(edges, edges[1:], strict=False)]  # noqa: RUF007
        return np.bincount(ranks_of(by, 8, 4), stages).max()

    even_ranks = partition(vgg, 8, by, **options)
    assert (len(even_ranks), min(even_ranks) >= 1, sum(even_ranks)) == (8, True, 25)
    assert busiest(even_ranks) < busiest(partition(vgg, 8))
    assert busiest(even_ranks) <= 1.2 * costs.sum() / 4
    even_stages = partition(vgg, 8, by, slack=0.1, **options)
    assert busiest(even_stages) <= 1.1 * busiest(even_ranks) * (1 + 1e-9)
    assert even_stages != even_ranks


def test_one_stage_per_rank_is_the_exact_cut_of_a_chain(vgg):
    """Without a number of ranks nothing is shared."""
    costs = vgg.step_seconds(32)
    edges = np.cumsum([0, *partition(vgg, 4, "looped")])
    assert max(sum(costs[a:b]) for a, b in zip(edges, edges[1:], strict=False)) == pytest.approx(  # noqa: RUF007
        39.885
    )


@pytest.mark.parametrize("stages", [2, 4, 6, 14])
def test_folds_of_every_even_number_of_stages_give_each_a_layer(make_profile, stages):
    """The laws of all methods, for the numbers that this one takes."""
    profile = make_profile([0, 0, 5, 0.1, 0.1, 1000, 0, 1, 1, 2, 3, 0, 0, 7])
    lengths = partition(profile, stages, "folded")
    assert (len(lengths), sum(lengths)) == (stages, 14)
    assert min(lengths) >= 1
    assert all(type(length) is int for length in lengths)


@pytest.mark.parametrize(
    ("by", "options", "message"),
    [
        (
            "folded",
            {},
            "folded gives every rank two stages, and 3 stages is an odd number: ask for 4 or 2",
        ),
        (
            "looped",
            {"ranks": 2},
            "looped places the same number of stages on every rank, and 3 stages cannot be divided over 2 ranks",
        ),
        ("looped", {"ranks": 0}, "cannot be divided over 0 ranks"),
        (
            "looped",
            {"ranks": 1, "slack": -0.1},
            "slack is -0.1; it must be a plain number 0 or more",
        ),
        ("looped", {"micro_batch": 0}, "micro_batch is 0; it must be a plain number above 0"),
    ],
)
def test_stages_that_cannot_be_dealt_out_are_refused(make_profile, by, options, message):
    """A rank with a stage less than the others is another schedule."""
    with pytest.raises(PartitionError, match=message):
        partition(make_profile([1, 1, 1, 1]), 3, by, **options)


def test_a_single_stage_cannot_be_folded(make_profile):
    """0 stages are no alternative."""
    with pytest.raises(PartitionError, match=r"1 stages is an odd number: ask for 2$"):
        partition(make_profile([1, 1]), 1, "folded")


def test_the_size_of_a_micro_batch_decides_and_ranks_are_whole_numbers(make_profile):
    """Costs are forward and backward seconds at that size."""
    profile = make_profile([9.0, 1, 1, 1, 1, 1], [1.0, 1, 1, 1, 1, 9], sizes=(1, 8))
    rows = [
        replace(layer, forward=Timing((1, 8), times))
        for layer, times in zip(
            profile, [(1, 9), (1, 1), (1, 1), (1, 1), (1, 1), (9, 1)], strict=True
        )
    ]
    profile = replace(profile, layers=tuple(rows))
    for size in (1, 8):
        seconds = profile.step_seconds(size)
        assert partition(profile, 4, "folded", micro_batch=size) == folded(seconds, 2)
        assert partition(profile, 4, "looped", ranks=2, micro_batch=size) == looped(seconds, 2, 2)
    assert partition(profile, 4, "folded") == folded(profile.step_seconds(8), 2)
    for ranks in (True, 2.0, "2", -2):
        with pytest.raises(PartitionError, match=f"cannot be divided over {ranks!r} ranks"):
            partition(profile, 4, "looped", ranks=ranks)
