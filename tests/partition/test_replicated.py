"""Cuts with replicated stages against every other cut and number of replicas."""

from __future__ import annotations

from itertools import combinations, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import PartitionError
from penstock.partition.replica_search import chain_of
from penstock.partition.replicated import replicated_sum, replicated_table

TIMES = st.one_of(st.just(np.inf), st.integers(0, 6).map(float), st.floats(0, 9), st.floats(0, 9))


def every_way(layers, ranks):
    """All lists of (layers, copies) that use the ranks or fewer."""
    for stages in range(1, min(layers, ranks) + 1):
        for cuts in combinations(range(1, layers), stages - 1):
            lengths = [
                stop - start for start, stop in zip((0, *cuts), (*cuts, layers), strict=True)
            ]
            for copies in product(range(1, ranks + 1), repeat=stages):
                if sum(copies) <= ranks:
                    yield list(zip(lengths, copies, strict=True))


def spans(way):
    """(first, end, copies, stages from here on) of every stage."""
    first, after = 0, len(way)
    for length, copies in way:
        yield first, first + length, copies, after
        first, after = first + length, after - 1


def times(table, way):
    return [table[first, end, copies] for first, end, copies, _ in spans(way)]


@st.composite
def problems(draw, layers=5, ranks=4):
    """A table of anything, and limits on what may come after a stage; or no limits."""
    layers, ranks = draw(st.integers(1, layers)), draw(st.integers(1, ranks))
    seed = draw(st.integers(0, 2**32 - 1))
    values = draw(st.lists(TIMES, min_size=4, max_size=12))
    rng = np.random.default_rng(seed)
    shape = (layers + 1, layers + 1, ranks + 1)
    smooth = rng.random((layers + 1, layers + 1, 1)) + 1 / np.arange(1, ranks + 2)
    table = draw(st.sampled_from([rng.choice(values, shape), smooth]))
    most_stages = draw(st.none() | st.just(rng.integers(0, 6, shape)))
    exactly, stages = draw(st.booleans()), draw(st.none() | st.integers(1, layers))
    return table, {"most_stages": most_stages, "exactly": exactly, "stages": stages}


def allowed(table, limits):
    """Every way that the limits leave, with finite times."""
    ranks = table.shape[2] - 1
    for way in every_way(table.shape[0] - 1, ranks):
        if limits["stages"] not in {None, len(way)} or (
            limits["exactly"] and sum(k for _, k in way) != ranks
        ):
            continue
        spare = [
            limits["most_stages"] is None or limits["most_stages"][first, end, copies] >= after
            for first, end, copies, after in spans(way)
        ]
        if all(spare) and max(times(table, way)) < np.inf:
            yield way


@pytest.mark.usefixtures("loops")
@settings(deadline=None, max_examples=150)
@given(problem=problems())
def test_no_way_to_cut_and_copy_has_a_faster_slowest_stage(problem):
    """The table may hold anything: more ranks need not be faster, as where gradients must be added
    up.
    """
    table, limits = problem

    def slowest(way):
        return max(times(table, way))

    ways = list(allowed(table, limits))
    stages = replicated_table(table, **limits)
    if stages is None:
        assert not ways
        return
    assert stages in ways
    least = min(map(slowest, ways))
    assert slowest(stages) == least
    if not limits["exactly"]:
        best = min(
            (len(way), sum(copies for _, copies in way)) for way in ways if slowest(way) == least
        )
        assert (len(stages), sum(copies for _, copies in stages)) == best


@pytest.mark.usefixtures("loops")
@settings(deadline=None, max_examples=150)
@given(problem=problems(), factor=st.sampled_from([0, 0.5, 1, 7, 1000]))
def test_no_way_to_cut_and_copy_has_a_smaller_sum_with_its_slowest(problem, factor):
    """Alpa's objective: the time of a batch, if stages wait for nothing but each other."""
    table, limits = problem

    def value(way):
        return sum(times(table, way)) + factor * max(times(table, way))

    ways = list(allowed(table, limits))
    stages = replicated_sum(table, factor, **limits)
    if stages is None:
        assert not ways
        return
    assert stages in ways
    assert value(stages) == pytest.approx(min(map(value, ways)), rel=1e-12)


def test_ranks_left_over_go_where_the_work_is():
    """Four ranks would do for the bottleneck of the last layer; the others halve the first stage
    and go on from there.
    """
    table = np.full((3, 3, 7), np.inf)
    copies = np.arange(1, 7)
    table[0, 1, 1:], table[0, 2, 1:] = 8 / copies, 12 / copies + 9
    table[1, 2, 1] = 4.0
    assert replicated_table(table, exactly=False) == [(1, 2), (1, 1)]
    assert replicated_table(table) == [(1, 5), (1, 1)]


