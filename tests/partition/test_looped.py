"""Cuts for several stages per rank, interleaved and V, against every other cut."""

from __future__ import annotations

from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import PartitionError
from penstock.partition.looped import folded, looped, looped_with_bound

REAL = st.one_of(
    st.just(0.0), st.sampled_from([0.1, 0.2, 0.3]), st.integers(0, 5).map(float), st.floats(0, 1)
)


def every_cut(layers, stages):
    """The ends of the stages of all cuts."""
    for cuts in combinations(range(1, layers), stages - 1):
        yield [*cuts, layers]


@st.composite
def chains(draw, stages_of):
    """Up to nine layers on some ranks, with any of the options."""
    layers = draw(st.integers(2, 9))
    shapes = [shape for shape in stages_of if len(stages_of[shape]) <= layers]
    shape = draw(st.sampled_from(shapes))
    stages, ranks = len(stages_of[shape]), shape[0]

    def rows(values):
        count = draw(st.sampled_from([1, ranks]))
        return [draw(st.lists(values, min_size=layers, max_size=layers)) for _ in range(count)]

    options = {}
    if draw(st.booleans()):
        options["transfer"] = draw(st.lists(REAL, min_size=layers - 1, max_size=layers - 1))
    if draw(st.booleans()):
        options |= {
            "fixed_bytes": rows(st.integers(0, 9)),
            "saved_bytes": rows(st.integers(0, 9)),
            "in_flight": draw(
                st.lists(st.sampled_from([0, 1, 2.5]), min_size=stages, max_size=stages)
            ),
            "limits": draw(st.lists(st.integers(0, 60), min_size=ranks, max_size=ranks)),
        }
    options["slack"] = draw(st.sampled_from([0.0, 0.0, 0.2]))
    return shape, rows(REAL), options


def loads(rows, ends, ranks_of, flying=None):
    """What every rank has to do, layer by layer."""
    totals, start = [0.0] * (max(ranks_of) + 1), 0
    for stage, (end, rank) in enumerate(zip(ends, ranks_of, strict=True)):
        totals[rank] += (1 if flying is None else flying[stage]) * sum(
            rows[rank % len(rows)][start:end]
        )
        start = end
    return totals


def busiest(seconds, options, ends, ranks_of):
    """Seconds of the busiest rank or link; all cuts between two ranks are on one link."""
    links = {}
    for end, pair in zip(ends, pairwise(ranks_of), strict=False):
        if pair[0] != pair[1] and "transfer" in options:
            links[frozenset(pair)] = links.get(frozenset(pair), 0) + options["transfer"][end - 1]
    return max(*loads(seconds, ends, ranks_of), *links.values(), 0.0)


def fits(options, ends, ranks_of):
    if "limits" not in options:
        return True
    fixed_bytes, saved_bytes = (
        loads(options["fixed_bytes"], ends, ranks_of),
        loads(options["saved_bytes"], ends, ranks_of, options["in_flight"]),
    )
    return all(
        a + b <= limit
        for a, b, limit in zip(fixed_bytes, saved_bytes, options["limits"], strict=True)
    )


def largest(seconds, ends, ranks_of):
    edges = pairwise([0, *ends])
    return max(
        sum(seconds[rank % len(seconds)][a:b]) for rank, (a, b) in zip(ranks_of, edges, strict=True)
    )


LOOPS = {(ranks, rounds): [*range(ranks)] * rounds for ranks in (1, 2, 3) for rounds in (1, 2, 3)}


def check(result, case, ranks_of, exact=True):
    """Whether no cut is better, and if none is given, none fits."""
    _, seconds, options = case
    cuts = [
        ends for ends in every_cut(len(seconds[0]), len(ranks_of)) if fits(options, ends, ranks_of)
    ]
    if result is None:
        assert not (exact and cuts)
        return
    ends = np.cumsum(result).tolist()
    assert ends in cuts
    least = min(busiest(seconds, options, cut, ranks_of) for cut in cuts)
    most = least * (1 + options["slack"]) * (1 + 1e-10)
    if exact:
        assert busiest(seconds, options, ends, ranks_of) <= most
        others = [
            cut for cut in cuts if busiest(seconds, options, cut, ranks_of) <= most * (1 - 2e-10)
        ]
        smallest = min((largest(seconds, cut, ranks_of) for cut in others), default=np.inf)
        assert largest(seconds, ends, ranks_of) <= smallest * (1 + 2e-6)


