"""The order of unequal ranks and their cut, against every order and every cut."""

from __future__ import annotations

from itertools import combinations, pairwise, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import PartitionError
from penstock.partition import ordered
from penstock.partition.ordered import best_order

REAL = st.one_of(
    st.just(0.0), st.sampled_from([0.1, 0.2, 0.3]), st.integers(0, 5).map(float), st.floats(0, 1)
)


@st.composite
def chains(draw):
    """Up to six layers, three kinds, and any of the options."""
    kinds, layers = draw(st.integers(1, 3)), draw(st.integers(1, 6))
    counts = draw(st.lists(st.integers(0, 3), min_size=kinds, max_size=kinds).filter(any))
    stages = draw(st.integers(1, min(layers, sum(counts), 4)))

    def draw_list(values, count):
        return draw(st.lists(values, min_size=count, max_size=count))

    options = {}
    if draw(st.booleans()):
        options["transfer"] = draw_list(REAL, layers - 1)
    if draw(st.booleans()):
        options |= {
            "fixed_bytes": draw_list(st.integers(0, 9), layers),
            "saved_bytes": [draw_list(st.integers(0, 9), layers) for _ in range(kinds)],
            "in_flight": draw_list(st.sampled_from([0, 1, 2.5]), stages),
            "limits_of_kind": draw_list(st.integers(0, 50), kinds),
        }
    return [draw_list(REAL, layers) for _ in range(kinds)], counts, stages, options


def slowest(case, lengths, kinds):
    """The slowest stage or link; infinite if a stage does not fit or there are too few ranks of a
    kind.
    """
    seconds, counts, _, options = case
    worst, edges = 0.0, np.cumsum([0, *lengths]).tolist()
    if any(kinds.count(kind) > count for kind, count in enumerate(counts)):
        return np.inf
    for stage, (kind, (a, b)) in enumerate(zip(kinds, pairwise(edges), strict=True)):
        worst = max(
            worst,
            sum(seconds[kind][a:b]),
            options["transfer"][a - 1] if a and "transfer" in options else 0.0,
        )
        if "saved_bytes" in options:
            need = sum(options["fixed_bytes"][a:b]) + options["in_flight"][stage] * sum(
                options["saved_bytes"][kind][a:b]
            )
            worst = worst if need <= options["limits_of_kind"][kind] else np.inf
    return worst


def least(case):
    seconds, counts, stages, _ = case
    layers, best = len(seconds[0]), np.inf
    for cuts in combinations(range(1, layers), stages - 1):
        lengths = [b - a for a, b in pairwise((0, *cuts, layers))]
        best = min(
            [
                best,
                *(
                    slowest(case, lengths, kinds)
                    for kinds in product(range(len(counts)), repeat=stages)
                ),
            ]
        )
    return best


@pytest.mark.usefixtures("loops")
@settings(deadline=None, max_examples=150)
@given(case=chains())
def test_no_order_and_no_cut_have_a_faster_slowest_stage(case):
    """What is said not to fit must not; kinds that run out are not used once more."""
    order = best_order(*case[:3], **case[3])
    best = least(case)
    if order is None:
        assert best == np.inf
        return
    assert (len(order.lengths), len(order.kinds)) == (case[2], case[2])
    assert slowest(case, order.lengths, order.kinds) == pytest.approx(best, rel=1e-10)


