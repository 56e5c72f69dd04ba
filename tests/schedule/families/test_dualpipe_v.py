"""DualPipe-V: its order, its time with pairs that overlap and without, its memory."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.schedule.families.laws import whole_stage_peaks
from tests.schedule.families.split_laws import check_gradients, check_split, rows_of, simulated

from penstock.errors import ScheduleError
from penstock.schedule.catalogue import schedule
from penstock.schedule.op import Kind, Op
from penstock.schedule.placement import vee
from penstock.schedule.rules import needs
from penstock.verify.verify import verify

#: LITERATURE 11.2, rows dualpipe-v with FB = f + b: p, m, makespan, ratio; p + 1/2 micro-batches in flight on every rank.
ROWS = [(2, 4, 13, 0.0769), (2, 8, 25, 0.0400), (4, 8, 27, 0.1111), (4, 16, 51, 0.0588), (8, 16, 55, 0.1273),
        (8, 32, 103, 0.0680)]  # fmt: skip

#: LITERATURE 11.3, p = 2, m = 4, with d and u as the way down and the way back; `&` joins a pair.
ORDER = """\
Fd0 Fd1 Fd2 Fu0 Iu0 Wu0 Fu1 Fd3&Bu1 Fu2&Bd0 Bu2 Fu3&Bd1 Bu3 Id2 Wd2 Id3 Wd3
Fd0 Fu0 Fd1 Fu1 Fd2 Bu0 Fu2&Bd0 Fd3&Bu1 Fu3&Bd1 Bu2 Bd2 Iu3 Id3 Wu3 Wd3"""


def test_dualpipe_v_has_the_published_order():
    """DeepSeek's eight steps, to the op; a pair stands as F, then B."""
    expected = []
    for rank, line in enumerate(ORDER.splitlines()):
        stage = {"d": rank, "u": 3 - rank}
        expected.append(" ".join(f"{stage[word[1]]}{word[0]}{word[2:]}" for word in line.replace("&", " ").split()))
    assert rows_of(schedule("dualpipe-v", 4, 4)) == expected


def test_torchs_own_dualpipe_v_has_the_same_order():
    """An order made by another hand, which runs; its overlapped pairs are F, then B, as ours."""
    from torch.distributed.pipelining.schedules import ScheduleDualPipeV  # here: planning's other tests need no torch

    for p in range(1, 6):
        for m in (2 * p, 2 * p + 1, 3 * p + 2):
            theirs = SimpleNamespace(n_local_stages=2, num_stages=2 * p, _num_stages=2 * p, pp_group_size=p, _n_microbatches=m)
            for rank, program in enumerate(schedule("dualpipe-v", 2 * p, m).without_updates().programs):
                actions = ScheduleDualPipeV._calculate_single_rank_operations(theirs, rank)
                single = [part for action in actions if action is not None for part in action.sub_actions or (action,)]
                assert [str(action) for action in single] == [str(op) for op in program]


def pairs(made):
    """The programs in steps: an F and the B behind it are one, but for the first such on the last rank, where nothing overlaps."""
    steps = []
    for rank, program in enumerate(made.without_updates().programs):
        row: list[list[Op]] = []
        alone = rank == made.ranks - 1
        for op in program:
            joins = bool(row) and len(row[-1]) == 1 and row[-1][0].kind is Kind.F and op.kind is Kind.B
            if joins and not alone:
                row[-1].append(op)
            else:
                row.append([op])
            alone = alone and not joins
        steps.append(row)
    return steps