@settings(deadline=None, max_examples=150)
@given(case=chains(LOOPS))
def test_no_loop_of_few_layers_has_a_faster_busiest_rank(case):
    """All cuts are tried there, and the lower bound is the bottleneck."""
    shape, seconds, options = case
    check(looped(seconds, *shape, **options), case, LOOPS[shape])
    result = looped_with_bound(seconds, *shape, **options)
    assert result is None or result.lower_bound == result.bottleneck


@pytest.mark.usefixtures("loops")
@settings(deadline=None, max_examples=60)
@given(case=chains(LOOPS))
def test_the_search_is_no_better_than_possible_and_never_below_its_bound(case):
    """The same chains without trying all cuts: nothing that does not fit, and a lower bound that is
    one.
    """
    shape, seconds, options = case
    ranks_of = LOOPS[shape]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(looped_with_bound.__globals__, "FEW_CUTS", 0)
        result = looped_with_bound(seconds, *shape, **options)
    if result is None:
        return
    check(result.lengths, case, ranks_of, exact=False)
    cuts = [
        ends for ends in every_cut(len(seconds[0]), len(ranks_of)) if fits(options, ends, ranks_of)
    ]
    least = min(busiest(seconds, options, cut, ranks_of) for cut in cuts)
    assert result.bottleneck == pytest.approx(
        busiest(seconds, options, np.cumsum(result.lengths).tolist(), ranks_of), rel=1e-9
    )
    assert result.lower_bound <= least * (1 + 1e-9)
    # How far a search is from the least has no bound: the next test tells how far it usually is.
    assert result.bottleneck >= least * (1 - 1e-9)


def test_what_the_search_misses_it_misses_by_little():
    """Where all cuts can still be tried, on random chains: few layers per stage are the hardest
    case.
    """
    ratios = []
    for seed in range(12):
        costs = np.random.default_rng(seed).random(17)
        exact = looped_with_bound(costs, 3, 2)
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(looped_with_bound.__globals__, "FEW_CUTS", 0)
            ratios.append(looped_with_bound(costs, 3, 2).bottleneck / exact.bottleneck)
    assert min(ratios) >= 1 - 1e-12
    assert np.mean(ratios) < 1.03
    assert max(ratios) < 1.08


@pytest.mark.parametrize(("layers", "ranks", "rounds"), [(100, 8, 2), (96, 8, 4), (61, 4, 3)])
def test_layers_that_are_alike_are_dealt_out_exactly(layers, ranks, rounds):
    """Of a transformer's layers some rank has the rounded-up share, and none needs more."""
    result = looped_with_bound([1.0] * layers, ranks, rounds)
    assert result.bottleneck == result.lower_bound == -(-layers // ranks)
    assert max(result.lengths) <= -(-layers // (ranks * rounds)) + 1
    assert sum(result.lengths) == layers


def test_memory_moves_layers_away_from_the_rank_with_most_in_flight():
    """Rank 0 of a V has its first stage's micro-batches for longest."""
    assert folded([1] * 8, 2) == [2, 2, 2, 2]
    lengths = folded([1] * 8, 2, saved_bytes=[1] * 8, in_flight=[4, 3, 2, 1], limits=[7, 14])
    assert lengths[0] == 1
    assert folded([1] * 8, 2, saved_bytes=[1] * 8, in_flight=[4, 3, 2, 1], limits=[4, 14]) is None
    tight = looped(
        [1] * 40, 4, 2, saved_bytes=[1] * 40, in_flight=[4, 4, 4, 4, 1, 1, 1, 1], limits=[20] * 4
    )
    edges = np.cumsum([0, *tight])
    need = [0] * 4
    for stage, (a, b) in enumerate(pairwise(edges)):
        need[stage % 4] += (b - a) * (4 if stage < 4 else 1)
    assert max(need) <= 20


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: folded([1] * 5, 3), "cannot make 6 stages from 5 layers"),
        (lambda: folded([1] * 5, 0), "ranks is 0; it must be a whole number"),
        (lambda: looped([1] * 5, 2, 0), "rounds is 0; it must be a whole number"),
        (lambda: looped([1] * 5, True, 2), "ranks is True; it must be a whole number"),
        (
            lambda: looped([1] * 5, 2, 2, limits=[1]),
            "limits: .1. must be one number of bytes for each of 2 ranks",
        ),
        (
            lambda: looped([1] * 5, 2, 2, in_flight=[1, 1]),
            "in_flight: has 2 entries, but 4 are needed",
        ),
        (lambda: looped([1] * 5, 2, 2, transfer=[1]), "transfer: has 1 entries, but 4 are needed"),
        (
            lambda: looped([[1] * 5] * 3, 2, 2),
            r"seconds: has the shape \(3, 5\); it must be \(5,\) or \(2, 5\)",
        ),
        (lambda: looped([1] * 5, 2, 2, slack=-1), "slack is -1"),
    ],
)
def test_numbers_that_do_not_fit_each_other_are_refused(call, message):
    """Rows are of ranks here and of stages elsewhere: a mix-up must not go through."""
    with pytest.raises(PartitionError, match=message):
        call()