@pytest.mark.usefixtures("loops")
@pytest.mark.parametrize("pairs", ["furthest", "beam"])
@settings(deadline=None, max_examples=40)
@given(case=chains())
def test_the_larger_searches_give_what_fits_and_are_no_better_than_possible(pairs, case):
    """They may miss a cut whose next stage would be a single layer that is too much for its rank,
    but never break a limit.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ordered, "PAIRS", 0)
        patch.setattr(ordered, "STATES", 10**9 if pairs == "furthest" else 0)
        order = best_order(*case[:3], **case[3])
    if order is not None:
        assert np.inf > slowest(case, order.lengths, order.kinds) >= least(case) * (1 - 1e-10)


#: Cuts that are free after every second layer only, and limits that a slow kind's ranks meet first.
BINDING = {
    "nothing": {},
    "transfer": {"transfer": [50.0 * (layer % 2 == 0) for layer in range(29)]},
    "limits": {
        "fixed_bytes": [0] * 30,
        "saved_bytes": [[1] * 30] * 3,
        "in_flight": [6, 5, 4, 3, 2, 1],
        "limits_of_kind": [24, 40, 30],
    },
}


@pytest.mark.parametrize("binding", BINDING)
def test_on_ordinary_layers_the_larger_searches_miss_nothing(binding):
    """Thirty layers of like cost: the furthest layer is the best there."""
    rng, options = np.random.default_rng(0), BINDING[binding]
    for _ in range(3):
        work = rng.uniform(0.8, 1.2, 30)
        seconds = [work, work * 2.1, work * 0.7]
        exact = best_order(seconds, [3, 3, 2], 6, **options)
        for states in (10**9, 0):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(ordered, "PAIRS", 0)
                patch.setattr(ordered, "STATES", states)
                order = best_order(seconds, [3, 3, 2], 6, **options)
            case = (seconds, [3, 3, 2], 6, options)
            assert slowest(case, order.lengths, order.kinds) == pytest.approx(
                slowest(case, *exact), rel=1e-9
            )


def test_a_narrow_beam_continues_with_the_ranks_that_got_furthest():
    """Six of eight ranks are enough, and the slow ones are left out."""
    work = np.random.default_rng(1).uniform(0.8, 1.2, 30)
    seconds = [work, work * 2.1, work * 0.7]
    exact = best_order(seconds, [3, 3, 2], 6)
    with pytest.MonkeyPatch.context() as patch:
        for name, limit in (("PAIRS", 0), ("STATES", 0), ("WIDTH", 1)):
            patch.setattr(ordered, name, limit)
        order = best_order(seconds, [3, 3, 2], 6)
    case = (seconds, [3, 3, 2], 6, {})
    assert slowest(case, *order) <= 1.1 * slowest(case, *exact)


def test_the_rank_with_more_memory_stands_where_most_micro_batches_are_in_flight():
    """1F1B keeps most on the first stage: the order matters although all ranks are equally fast."""
    order = best_order(
        [[1] * 8] * 2, [3, 1], 4, saved_bytes=[1] * 8, in_flight=[4, 3, 2, 1], limits_of_kind=[6, 8]
    )
    assert order == ([2, 2, 2, 2], [1, 0, 0, 0])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: best_order([[1, 1]], [1, 1], 1),
            "counts is .* one whole number of ranks for each of 1 kinds",
        ),
        (lambda: best_order([[1, 1]], [1.5], 1), "counts is .* one whole number of ranks"),
        (lambda: best_order([[1, 1]] * 2, [3, -1], 2), "counts is .* one whole number of ranks"),
        (lambda: best_order([[1, 1]], [3], 3), "cannot make 3 stages from 2 layers on 3 ranks"),
        (lambda: best_order([[1, 1]], [1], 2), "cannot make 2 stages from 2 layers on 1 ranks"),
        (lambda: best_order([[1, -1]], [2], 2), r"seconds_of_kind\[0\]: entry 1 is -1.0"),
        (
            lambda: best_order([[1, 1]], [2], 2, limits_of_kind=[1, 2]),
            "limits_of_kind: .* for each of 1 kinds",
        ),
        (
            lambda: best_order([[1, 1]], [2], 2, in_flight=[1]),
            "in_flight: has 1 entries, but 2 are needed",
        ),
    ],
)
def test_numbers_that_do_not_fit_each_other_are_refused(call, message):
    """Kinds, stages and layers are easily mixed up."""
    with pytest.raises(PartitionError, match=message):
        call()


def test_every_search_returns_the_kinds_in_the_order_of_the_stages():
    """Stage 0 must be of the kind that is fast at layer 0, whichever number the kind has."""
    seconds = [[9.0, 1.0, 1.0, 1.0], [1.0, 9.0, 9.0, 9.0]]
    for states in (10**9, 0):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ordered, "PAIRS", 0)
            patch.setattr(ordered, "STATES", states)
            assert best_order(seconds, [1, 1], 2) == ([1, 3], [1, 0])
    for pairs in (10**9, 0):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ordered, "PAIRS", pairs)
            assert best_order(seconds[::-1], [1, 1], 2) == ([1, 3], [0, 1])
