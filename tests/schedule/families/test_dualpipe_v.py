"""DualPipe-V: its order, its pairs, its time with and without them, its memory."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.schedule.families.laws import timeline_of, whole_stage_peaks, without_updates
from tests.schedule.families.split_laws import check_gradients, check_split

from penstock.errors import ScheduleError
from penstock.schedule.catalogue import schedule
from penstock.schedule.placement import vee
from penstock.verify.verify import verify

#: docs/literature/simulated-values.md, rows dualpipe-v with FB = f + b: p, m, makespan, ratio; p + 1/2 micro-batches in
#: flight on every rank.
ROWS = [(2, 4, 13, 0.0769), (2, 8, 25, 0.0400), (4, 8, 27, 0.1111), (4, 16, 51, 0.0588), (8, 16, 55, 0.1273),
        (8, 32, 103, 0.0680)]  # fmt: skip

#: docs/literature/simulated-values.md, p = 2, m = 4, with d and u as the way down and the way back; `&` joins a pair.
ORDER = """\
Fd0 Fd1 Fd2 Fu0 Iu0 Wu0 Fu1 Fd3&Bu1 Fu2&Bd0 Bu2 Fu3&Bd1 Bu3 Id2 Wd2 Id3 Wd3
Fd0 Fu0 Fd1 Fu1 Fd2 Bu0 Fu2&Bd0 Fd3&Bu1 Fu3&Bd1 Bu2 Bd2 Iu3 Id3 Wu3 Wd3"""


def test_dualpipe_v_has_the_published_order():
    """DeepSeek's eight steps, op by op and pair by pair."""
    for rank, (line, program) in enumerate(
        zip(ORDER.splitlines(), str(schedule("dualpipe-v", 4, 4)).splitlines(), strict=True)
    ):
        stage = {"d": rank, "u": 3 - rank}
        words = [
            "&".join(f"{stage[op[1]]}{op[0]}{op[2:]}" for op in word.split("&"))
            for word in line.split()
        ]
        assert [word for word in program.partition("| ")[2].split() if "U" not in word] == words


def test_torchs_own_dualpipe_v_has_the_same_order():
    """The order of another implementation, which has been run."""
    from torch.distributed.pipelining.schedules import (
        ScheduleDualPipeV,
    )  # here: planning's other tests need no torch

    for p in range(1, 6):
        for m in (2 * p, 2 * p + 1, 3 * p + 2):
            theirs = SimpleNamespace(
                n_local_stages=2,
                num_stages=2 * p,
                _num_stages=2 * p,
                pp_group_size=p,
                _n_microbatches=m,
            )
            dualpipe_v = schedule("dualpipe-v", 2 * p, m)
            pairs = {tuple(map(str, pair)) for pair in dualpipe_v.pairs}
            for rank, row in enumerate(without_updates(dualpipe_v)):
                actions = [
                    action
                    for action in ScheduleDualPipeV._calculate_single_rank_operations(theirs, rank)
                    if action is not None
                ]
                assert [
                    str(part) for action in actions for part in action.sub_actions or (action,)
                ] == row
                overlapped = {
                    tuple(map(str, action.sub_actions)) for action in actions if action.sub_actions
                }
                assert overlapped == {pair for pair in pairs if pair[0] in row}


@pytest.mark.parametrize(("p", "m", "makespan", "ratio"), ROWS)
def test_dualpipe_v_agrees_with_the_table_of_the_literature(p, m, makespan, ratio):
    """Values of docs/literature/simulated-values.md, computed by another simulator with FB = f + b."""
    dualpipe_v = schedule("dualpipe-v", 2 * p, m)
    line = timeline_of(dualpipe_v, 0.5, 1)
    assert line.makespan == makespan
    assert line.bubble_ratio == pytest.approx(ratio, abs=5e-5)
    assert whole_stage_peaks(verify(dualpipe_v), 2) == (p + 0.5,) * p


@pytest.mark.parametrize("p", range(1, 9))
def test_a_pair_waits_for_both_of_its_inputs(p):
    """(p - 1)(FB + b - 3w) is exact for f = i = w; the same ops one after the other take half of
    it, ZB-V's (p - 1)f.
    """
    for m in (2 * p, 2 * p + 3, 4 * p):
        dualpipe_v = schedule("dualpipe-v", 2 * p, m)
        assert timeline_of(dualpipe_v).makespan == 6 * m + (p - 1) * (3 + 2 - 3)
        assert timeline_of(replace(dualpipe_v, pairs=frozenset())).makespan == 6 * m + p - 1


@given(st.integers(1, 7), st.integers(0, 12))
@settings(deadline=None, max_examples=40)
def test_dualpipe_v_is_sound_and_holds_2p_plus_1_half_stages(p, more):
    """Half a micro-batch more than ZB-V."""
    dualpipe_v = schedule("dualpipe-v", 2 * p, 2 * p + more)
    assert check_split(dualpipe_v).peak_on_rank == (2 * p + 1,) * p
    assert dualpipe_v.ranks_of_stage == tuple((rank,) for rank in vee(2 * p, p))


def test_numbers_that_dualpipe_v_does_not_take_are_refused():
    """Its steady state begins after 2p micro-batches; each message says what is taken."""
    with pytest.raises(
        ScheduleError,
        match="dualpipe-v of 8 stages takes 8 micro-batches or more and got 7; zb-v takes any",
    ):
        schedule("dualpipe-v", 8, 7)
    with pytest.raises(
        ScheduleError,
        match=r"dualpipe-v goes down .* an even number of stages and got 5; use 4 or 6$",
    ):
        schedule("dualpipe-v", 5, 16)


@pytest.mark.parametrize(("p", "m"), [(1, 2), (2, 5), (4, 8)])
def test_gradients_are_those_of_one_stage_to_the_bit(p, m):
    """A V, and backwards some of which are split, must not change what is learned."""
    check_gradients(schedule("dualpipe-v", 2 * p, m))
