"""Hanayo: waves over the ranks, their order, time and memory."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.schedule.families.laws import check_laws, rows_of

from penstock.errors import ScheduleError
from penstock.schedule.catalogue import schedule
from penstock.schedule.placement import zigzag
from penstock.simulate.costs import Costs
from penstock.simulate.simulate import simulate_schedule

#: docs/literature/hanayo.md, p = 4, W = 1, m = 4.
ORDER = """\
0F0 0F1 0F2 0F3 7F0 7B0 7F1 7B1 7F2 7B2 7F3 7B3 0B0 0B1 0B2 0B3
1F0 1F1 1F2 1F3 6F0 6F1 6B0 6F2 6B1 6F3 6B2 1B0 6B3 1B1 1B2 1B3
2F0 2F1 2F2 5F0 2F3 5F1 5F2 5B0 5F3 5B1 2B0 5B2 2B1 5B3 2B2 2B3
3F0 4F0 3F1 4F1 3F2 4F2 3F3 4F3 4B0 3B0 4B1 3B1 4B2 3B2 4B3 3B3
"""

#: docs/literature/hanayo.md, the order made for b = 2f: p, W, m, makespan with f = 1 and b = 2 per rank.
SLOW_BACKWARDS = [(4, 1, 4, 18), (4, 2, 4, 15.25), (4, 4, 4, 13.625), (8, 1, 8, 38), (8, 2, 8, 31.5), (8, 4, 8, 27.75),
                  (4, 1, 8, 32.5)]  # fmt: skip


def seconds(schedule, waves, f, b):
    """Makespan with f and b per rank."""
    return simulate_schedule(
        schedule, Costs(forward=f / (2 * waves), backward=b / (2 * waves))
    ).makespan


def test_hanayo_has_the_order_of_the_literature():
    """The order that another list scheduler makes by the same rule."""
    assert rows_of(schedule("hanayo", 8, 4)) == ORDER.splitlines()


@pytest.mark.parametrize(("p", "waves", "m", "makespan"), SLOW_BACKWARDS)
def test_hanayo_ordered_for_slow_backwards_agrees_with_the_literature(p, waves, m, makespan):
    """Another program computed the times of docs/literature/hanayo.md by the same rule."""
    assert (
        seconds(schedule("hanayo", 2 * waves * p, m, waves=waves, ratio=2), waves, 1, 2) == makespan
    )


@pytest.mark.parametrize(
    ("p", "waves", "m", "makespan"), [row for row in SLOW_BACKWARDS if row[1] > 1]
)
def test_hanayo_with_several_waves_ordered_for_equal_times_is_faster_in_one_unit(
    p, waves, m, makespan
):
    """Greed is no optimum: with m = p the plain order beats the one made for these very times
    (docs/literature/hanayo.md warns).
    """
    assert seconds(schedule("hanayo", 2 * waves * p, m, waves=waves), waves, 1, 2) < makespan


@given(st.integers(1, 6), st.integers(1, 14))
@settings(deadline=None, max_examples=40)
def test_with_one_wave_the_order_made_for_slow_backwards_is_never_slower_with_them(p, m):
    """The order for the actual ratio of b to f is no slower, though it may hold more micro-batches."""
    plain, slow_backward = (schedule("hanayo", 2 * p, m, ratio=ratio) for ratio in (1, 2))
    assert seconds(slow_backward, 1, 1, 2) <= seconds(plain, 1, 1, 2)


@pytest.mark.parametrize("waves", [1, 2, 4])
@pytest.mark.parametrize("p", [1, 2, 3, 4, 8])
def test_the_bubble_shrinks_with_the_waves(p, waves):
    """docs/literature/hanayo.md: 2m + (p - 1)/W and a ratio of (p - 1)/(2Wm + p - 1), f = b = 1 per rank;
    other m pay for the gap.
    """
    for m in (*range(1, p + 2), 2 * p, 3 * p):
        hanayo = schedule("hanayo", 2 * waves * p, m, waves=waves)
        missing = -m % p
        assert seconds(hanayo, waves, 1, 1) == pytest.approx(
            2 * m + (p - 1) / waves + missing * (2 - 1 / waves)
        )
        if missing == 0:
            ratio = simulate_schedule(hanayo, Costs(forward=1, backward=1)).bubble_ratio
            assert ratio == pytest.approx((p - 1) / (2 * waves * m + p - 1))


@given(st.integers(1, 6), st.integers(1, 3), st.integers(1, 14))
@settings(deadline=None, max_examples=50)
def test_no_rank_holds_more_than_p_micro_batches(p, waves, m):
    """In whole ranks' worth of stages: a micro-batch that passed all 2W stages of a rank counts as
    one.
    """
    hanayo = schedule("hanayo", 2 * waves * p, m, waves=waves)
    assert max(check_laws(hanayo).peak_on_rank) == 2 * waves * min(m, p)
    assert hanayo.ranks_of_stage == tuple((rank,) for rank in zigzag(2 * waves * p, p))


@given(st.integers(1, 5), st.integers(1, 3), st.integers(1, 10), st.floats(0.05, 20))
@settings(deadline=None, max_examples=40)
def test_any_ratio_makes_a_sound_order(p, waves, m, ratio):
    """The ratio changes the order of ops, and every order must be sound."""
    check_laws(schedule("hanayo", 2 * waves * p, m, waves=waves, ratio=ratio))


def test_stages_that_make_no_whole_waves_are_refused():
    """The last wave would not come back to the first rank."""
    with pytest.raises(
        ScheduleError,
        match="hanayo with waves=2 has 4 stages on every rank, so it takes a multiple of 4 stages, "
        "not 6: use 4 or 8, or another value of waves",
    ):
        schedule("hanayo", 6, 4, waves=2)
    with pytest.raises(ScheduleError, match=r"hanayo needs at least 1 of waves and got 1\.5"):
        schedule("hanayo", 6, 4, waves=1.5)


@pytest.mark.parametrize("ratio", [0, -1, float("inf"), float("nan"), "2", True, None])
def test_a_ratio_that_orders_nothing_is_refused(ratio):
    """Ops of no seconds, or of infinitely many, cannot be ordered by their times."""
    with pytest.raises(
        ScheduleError, match="hanayo takes a ratio of backward to forward above 0, not "
    ):
        schedule("hanayo", 4, 4, ratio=ratio)


def slow_rows(ranks, waves, micro_batches, ratio):
    """The rule of the docstring, by looking at all ops at every moment: whenever a rank is idle, it
    starts a ready backward of the smallest micro-batch, or else a ready forward of the latest stage.
    """
    stages = 2 * waves * ranks
    turn = [*range(ranks), *reversed(range(ranks))]
    end_of, idle_from, rows, now = {}, [0.0] * ranks, [[] for _ in range(ranks)], 0.0
    left = {(kind, s, m) for kind in "FB" for s in range(stages) for m in range(micro_batches)}

    def is_ready(kind, stage, m):
        """Whether all inputs of an op are there now."""
        inputs = [("F", stage - 1, m)] if stage else []
        if kind == "B":
            inputs = [("F", stage, m)] + ([("B", stage + 1, m)] if stage + 1 < stages else [])
        return all(end_of.get(other, math.inf) <= now for other in inputs)

    while left:
        for rank in range(ranks):
            ready = [op for op in left if turn[op[1] % (2 * ranks)] == rank and is_ready(*op)]
            if ready and idle_from[rank] <= now:
                kind, stage, m = min(
                    ready, key=lambda op: (0, op[2]) if op[0] == "B" else (1, -op[1], op[2])
                )
                left.remove((kind, stage, m))
                rows[rank].append(f"{stage}{kind}{m}")
                idle_from[rank] = end_of[kind, stage, m] = now + (ratio if kind == "B" else 1)
        now = min((end for end in end_of.values() if end > now), default=now)
    return [" ".join(row) for row in rows]


@pytest.mark.parametrize(
    ("ranks", "waves", "micro_batches"),
    [(1, 2, 3), (2, 1, 5), (2, 2, 3), (2, 3, 4), (3, 1, 4), (3, 2, 5), (4, 1, 6)],
)
@pytest.mark.parametrize("ratio", [0.5, 1, 2, 3])
def test_the_order_is_that_of_a_search_over_all_ops(ranks, waves, micro_batches, ratio):
    """Ranks, waves, micro-batches and ratios of all sorts."""
    hanayo = schedule("hanayo", 2 * waves * ranks, micro_batches, waves=waves, ratio=ratio)
    assert rows_of(hanayo) == slow_rows(ranks, waves, micro_batches, ratio)