@settings(deadline=None, max_examples=40)
@given(case=chains(LOOPS))
def test_the_lower_bound_of_a_search_is_the_average_rank_or_the_layers_that_must_meet(case):
    """Of the (k - 1) x ranks + 1 dearest layers some rank holds k: the cheapest k of them, at least.
    Of unlike ranks the fastest counts for every layer.
    """
    (ranks, rounds), seconds, options = case
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(looped_with_bound.__globals__, "FEW_CUTS", 0)
        result = looped_with_bound(seconds, ranks, rounds, **options)
    if result is None:
        return
    dearest = sorted((min(column) for column in zip(*seconds, strict=True)), reverse=True)
    bounds = [sum(dearest) / ranks]
    for k in range(1, len(dearest) + 1):
        count = (k - 1) * ranks + 1
        if count <= len(dearest):
            bounds.append(sum(dearest[count - k : count]))
    assert result.lower_bound == pytest.approx(min(max(bounds), result.bottleneck), abs=1e-12)


def test_a_search_under_limits_finds_most_cuts_that_fit():
    """Limits that all cuts but a few exceed; a search that counts bytes wrongly finds hardly any."""
    solved = possible = 0
    for seed in range(25):
        rng = np.random.default_rng(seed)
        layer_bytes = rng.integers(1, 9, 12)
        options = {"fixed_bytes": layer_bytes, "limits": [layer_bytes.sum() / 3 + 4] * 3}
        seconds = rng.integers(1, 9, 12)
        exact = looped_with_bound(seconds, 3, 2, **options)
        if exact is None:
            continue
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(looped_with_bound.__globals__, "FEW_CUTS", 0)
            result = looped_with_bound(seconds, 3, 2, **options)
        possible += 1
        solved += result is not None and result.bottleneck <= 1.1 * exact.bottleneck
    assert possible >= 20
    assert solved >= 0.8 * possible


@pytest.mark.parametrize("transfer_s", [0, 10])
def test_a_search_under_unlike_limits_finds_most_cuts_that_fit(transfer_s):
    """A rank with less memory than the others must get less from the first step on, whatever the
    seconds of its links.
    """
    solved = 0
    for seed in range(12):
        rng = np.random.default_rng(seed)
        layer_bytes, seconds = rng.integers(1, 9, 14), rng.integers(1, 9, 14)
        starts = [0, *np.sort(rng.choice(np.arange(1, 14), 5, replace=False)).tolist()]
        rank_bytes = np.add.reduceat(layer_bytes, starts).reshape(2, 3).sum(axis=0)
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(looped_with_bound.__globals__, "FEW_CUTS", 0)
            transfer = (transfer_s * rng.integers(0, 9, 13)).tolist()
            options = {
                "fixed_bytes": layer_bytes,
                "limits": rank_bytes + 1,
                "transfer": transfer,
            }
            solved += looped(seconds, 3, 2, **options) is not None
    assert solved >= 10


def test_a_search_gives_the_same_cut_for_the_same_costs():
    """Its random restarts too: a plan must not change from run to run."""
    for seed in (1, 4):
        costs = np.random.default_rng(seed).random(24)
        assert looped(costs, 3, 3) == looped(costs, 3, 3) == looped(costs, 3, 3)


