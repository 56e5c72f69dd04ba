"""Interleaved zero bubble: torch's order, its time and memory, and the files that torch reads."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.schedule.families.laws import rows_of, without_updates
from tests.schedule.families.split_laws import check_gradients, check_split, split_timeline

from penstock.errors import ScheduleError
from penstock.schedule.catalogue import schedule
from penstock.schedule.torch_csv.files import from_csv, to_csv

NAME = "interleaved-zero-bubble"

#: Printed by torch 2.13: 2 ranks, 2 stages on each, 4 micro-batches.
ORDER = """\
0F0 0F1 2F0 2F1 2I0 2W0 0F2 2I1 2W1 0F3 0I0 0W0 2F2 0I1 0W1 2F3 2I2 2W2 2I3 2W3 0I2 0W2 0I3 0W3
1F0 1F1 3F0 3I0 3F1 3I1 3W0 1F2 1I0 3W1 1F3 1I1 1W0 3F2 3I2 1W1 3F3 3I3 3W2 1I2 3W3 1I3 1W2 1W3
"""


def torch_rows(ranks: int, chunks: int, micro_batches: int, group: int) -> list[list[str]]:
    """Return the programs that torch makes, without its empty slots."""
    from torch.distributed.pipelining.schedules import (
        ScheduleInterleavedZeroBubble,
    )  # here: planning's other tests need no torch

    settings_of_torch = SimpleNamespace(
        n_local_stages=chunks,
        microbatches_per_round=group,
        pp_group_size=ranks,
        _n_microbatches=micro_batches,
    )
    rows = []
    for rank in range(ranks):
        actions = ScheduleInterleavedZeroBubble._calculate_single_rank_operations(
            settings_of_torch, rank
        )
        rows.append([str(action) for action in actions if action is not None])
    return rows


def test_the_order_is_the_one_that_torch_prints():
    """To the op; kept here as text, so that the test holds without torch."""
    assert rows_of(schedule(NAME, 4, 4)) == ORDER.splitlines()


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("chunks", [1, 2, 3])
def test_torch_generates_the_same_programs(ranks, chunks):
    """For every number of micro-batches that torch takes: a multiple of its number of groups."""
    for micro_batches in range(ranks, 4 * ranks + 2):
        groups = micro_batches // ranks
        if micro_batches % groups:
            continue
        group = micro_batches // groups
        zero_bubble = schedule(NAME, ranks * chunks, micro_batches, chunks=chunks, group=group)
        theirs = torch_rows(ranks, chunks, micro_batches, group)
        assert without_updates(zero_bubble) == theirs


sizes = st.tuples(st.integers(1, 5), st.integers(1, 4), st.integers(0, 12))


@given(
    sizes,
    st.none() | st.integers(1, 16),
    st.integers(1, 9),
    st.tuples(st.integers(0, 8), st.integers(0, 8)),
)
@settings(deadline=None, max_examples=80)
def test_the_bubble_is_that_of_zb_h1_divided_by_the_stages_of_a_rank(size, group, w, longer):
    """(p - 1)(f + i - w)/v for w <= f and w <= i, whatever the group."""
    p, v, more = size
    m, f, i = p + more, w + longer[0], w + longer[1]
    try:
        zero_bubble = schedule(NAME, v * p, m, chunks=v, group=group)
    except ScheduleError:
        assert group is not None
        assert not p <= group <= m or 0 < m % group < p
        return
    makespan = split_timeline(zero_bubble, f, i, w).makespan
    assert makespan == m * v * (f + i + w) + (p - 1) * (f + i - w)
    size_of_group = group or next(g for g in range(p, m + 1) if m % g == 0 or m % g >= p)
    report = check_split(zero_bubble)
    assert report.peak_on_rank == (min(m * v, (v - 1) * size_of_group + p),) * p


@given(st.integers(1, 6), st.integers(0, 8))
@settings(deadline=None, max_examples=30)
def test_with_one_stage_on_every_rank_it_is_zb_h1(p, more):
    """With one stage per rank the warm-up and the delay of W are those of ZB-H1."""
    m = p + more
    assert schedule(NAME, p, m, chunks=1).programs == schedule("zb-h1", p, m).programs


def test_it_goes_to_torchs_csv_and_back():
    """torch reads the file and adds the transfers; with transfers, the file is checked on reading."""
    zero_bubble = schedule("interleaved-zb", 8, 8)
    for communication in (False, True):
        read = from_csv(to_csv(zero_bubble, communication))
        assert without_updates(read) == without_updates(zero_bubble)


def test_gradients_are_those_of_one_stage():
    """Loss and gradients to the bit, on two ranks with two stages each."""
    check_gradients(schedule(NAME, 4, 3))


def test_groups_and_stages_that_do_not_fit_are_refused_by_its_own_name():
    """Groups have the rules of `interleaved`, and the message has the name of this family."""
    with pytest.raises(
        ScheduleError,
        match=f"{NAME} on 4 ranks cannot run 8 micro-batches in groups of 3: every group, the last "
        "too, needs 4 or more; groups of 4, 8 do",
    ):
        schedule(NAME, 8, 8, group=3)
    with pytest.raises(ScheduleError, match=f"{NAME} on 4 ranks takes 4 or more micro-batches"):
        schedule(NAME, 8, 3)
    with pytest.raises(ScheduleError, match=f"{NAME} with chunks=2 has 2 stages on every rank"):
        schedule(NAME, 7, 8)
