"""Breadth-first: interleaved's time with GPipe's memory, and every stage's work in one stretch."""

from __future__ import annotations

from itertools import groupby
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.schedule.families.laws import check_laws, check_row, without_updates

from penstock.errors import ScheduleError
from penstock.schedule.catalogue import schedule
from penstock.schedule.op import Kind
from penstock.schedule.placement import ring
from penstock.simulate.costs import Costs
from penstock.simulate.simulate import simulate_schedule
from penstock.verify.verify import verify

#: docs/literature/simulated-values.md, rows breadth-first v=2: p, m, makespan, bubble ratio. In flight: m whole stages
#: on every rank.
ROWS = [(2, 2, 7.5, 0.2000), (2, 4, 13.5, 0.1111), (2, 8, 25.5, 0.0588), (4, 4, 16.5, 0.2727), (4, 8, 28.5, 0.1579),
        (4, 16, 52.5, 0.0857), (8, 8, 34.5, 0.3043), (8, 16, 58.5, 0.1795), (8, 32, 106.5, 0.0986)]  # fmt: skip


@pytest.mark.parametrize("order", ["forward", "reverse"])
@pytest.mark.parametrize(("p", "m", "makespan", "ratio"), ROWS)
def test_breadth_first_agrees_with_the_table_of_the_literature(p, m, makespan, ratio, order):
    """Values of docs/literature/simulated-values.md, which another simulator computed."""
    check_row(
        schedule("breadth-first", 2 * p, m, chunks=2, backward_order=order),
        2,
        makespan,
        ratio,
        (m,) * p,
    )


@given(
    st.integers(1, 6),
    st.integers(1, 4),
    st.integers(1, 16),
    st.integers(1, 9),
    st.integers(1, 9),
    st.sampled_from(["forward", "reverse"]),
)
@settings(deadline=None, max_examples=60)
def test_breadth_first_takes_interleaveds_time_where_the_ring_is_full(p, v, m, f, b, order):
    """m(f + b) + (p - 1)(f + b)/v for m >= p; below, a rank waits in every round for the ring to
    come round.
    """
    breadth_first = schedule("breadth-first", v * p, m, chunks=v, backward_order=order)
    report = check_laws(breadth_first) if order == "forward" else verify(breadth_first)
    assert report.peak_on_rank == (m * v,) * p
    assert breadth_first.ranks_of_stage == tuple((rank,) for rank in ring(v * p, p))
    assert simulate_schedule(breadth_first, Costs(forward=f, backward=b)).makespan == (
        (v - 1) * max(m, p) + m + p - 1
    ) * (f + b)


@pytest.mark.parametrize("order", ["forward", "reverse"])
def test_every_stage_works_in_one_stretch_forward_and_one_backward(order):
    """The point of the order: sharded weights are gathered once for each, and gradients reduced
    once.
    """
    for program in schedule("breadth-first", 12, 5, chunks=3, backward_order=order).programs:
        stretches = [
            key
            for key, _ in groupby((op.kind, op.stage) for op in program if op.kind is not Kind.U)
        ]
        assert len(stretches) == 6


@given(st.integers(1, 6), st.integers(1, 12), st.sampled_from(["forward", "reverse"]))
@settings(deadline=None, max_examples=30)
def test_breadth_first_with_one_stage_on_every_rank_is_gpipe(p, m, order):
    """Its programs are those of GPipe, for both orders of backwards."""
    breadth_first = schedule("breadth-first", p, m, chunks=1, backward_order=order)
    assert breadth_first.programs == schedule("gpipe", p, m, backward_order=order).programs


def test_breadth_first_in_reverse_runs_the_last_micro_batch_back_first():
    """torch's ScheduleLoopedBFS, for those who compare with it (docs/literature/interleaved.md)."""
    breadth_first = schedule("breadth-first", 4, 2, backward_order="reverse")
    assert str(breadth_first).splitlines()[0] == "rank 0 | 0F0 0F1 2F0 2F1 2B1 2B0 2U1 0B1 0B0 0U1"
    assert [op.micro_batch for op in breadth_first.ops if op.kind is Kind.B] == [1, 0] * 4


def test_torchs_own_looped_bfs_has_the_same_order():
    """The order of another implementation, which has been run."""
    from torch.distributed.pipelining.schedules import (
        ScheduleLoopedBFS,
    )  # here: planning's other tests need no torch

    for p, v, m in ((2, 2, 2), (2, 3, 4), (4, 2, 8), (3, 2, 1)):
        theirs = SimpleNamespace(_stages=range(v), pp_group_size=p, _n_microbatches=m)
        for rank, row in enumerate(
            without_updates(schedule("breadth-first", p * v, m, chunks=v, backward_order="reverse"))
        ):
            actions = ScheduleLoopedBFS._calculate_single_rank_operations(theirs, rank)
            assert [str(action) for action in actions if action is not None] == row


def test_looped_bfs_is_another_name():
    """torch's."""
    assert schedule("looped-bfs", 4, 4) == schedule("breadth-first", 4, 4)


def test_numbers_and_words_that_breadth_first_does_not_take_are_refused():
    """Each message has the value that was given and the values that are valid."""
    with pytest.raises(
        ScheduleError,
        match="breadth-first with chunks=3 has 3 stages on every rank, so it takes a multiple of 3 "
        "stages, not 8: use 6 or 9, or another value of chunks",
    ):
        schedule("breadth-first", 8, 8, chunks=3)
    with pytest.raises(ScheduleError, match="breadth-first needs at least 1 of chunks and got -2"):
        schedule("breadth-first", 8, 8, chunks=-2)
    with pytest.raises(
        ScheduleError,
        match="breadth-first takes backward_order 'forward' or 'reverse', not 'sideways'",
    ):
        schedule("breadth-first", 8, 8, backward_order="sideways")