def test_ranks_that_no_stage_can_take_are_found_work_at_the_least_loss():
    """The cut with the fastest slowest stage takes 2 ranks and no third: then another cut must, if
    all ranks are to work.
    """
    table = np.full((3, 3, 4), np.inf)
    table[0, 1, 1] = table[1, 2, 1] = 1.0
    table[0, 2, 3] = 5.0
    assert replicated_table(table, exactly=False) == [(1, 1), (1, 1)]
    assert replicated_table(table) == [(2, 3)]


def test_the_least_sum_is_on_all_ranks_unless_some_may_stay_idle():
    """A second rank slows the only layer down: it is used by default, as by `replicated_table`."""
    table = np.full((2, 2, 3), np.inf)
    table[0, 1, 1:] = 1.0, 2.0
    assert replicated_sum(table, 1) == replicated_table(table) == [(1, 2)]
    assert replicated_sum(table, 1, exactly=False) == [(1, 1)]


def test_a_hundred_layers_on_64_ranks_are_no_worse_than_their_bound():
    """Beyond brute force: without any cost of copies, the bottleneck is as good as all on all, and
    no sum is below it.
    """
    work = np.random.default_rng(2).random(100)
    done = np.concatenate(([0.0], np.cumsum(work)))
    table = (done - done[:, None])[:, :, None] / np.maximum(np.arange(65), 1)
    assert replicated_table(table) == [(100, 64)]
    stages = replicated_table(table, stages=10)
    assert (sum(n for n, _ in stages), sum(k for _, k in stages), len(stages)) == (100, 64, 10)
    assert done[-1] / 64 <= max(times(table, stages)) <= 1.1 * done[-1] / 64
    assert replicated_sum(table, 31, stages=10) is not None


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: replicated_table(np.zeros((3, 3))), r"table: has the shape \(3, 3\)"),
        (lambda: replicated_table(np.zeros((3, 4, 2))), r"table: has the shape \(3, 4, 2\)"),
        (lambda: replicated_table(np.full((3, 3, 2), -1.0)), r"table: entry \[0, 1, 1\] is -1.0"),
        (lambda: replicated_table(np.full((3, 3, 2), np.nan)), r"table: entry \[0, 1, 1\] is nan"),
        (
            lambda: replicated_table(np.zeros((3, 3, 2)), most_stages=np.zeros((3, 3, 3))),
            r"most_stages: has the shape \(3, 3, 3\)",
        ),
        (lambda: replicated_table(np.zeros((3, 3, 2)), stages=0), "stages is 0"),
        (lambda: replicated_sum(np.zeros((3, 3, 2)), -1), "bound_factor is -1"),
    ],
)
def test_numbers_that_make_no_table_are_refused(call, message):
    """Each would end in an index error far away, or in a plan for another model."""
    with pytest.raises(PartitionError, match=message):
        call()


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("exactly", [True, False])
def test_no_bound_tried_one_after_another_gives_a_smaller_sum_with_its_slowest(seed, exactly):
    """As Alpa searches: for every value of the table, the least sum with no stage above it."""
    # More ranks help little, so that few stages have the least sum and many the fastest slowest one.
    rng = np.random.default_rng(seed)
    layers, ranks = 6, 4
    work = np.cumsum(np.concatenate([[0], rng.random(layers)]))
    table = (
        np.maximum(work - work[:, None], 0)[:, :, None] / np.maximum(np.arange(ranks + 1), 1) ** 0.3
    )
    table = table * (1 + rng.random((layers + 1, layers + 1, ranks + 1)) / 10)
    chain = chain_of(table, None)
    cuts = [
        chain.least(bound=float(bound), sums=True, stages=None, exactly=exactly)
        for bound in np.unique(chain.entries())
    ]
    for factor in (0.5, 2.0, 5.0, 20.0):
        least = min(sum(times(table, cut)) + factor * max(times(table, cut)) for cut in cuts if cut)
        stage_seconds = times(table, replicated_sum(table, factor, exactly=exactly))
        assert sum(stage_seconds) + factor * max(stage_seconds) == pytest.approx(least, rel=1e-12)


@pytest.mark.parametrize("seed", [37, 43])
def test_the_smallest_sum_is_found_on_both_sides_of_a_bound(seed):
    """Tables of whole numbers in which the best bound is the first or the last of an interval."""
    rng = np.random.default_rng(seed)
    table = rng.integers(1, 30, (5, 5, 4)).astype(float)
    for factor in (0.5, 1.0, 2.0, 5.0):
        values = []
        for way in every_way(4, 3):
            seconds = times(table, way)
            values.append(sum(seconds) + factor * max(seconds))
        result = times(table, replicated_sum(table, factor, exactly=False))
        assert sum(result) + factor * max(result) == min(values)