def test_the_average_rank_bounds_a_search_where_few_layers_must_meet():
    """Two ranks share 9 s, and of the three dearest layers one rank has two, of 4 s at least."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(looped_with_bound.__globals__, "FEW_CUTS", 0)
        result = looped_with_bound([3.0, 2.0, 2.0, 2.0], 2, 2)
        assert (result.bottleneck, result.lower_bound) == (5.0, 4.5)
        result = looped_with_bound([5.0, 2.0, 2.0, 1.0], 2, 2)
        assert result.lower_bound == 5.0


def binding_case(seed, layers, shape, kind, slack=0.0, ranks_of=None):
    """A chain for unlike ranks with links, and with limits that a cut drawn at random just keeps.

    `kind` names what is left out: "transfer", "limits", "both" or "nothing".
    """
    rng = np.random.default_rng(seed)
    ranks_of = ranks_of or LOOPS[shape]
    ranks, stages = shape[0], len(ranks_of)
    options = {"slack": slack}
    if kind not in ("transfer", "both"):
        # In half of the cases links are often the busiest.
        scale = 1.0 + 5.0 * (seed % 2)
        options["transfer"] = (scale * rng.integers(0, 12, layers - 1)).tolist()
    if kind not in ("limits", "both"):
        for name in ("fixed_bytes", "saved_bytes"):
            options[name] = rng.integers(0, 9, (ranks, layers)).tolist()
        options["in_flight"] = rng.integers(1, 4, stages).tolist()
        cuts = np.sort(rng.choice(np.arange(1, layers), stages - 1, replace=False))
        ends = [*cuts.tolist(), layers]
        fixed_bytes = loads(options["fixed_bytes"], ends, ranks_of)
        saved_bytes = loads(options["saved_bytes"], ends, ranks_of, options["in_flight"])
        margins = rng.integers(0, 12, ranks)
        options["limits"] = (np.add(fixed_bytes, saved_bytes) + margins).tolist()
    seconds = rng.integers(1, 20, (ranks, layers)).astype(float).tolist()
    return shape, seconds, options


every_kind = pytest.mark.parametrize("kind", ["nothing", "transfer", "limits", "both"])


@every_kind
@pytest.mark.parametrize("slack", [0.0, 0.3])
def test_of_all_cuts_under_limits_that_bind_the_best_is_taken(kind, slack):
    """Limits hold for all stages of a rank together, and slack is that of the cuts that fit."""
    for seed in range(6):
        for shape, layers in (((2, 2), 8), ((1, 3), 6), ((3, 1), 8)):
            case = binding_case(seed, layers, shape, kind, slack)
            check(looped(case[1], *shape, **case[2]), case, LOOPS[shape])


def searched(case):
    """The result without trying all cuts."""
    shape, seconds, options = case
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(looped_with_bound.__globals__, "FEW_CUTS", 0)
        return looped_with_bound(seconds, *shape, **options)


@every_kind
def test_a_search_over_one_round_is_exact(kind):
    """All stages are then in one window, of which the best cut is computed."""
    for seed in range(6):
        case = binding_case(seed, 9, (3, 1), kind)
        check(searched(case).lengths, case, LOOPS[3, 1])


def recuts(ends, ranks):
    """All cuts that differ in one window of consecutive stages, one for each rank."""
    edges = [0, *ends]
    for first in range(len(ends) - ranks + 1):
        inner = range(edges[first] + 1, edges[first + ranks])
        for cuts in combinations(inner, ranks - 1):
            yield [*ends[:first], *cuts, *ends[first + ranks - 1 :]]


def squares(seconds, ends, ranks_of):
    """The sum of the squares of the seconds of all stages."""
    edges = pairwise([0, *ends])
    return sum(sum(seconds[rank][a:b]) ** 2 for rank, (a, b) in zip(ranks_of, edges, strict=True))


@every_kind
@pytest.mark.parametrize(("layers", "shape"), [(10, (2, 2)), (12, (3, 2)), (9, (2, 3))])
def test_no_window_of_a_searched_cut_can_be_cut_better(kind, layers, shape):
    """Neither faster with all else fixed, nor as fast with more even stages."""
    ranks_of = LOOPS[shape]
    for seed in range(6):
        case = binding_case(seed, layers, shape, kind)
        _, seconds, options = case
        result = searched(case)
        if result is None:
            continue
        ends = np.cumsum(result.lengths).tolist()
        cuts = [cut for cut in recuts(ends, shape[0]) if fits(options, cut, ranks_of)]
        times = [busiest(seconds, options, cut, ranks_of) for cut in cuts]
        assert result.bottleneck <= min(times) * (1 + 1e-9)
        for cut, time in zip(cuts, times, strict=True):
            if time <= result.bottleneck * (1 - 1e-9):
                unevenness = squares(seconds, cut, ranks_of)
                assert squares(seconds, ends, ranks_of) <= unevenness * (1 + 1e-9)


@pytest.mark.parametrize(("slack", "most"), [(0.1, 0.89), (0.3, 0.83)])
def test_a_search_spends_slack_on_a_smaller_largest_stage(slack, most):
    """The busiest rank takes at most the slack longer than without it."""
    sums = np.zeros(2)
    for seed in range(6):
        shape, seconds, options = binding_case(seed, 16, (2, 3), "both")
        results = [searched((shape, seconds, {**options, "slack": s})) for s in (0.0, slack)]
        assert results[1].bottleneck <= results[0].bottleneck * (1 + slack) * (1 + 1e-9)
        ends = [np.cumsum(result.lengths).tolist() for result in results]
        sums += [largest(seconds, row, LOOPS[shape]) for row in ends]
    assert sums[1] <= most * sums[0]
