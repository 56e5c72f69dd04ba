"""Programs from a building block: filled, reordered within the memory of its repetition, squeezed."""

from __future__ import annotations

from itertools import accumulate

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.schedule.families.laws import rows_of
from tests.schedule.families.split_laws import split_timeline
from tests.schedule.families.test_v_memory import ORDERS, bubble_of

from penstock.schedule.catalogue import schedule
from penstock.schedule.list_schedule import from_block
from penstock.schedule.op import Kind, Schedule
from penstock.schedule.updates import with_updates
from penstock.verify.verify import verify


def line_block(ranks, wait):
    """One stage on every rank: F goes up slot by slot, I comes down, `wait` slots later than it
    could.
    """
    return [
        {(Kind.F, rank): rank, (Kind.I, rank): 2 * ranks + wait - 1 - rank} for rank in range(ranks)
    ]


def clashes(block, interval):
    """Whether two ops of a rank come to stand in one slot."""
    return any(len({slot % interval for slot in rank.values()}) < len(rank) for rank in block)


def test_w_fills_the_slots_that_the_block_leaves_free():
    """One rank has nothing to wait for."""
    assert [" ".join(map(str, row)) for row in from_block(line_block(1, 0), 3, 3)] == [
        "0F0 0I0 0W0 0F1 0I1 0W1 0F2 0I2 0W2"
    ]


def test_in_the_cool_down_w_makes_way_for_i():
    """Earlier ranks wait for I, and no rank waits for W."""
    assert [" ".join(map(str, row)) for row in from_block(line_block(2, 1), 3, 3)] == [
        "0F0 0F1 0I0 0W0 0F2 0I1 0W1 0I2 0W2",
        "1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2",
    ]


@given(st.integers(1, 7), st.integers(0, 8), st.integers(3, 5), st.integers(1, 24))
@settings(deadline=None, max_examples=80)
def test_any_block_makes_a_sound_schedule_in_the_memory_of_its_repetition(
    ranks, wait, interval, micro_batches
):
    """Its promise: lifespans / interval activations, however many micro-batches follow one another."""
    block = line_block(ranks, wait)
    if clashes(block, interval):
        return
    programs = from_block(block, interval, micro_batches)
    verify(Schedule(tuple(map(with_updates, programs))))
    peaks = [
        max(accumulate((op.kind is Kind.F) - (op.kind is Kind.W) for op in program))
        for program in programs
    ]
    # A W stands at most an interval behind its I, wherever a slot is free.
    longest = (
        max(rank[Kind.I, stage] - rank[Kind.F, stage] for stage, rank in enumerate(block))
        + interval
    )
    assert max(peaks) <= min(micro_batches, -(-longest // interval) + 1)


@pytest.mark.parametrize(("ranks", "wait"), [(1, 4), (1, 7), (2, 1), (2, 4)])
@pytest.mark.parametrize("micro_batches", [2, 3, 7])
def test_ops_of_a_stage_stay_in_the_order_of_their_micro_batches(ranks, wait, micro_batches):
    """Also where a free slot before the op of an earlier micro-batch would be early enough."""
    block = line_block(ranks, wait)
    assert not clashes(block, 3)
    for program in from_block(block, 3, micro_batches):
        for kind in (Kind.F, Kind.I, Kind.W):
            numbers = [op.micro_batch for op in program if op.kind is kind]
            assert numbers == list(range(micro_batches))


def test_a_block_that_clashes_with_itself_is_our_own_bug():
    """Offsets are written by a family's author, not by users."""
    with pytest.raises(AssertionError, match="two ops in one slot"):
        from_block([{(Kind.F, 0): 0, (Kind.I, 0): 3}], 3, 2)


def test_waiting_weight_gradients_of_later_stages_come_first():
    """Their activations were produced last: here those of stage 0 wait longer."""
    block = [{(Kind.F, 0): 0, (Kind.F, 1): 1, (Kind.I, 1): 2, (Kind.I, 0): 3}]
    assert [" ".join(map(str, row)) for row in from_block(block, 6, 2)] == [
        "0F0 1F0 1I0 0I0 1W0 0W0 0F1 1F1 1I1 0I1 1W1 0W1"
    ]


@given(st.integers(1, 4), st.integers(1, 8), st.integers(0, 2), st.integers(0, 2))
@settings(max_examples=60)
def test_a_v_keeps_the_memory_of_its_repetition_and_its_w_the_order_of_stages(
    ranks, micro_batches, wait, turn
):
    """Two stages to a rank: a W of an earlier stage comes before one of a later stage only if the
    later one had no I yet.
    """
    down = 2 * ranks + turn
    block = []
    for rank in range(ranks):
        front, back = rank, 2 * ranks - 1 - rank
        slots = {(Kind.F, front): front, (Kind.F, back): back}
        slots |= {(Kind.I, back): down + wait + rank, (Kind.I, front): down + wait + back}
        block.append(slots)
    if clashes(block, 6):
        return
    programs = from_block(block, 6, micro_batches)
    verify(Schedule(tuple(map(with_updates, programs))))
    for rank, program in enumerate(programs):
        back = 2 * ranks - 1 - rank
        waiting = 0
        for op in program:
            waiting += (op.kind is Kind.I) * (op.stage == back)
            waiting -= (op.kind is Kind.W) * (op.stage == back)
            assert not (op.kind is Kind.W and op.stage == rank and waiting)


@pytest.mark.parametrize("name", ["v-half", "v-min"])
def test_the_blocks_of_the_paper_make_the_programs_of_its_authors(name):
    """Four ranks and eight micro-batches, op by op: every pass has its part in their order."""
    assert rows_of(schedule(name, 8, 8)) == ORDERS[name].splitlines()


@pytest.mark.parametrize("name", ["v-half", "v-min"])
@pytest.mark.parametrize("ranks", range(2, 7))
def test_few_micro_batches_take_no_longer_than_the_closed_form(name, ranks):
    """It holds from m = p on; with fewer, ops of the warm-up and the cool-down move into the gaps,
    as long as no rank exceeds the memory of the rank that has most.
    """
    for micro_batches in range(ranks // 2 + 1, ranks):
        line = split_timeline(schedule(name, 2 * ranks, micro_batches), 0.5, 0.5, 0.5)
        assert line.makespan <= 3 * micro_batches + bubble_of(name, ranks)
