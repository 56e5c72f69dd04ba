"""Interleaved 1F1B: its order, its time, its memory, and the groups that it takes."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tests.schedule.families.laws import check_laws, check_row, rows_of, without_updates

from penstock.errors import ScheduleError
from penstock.schedule.catalogue import schedule
from penstock.schedule.placement import ring
from penstock.simulate.costs import Costs
from penstock.simulate.simulate import simulate_schedule

#: docs/literature/simulated-values.md, rows interleaved v=2: p, m, makespan, bubble ratio, peaks in whole stages.
ROWS = [
    (2, 2, 7.5, 0.2000, (2, 1.5)), (2, 4, 13.5, 0.1111, (2.5, 1.5)), (2, 8, 25.5, 0.0588, (2.5, 1.5)),
    (4, 4, 16.5, 0.2727, (4, 4, 3.5, 2.5)), (4, 8, 28.5, 0.1579, (5.5, 4.5, 3.5, 2.5)),
    (4, 16, 52.5, 0.0857, (5.5, 4.5, 3.5, 2.5)),
    (8, 8, 34.5, 0.3043, (8, 8, 8, 8, 7.5, 6.5, 5.5, 4.5)), (8, 16, 58.5, 0.1795, (11.5, 10.5, 9.5, 8.5, 7.5, 6.5, 5.5, 4.5)),
    (8, 32, 106.5, 0.0986, (11.5, 10.5, 9.5, 8.5, 7.5, 6.5, 5.5, 4.5)),
]  # fmt: skip

#: docs/literature/simulated-values.md, p = 4, m = 8, v = 2.
ORDER = """\
0F0 0F1 0F2 0F3 4F0 4F1 4F2 4F3 0F4 0F5 0F6 4B0 0F7 4B1 4F4 4B2 4F5 4B3 4F6 0B0 4F7 0B1 0B2 0B3 4B4 4B5 4B6 4B7 0B4 0B5 0B6 0B7
1F0 1F1 1F2 1F3 5F0 5F1 5F2 5F3 1F4 5B0 1F5 5B1 1F6 5B2 1F7 5B3 5F4 1B0 5F5 1B1 5F6 1B2 5F7 1B3 5B4 5B5 5B6 5B7 1B4 1B5 1B6 1B7
2F0 2F1 2F2 2F3 6F0 6F1 6F2 6B0 6F3 6B1 2F4 6B2 2F5 6B3 2F6 2B0 2F7 2B1 6F4 2B2 6F5 2B3 6F6 6B4 6F7 6B5 6B6 6B7 2B4 2B5 2B6 2B7
3F0 3F1 3F2 3F3 7F0 7B0 7F1 7B1 7F2 7B2 7F3 7B3 3F4 3B0 3F5 3B1 3F6 3B2 3F7 3B3 7F4 7B4 7F5 7B5 7F6 7B6 7F7 7B7 3B4 3B5 3B6 3B7
"""


def test_interleaved_has_the_published_order():
    """Megatron-LM's schedule table, op by op."""
    assert rows_of(schedule("interleaved", 8, 8)) == ORDER.splitlines()


@pytest.mark.parametrize(("p", "m", "makespan", "ratio", "peaks"), ROWS)
def test_interleaved_agrees_with_the_table_of_the_literature(p, m, makespan, ratio, peaks):
    """Values of docs/literature/simulated-values.md, which another simulator computed."""
    check_row(schedule("interleaved", 2 * p, m, chunks=2), 2, makespan, ratio, peaks)


def test_torchs_own_interleaved_1f1b_has_the_same_order():
    """The order of another implementation; its rounds of micro-batches are groups here."""
    from torch.distributed.pipelining.schedules import (
        ScheduleInterleaved1F1B,
    )  # here: planning's other tests need no torch

    for p, v, m in ((2, 2, 4), (4, 2, 8), (4, 3, 10), (2, 3, 6), (3, 2, 3), (1, 2, 3)):
        group = m // (m // p)
        theirs = SimpleNamespace(
            n_local_stages=v, microbatches_per_round=group, pp_group_size=p, _n_microbatches=m
        )
        for rank, row in enumerate(
            without_updates(schedule("interleaved", p * v, m, chunks=v, group=group))
        ):
            actions = ScheduleInterleaved1F1B._calculate_single_rank_operations(theirs, rank)
            assert [str(action) for action in actions if action is not None] == row