def makespan_of_pairs(made, f, i, w):
    """Seconds if what stands in a pair begins together and ends together, after f + i + w: LITERATURE's FB."""
    seconds = {Kind.F: f, Kind.B: i + w, Kind.I: i, Kind.W: w}
    steps = pairs(made)
    ends: dict[Op, float] = {}
    free, done = [0.0] * made.ranks, [0] * made.ranks
    while done != [len(row) for row in steps]:
        before = list(done)
        for rank, row in enumerate(steps):
            while done[rank] < len(row):
                waits = [group for op in row[done[rank]] for group in needs(op, made.stages)]
                known = [[ends[op] for op in group if op in ends] for group in waits]
                if not all(known):
                    break
                end = max([free[rank], *map(max, known)]) + sum(seconds[op.kind] for op in row[done[rank]])
                ends |= dict.fromkeys(row[done[rank]], end)
                free[rank] = end
                done[rank] += 1
        assert done != before, "pairs wait for one another"
    return max(free)


@pytest.mark.parametrize(("p", "m", "makespan", "ratio"), ROWS)
def test_with_pairs_it_agrees_with_the_table_of_the_literature(p, m, makespan, ratio):
    """The oracle was made by another simulator, with FB = f + b: the programs are DeepSeek's, overlap or not."""
    made = schedule("dualpipe-v", 2 * p, m)
    found = makespan_of_pairs(made, 0.5, 0.5, 0.5)
    assert found == makespan
    assert 1 - 3 * m / found == pytest.approx(ratio, abs=5e-5)
    assert whole_stage_peaks(verify(made), 2) == (p + 0.5,) * p


@pytest.mark.parametrize("p", range(1, 9))
def test_without_overlap_a_pair_need_not_wait_for_both_of_its_inputs(p):
    """(p - 1)(FB + b - 3w) is exact for pairs and f = i = w; F, then B takes half of it, ZB-V's (p - 1)f."""
    for m in (2 * p, 2 * p + 3, 4 * p):
        made = schedule("dualpipe-v", 2 * p, m)
        assert makespan_of_pairs(made, 1, 1, 1) == 6 * m + (p - 1) * (3 + 2 - 3)
        assert simulated(made).makespan == 6 * m + p - 1


times = st.tuples(*[st.integers(1, 7)] * 3).filter(lambda fiw: fiw[2] <= min(fiw[:2]) and fiw[0] <= fiw[1] + fiw[2])


@given(st.integers(1, 6), st.integers(0, 8), times)
@settings(deadline=None, max_examples=60)
def test_the_published_bubble_bounds_what_f_then_b_takes(p, more, fiw):
    """2m(f + b) + (p - 1)(f + 2b - 3w), where w <= i and w <= f <= b: beyond, an F as long as several W gets in the way."""
    f, i, w = fiw
    m = 2 * p + more
    made = schedule("dualpipe-v", 2 * p, m)
    makespan = simulated(made, f, i, w).makespan
    assert makespan <= 2 * m * (f + i + w) + (p - 1) * (f + 2 * (i + w) - 3 * w)
    assert makespan <= makespan_of_pairs(made, f, i, w)


@given(st.integers(1, 7), st.integers(0, 12))
@settings(deadline=None, max_examples=40)
def test_dualpipe_v_is_sound_and_holds_2p_plus_1_half_stages(p, more):
    """One half stage more than ZB-V."""
    made = schedule("dualpipe-v", 2 * p, 2 * p + more)
    assert check_split(made).peak_on_rank == (2 * p + 1,) * p
    assert made.ranks_of_stage == tuple((rank,) for rank in vee(2 * p, p))


def test_numbers_that_dualpipe_v_does_not_take_are_refused():
    """Its steady state begins after 2p micro-batches; each message says what is taken."""
    with pytest.raises(ScheduleError, match="dualpipe-v of 8 stages takes 8 micro-batches or more and got 7; zb-v takes any"):
        schedule("dualpipe-v", 8, 7)
    with pytest.raises(ScheduleError, match=r"dualpipe-v goes down .* an even number of stages and got 5; ask for 4 or 6$"):
        schedule("dualpipe-v", 5, 16)


@pytest.mark.parametrize(("p", "m"), [(1, 2), (2, 5), (4, 8)])
def test_gradients_are_those_of_one_stage_to_the_bit(p, m):
    """A V, and backwards some of which are split, must not change what is learned."""
    check_gradients(schedule("dualpipe-v", 2 * p, m))
