"""ZB-V: its order, its time by both definitions of a bubble, its memory."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.schedule.families.laws import check_row, rows_of, without_updates
from tests.schedule.families.split_laws import (
    check_gradients,
    check_split,
    longest_span,
    split_timeline,
)

from penstock.errors import ScheduleError
from penstock.schedule.catalogue import schedule
from penstock.schedule.placement import vee

#: docs/literature/simulated-values.md, rows zb-v: p, m, makespan, bubble ratio; p micro-batches in flight on every
#: rank.
ROWS = [(2, 4, 12.5, 0.0400), (2, 8, 24.5, 0.0204), (4, 8, 25.5, 0.0588), (4, 16, 49.5, 0.0303), (8, 16, 51.5, 0.0680),
        (8, 32, 99.5, 0.0352)]  # fmt: skip

#: docs/literature/simulated-values.md, p = 4, m = 8, the closed form.
ORDER = """\
0F0 0F1 0F2 0F3 0F4 0F5 0F6 7F0 7I0 7W0 7F1 7I1 7W1 7F2 7I2 7W2 7F3 7I3 7W3 0F7 0I0 0W0 7F4 7I4 7W4 0I1 0W1 7F5 7I5 7W5 \
0I2 0W2 7F6 7I6 7W6 0I3 0W3 7F7 7I7 7W7 0I4 0W4 0I5 0W5 0I6 0W6 0I7 0W7
1F0 1F1 1F2 1F3 1F4 6F0 1F5 6F1 6I0 6W0 6F2 6I1 6W1 6F3 6I2 6W2 1F6 1I0 1W0 6F4 6I3 6W3 1F7 1I1 1W1 6F5 6I4 6W4 1I2 1W2 \
6F6 6I5 6W5 1I3 1W3 6F7 6I6 6W6 1I4 6I7 1I5 1W4 1I6 1W5 1I7 1W6 6W7 1W7
2F0 2F1 2F2 5F0 2F3 5F1 2F4 5F2 5I0 5W0 5F3 5I1 5W1 2F5 2I0 2W0 5F4 5I2 5W2 2F6 2I1 2W1 5F5 5I3 5W3 2F7 2I2 2W2 5F6 5I4 \
5W4 2I3 2W3 5F7 5I5 5W5 2I4 5I6 2I5 5I7 2I6 2W4 2I7 2W5 5W6 5W7 2W6 2W7
3F0 4F0 3F1 4F1 3F2 4F2 3F3 4F3 4I0 4W0 3F4 3I0 3W0 4F4 4I1 4W1 3F5 3I1 3W1 4F5 4I2 4W2 3F6 3I2 3W2 4F6 4I3 4W3 3F7 3I3 \
3W3 4F7 4I4 4W4 3I4 4I5 3I5 4I6 3I6 4I7 3I7 3W4 4W5 4W6 4W7 3W5 3W6 3W7"""


def test_zb_v_has_the_published_order():
    """The closed form, op by op."""
    assert rows_of(schedule("zb-v", 8, 8)) == ORDER.splitlines()


def test_torchs_own_zb_v_has_the_same_order():
    """The order of another implementation, with few micro-batches too."""
    from torch.distributed.pipelining.schedules import (
        ScheduleZBVZeroBubble,
    )  # here: planning's other tests need no torch

    for p in range(1, 6):
        for m in (1, p, 2 * p - 1, 2 * p + 1, 3 * p):
            theirs = SimpleNamespace(
                n_local_stages=2, num_stages=2 * p, pp_group_size=p, _n_microbatches=m
            )
            for rank, row in enumerate(without_updates(schedule("zb-v", 2 * p, m))):
                actions = ScheduleZBVZeroBubble._calculate_single_rank_operations(theirs, rank)
                assert [str(action) for action in actions if action is not None] == row


@pytest.mark.parametrize(("p", "m", "makespan", "ratio"), ROWS)
def test_zb_v_agrees_with_the_table_of_the_literature(p, m, makespan, ratio):
    """The oracle was made by another simulator; its ratio is of the makespan."""
    check_row(schedule("zb-v", 2 * p, m), 2, makespan, ratio, (p,) * p)


@pytest.mark.parametrize("p", [*range(1, 9), 12, 16])
def test_zb_v_has_no_bubble_in_the_span_and_half_of_p_minus_1_in_the_makespan(p):
    """docs/literature/zero-bubble.md, p 2..16: zero bubble at the peak of 1F1B."""
    for m in (2 * p, 3 * p + 1) if p < 8 else (2 * p,):
        zb_v = schedule("zb-v", 2 * p, m)
        line = split_timeline(zb_v, 0.5, 0.5, 0.5)
        assert line.span_bubble_ratio == 0
        assert longest_span(line) == 3 * m
        assert line.makespan == 3 * m + (p - 1) / 2
        assert check_split(zb_v).peak_on_rank == (2 * p,) * p


@given(st.integers(1, 7), st.integers(1, 16))
@settings(deadline=None, max_examples=60)
def test_zb_v_of_any_size_is_sound_and_holds_no_more_than_p_micro_batches(p, m):
    """Below 2p - 1 micro-batches parts of the order are missing; what is left must still fit
    together.
    """
    zb_v = schedule("zb-v", 2 * p, m)
    assert max(check_split(zb_v).peak_on_rank) <= 2 * min(m, p)
    assert zb_v.ranks_of_stage == tuple((rank,) for rank in vee(2 * p, p))


@pytest.mark.parametrize(("stages", "around"), [(1, "2"), (3, "2 or 4"), (7, "6 or 8")])
def test_zb_v_of_an_odd_number_of_stages_is_refused(stages, around):
    """With an odd number one rank would have only one stage."""
    with pytest.raises(
        ScheduleError,
        match="zb-v goes down the ranks and back up, with two stages on each: it takes an even number "
        f"of stages and got {stages}; use {around}$",
    ):
        schedule("zb-v", stages, 8)


@pytest.mark.parametrize(("p", "m"), [(1, 2), (2, 5), (4, 4)])
def test_gradients_are_those_of_one_stage_to_the_bit(p, m):
    """A V and a split backward must not change what is learned."""
    check_gradients(schedule("zb-v", 2 * p, m))