@given(
    st.integers(1, 6),
    st.integers(1, 4),
    st.integers(1, 18),
    st.none() | st.integers(1, 18),
    st.integers(1, 9),
    st.integers(1, 9),
)
@settings(deadline=None, max_examples=100)
def test_the_bubble_shrinks_with_the_stages_of_a_rank_for_every_group_that_is_taken(
    p, v, m, group, f, b
):
    """(p - 1)(f + b)/v, at (v - 1)g more in flight: the bargain of Megatron-LM's virtual stages."""
    try:
        interleaved = schedule("interleaved", v * p, m, chunks=v, group=group)
    except ScheduleError:
        assert m < p or (group is not None and (not p <= group <= m or 0 < m % group < p))
        return
    size = group or next(g for g in range(p, m + 1) if m % g == 0 or m % g >= p)
    assert check_laws(interleaved).peak_on_rank == tuple(
        min(m * v, 2 * (p - r - 1) + (v - 1) * size + 1) for r in range(p)
    )
    assert [interleaved.ranks_of_stage[stage] for stage in range(v * p)] == [
        (rank,) for rank in ring(v * p, p)
    ]
    assert simulate_schedule(interleaved, Costs(forward=f, backward=b)).makespan == (
        m * v + p - 1
    ) * (f + b)


@given(st.integers(1, 6), st.integers(1, 12))
@settings(deadline=None, max_examples=30)
def test_interleaved_with_one_stage_on_every_rank_is_eager_1f1b(p, m):
    """With one stage per rank the warm-up is that of eager 1F1B, 2(p - r) - 1 forwards."""
    assume(m >= p)
    assert schedule("interleaved", p, m, chunks=1).programs == schedule("eager-1f1b", p, m).programs


@pytest.mark.parametrize(
    ("ranks", "micro_batches", "size"),
    [(4, 8, 4), (4, 9, 5), (4, 6, 6), (4, 7, 7), (3, 16, 4), (1, 5, 1)],
)
def test_the_least_group_that_leaves_none_too_small_is_taken(ranks, micro_batches, size):
    """The least memory; p where p divides m, as in the paper."""
    interleaved = schedule("interleaved", 2 * ranks, micro_batches)
    assert (
        interleaved.programs
        == schedule("interleaved", 2 * ranks, micro_batches, group=size).programs
    )


@pytest.mark.parametrize("group", [3, 5, 9, 0, True, "4", 4.0])
def test_a_group_that_would_leave_ranks_waiting_is_refused_with_those_that_do(group):
    """Megatron-LM's rule: with fewer than p in a group the schedule has other bubbles, or hangs."""
    with pytest.raises(
        ScheduleError,
        match=r"interleaved on 4 ranks cannot run 8 micro-batches in groups of .*: every group, the "
        r"last too, needs 4 or more; groups of 4, 8 do",
    ):
        schedule("interleaved", 8, 8, group=group)


def test_fewer_micro_batches_than_ranks_are_refused():
    """A round over the ranks could not be filled."""
    with pytest.raises(
        ScheduleError, match="interleaved on 4 ranks takes 4 or more micro-batches, not 3"
    ):
        schedule("interleaved", 8, 3)


def test_stages_that_the_ranks_cannot_share_evenly_are_refused():
    """The number of a stage would not determine its rank."""
    with pytest.raises(
        ScheduleError,
        match="interleaved with chunks=2 has 2 stages on every rank, so it takes a multiple of 2 "
        "stages, not 7: use 6 or 8, or another value of chunks",
    ):
        schedule("interleaved", 7, 8)
    with pytest.raises(ScheduleError, match="interleaved needs at least 1 of chunks and got 0"):
        schedule("interleaved", 8, 8, chunks=0)
