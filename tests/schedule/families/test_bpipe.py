"""BPipe: the order of its greedy rule, its balance of memory, and its makespan, that of 1F1B."""

from __future__ import annotations

from itertools import groupby

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.schedule.families.laws import check_laws, timeline_of

from penstock.errors import ScheduleError
from penstock.schedule.catalogue import schedule
from penstock.schedule.op import ACTIVATION_MOVES, Kind, Op
from penstock.simulate.costs import Costs
from penstock.simulate.simulate import simulate_schedule
from penstock.verify.verify import verify

#: docs/literature/bpipe.md: p = 8, x = 0, m = 16.
EVICTOR = (
    "F0 F1 F2 F3 F4 E4 F5 E5 F6 E6 F7 B0 F8 B1 F9 B2 F10 B3 F11 E11 L4 B4 F12 E12 L5 B5 F13 E13 L6 B6 F14 B7 F15 B8 B9 "
    "B10 L11 B11 L12 B12 L13 B13 B14 B15"
)


def test_the_first_stage_has_the_order_of_the_literature():
    """The greedy rule: evict the newest when full, load right before the backward."""
    bpipe = schedule("bpipe", 8, 16)
    assert " ".join(str(op)[1:] for op in bpipe.programs[0] if op.kind is not Kind.U) == EVICTOR
    report = verify(bpipe)
    assert report.peak_on_rank == (5, 5, 5, 5, 4, 4, 4, 4)
    assert report.peak_in_flight[:4] == (5, 5, 5, 5)


def test_the_partner_takes_half_a_period_late_and_gives_half_a_period_early():
    """In both directions one micro-batch is in transit while both ranks compute."""
    assert str(schedule("bpipe", 4, 6)).splitlines() == [
        "rank 0 | 0F0 0F1 0F2 0E2 0F3 0B0 0F4 0B1 0F5 0E5 0L2 0B2 0B3 0B4 0L5 0B5 0U1",
        "rank 1 | 1F0 1F1 1F2 1B0 1F3 1B1 1F4 1B2 1F5 1B3 1B4 1B5 1U1",
        "rank 2 | 2F0 2F1 2B0 2F2 2B1 2F3 2B2 2F4 2B3 2F5 2B4 2B5 2U1",
        "rank 3 | 3F0 3B0 0E2 3F1 3B1 3F2 3B2 3F3 0L2 3B3 3F4 3B4 0E5 3F5 3B5 0L5 3U1",
    ]


@given(st.integers(1, 12), st.integers(1, 32), st.sampled_from([0.5, 1, 1.5, 2, 3]))
@settings(deadline=None, max_examples=60)
def test_bpipe_takes_the_time_of_1f1b_and_no_rank_holds_more_than_the_bound(p, m, ratio):
    """ceil((p + 2)/2) micro-batches on every evictor that would hold more, and never more on its
    partner.
    """
    bpipe = schedule("bpipe", p, m, ratio=ratio)
    bound = -(-(p + 2) // 2)
    peaks = check_laws(bpipe).peak_on_rank
    assert peaks[: p // 2] == tuple(min(m, p - x, bound) for x in range(p // 2))
    assert max(peaks) <= bound
    assert timeline_of(bpipe, 1, ratio).makespan == (m + p - 1) * (1 + ratio)


@given(
    st.integers(1, 8),
    st.integers(1, 32),
    st.sampled_from([(b, c) for b in (1.5, 2, 2.5, 3) for c in (0, 0.5, 1)]),
)
@settings(deadline=None, max_examples=60)
def test_other_backwards_or_slower_links_do_not_hold_it_up_either(p, m, b_and_c):
    """Made for b = 2f: there is room for b from 1.5f to 3f on free links, or for half a period of
    travel at b = 2f.
    """
    b, travel = b_and_c
    bpipe = schedule("bpipe", p, m)
    if travel == 0:
        assert timeline_of(bpipe, 1, b).makespan == (m + p - 1) * (1 + b)
    assert timeline_of(bpipe, 1, 2, offload=travel * 1.5).makespan == (m + p - 1) * 3


@given(st.integers(4, 10), st.integers(1, 24), st.sampled_from([1, 1.5, 2]))
@settings(deadline=None, max_examples=40)
def test_what_travels_is_one_micro_batch_more(p, m, ratio):
    """A rank holds what it is about to load as soon as it leaves the partner, and what it evicts
    until it is there.
    """
    line = simulate_schedule(
        schedule("bpipe", p, m, ratio=ratio),
        Costs(1, ratio, activation_bytes=1, boundary_buffers=False),
    )
    assert max(line.peak_memory) <= min(m, -(-(p + 2) // 2) + 1)


@given(st.integers(1, 10), st.integers(1, 24))
@settings(deadline=None, max_examples=40)
def test_but_for_evictions_and_loads_it_is_1f1b(p, m):
    """Without E and L the programs are those of 1F1B; below 4 stages no rank needs them."""
    bpipe, plain = schedule("bpipe", p, m), schedule("1f1b", p, m)
    assert (
        tuple(tuple(op for op in row if op.kind not in ACTIVATION_MOVES) for row in bpipe.programs)
        == plain.programs
    )
    handed = [op for op in bpipe.ops if op.kind in ACTIVATION_MOVES]
    assert bool(handed) == (p >= 4 and m > -(-(p + 2) // 2))
    assert all(op.stage < p // 2 for op in handed)


@pytest.mark.parametrize("stages", [4, 5, 6, 8])
@pytest.mark.parametrize("ratio", [0.05, 0.2, 0.5, 2, 9])
def test_a_partner_receives_before_its_own_forward_and_returns_after_its_own_backward(
    stages, ratio
):
    """Its forward needs that of the evictor and its backward comes first: neither then waits."""
    bpipe = schedule("bpipe", stages, 12, ratio=ratio)
    count = 0
    for rank in range(stages - stages // 2, stages):
        places = {op: place for place, op in enumerate(bpipe.programs[rank])}
        for op, place in places.items():
            if op.kind in ACTIVATION_MOVES:
                count += 1
                local = Kind.F if op.kind is Kind.E else Kind.B
                expected = places[Op(local, rank, op.micro_batch)]
                assert place < expected if op.kind is Kind.E else place > expected
    assert count > 0


@pytest.mark.parametrize("ratio", [0, -1, float("inf"), True, "2"])
def test_a_ratio_that_is_none_is_refused(ratio):
    """The places of E and L in the partner's program follow from the ratio."""
    with pytest.raises(
        ScheduleError, match="bpipe takes a ratio of backward to forward above 0, not"
    ):
        schedule("bpipe", 4, 8, ratio=ratio)


@pytest.mark.parametrize(
    ("stages", "micro_batches", "ratio", "moves"),
    [(6, 9, 1, "0L4 0E8"), (6, 6, 2, "0L3 0L4"), (8, 12, 2, "1E4 1E5")],
)
def test_moves_at_one_place_of_a_partner_stand_in_order(stages, micro_batches, ratio, moves):
    """L comes first, since it frees memory; of several the one of the lower micro-batch."""
    bpipe = schedule("bpipe", stages, micro_batches, ratio=ratio)
    groups = []
    for program in bpipe.programs[stages // 2 :]:
        for is_move, ops in groupby(program, key=lambda op: op.kind in ACTIVATION_MOVES):
            groups += [list(ops)] if is_move else []
    for ops in groups:
        assert ops == sorted(ops, key=lambda op: (op.kind is Kind.E, op.micro_batch))
    assert moves in [" ".join(map(str, ops)) for ops in groups]
