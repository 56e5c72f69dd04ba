"""DualPipe: its order and pairs, its time, its memory."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.schedule.families.laws import check_copies, timeline_of

from penstock.errors import ScheduleError
from penstock.schedule.catalogue import schedule
from penstock.schedule.placement import bidirectional

#: docs/literature/simulated-values.md, p = 4, m = 8: d down the ranks, u up; `&` joins a pair.
ORDER = """\
Fd0 Fd1 Fd2 Fu0 Iu0 Wu0 Fu1 Fd3&Bu1 Fu2&Bd0 Bu2 Fu3&Bd1 Bu3 Id2 Wd2 Id3 Wd3
Fd0 Fu0 Fd1 Fu1 Fd2 Bu0 Fu2&Bd0 Fd3&Bu1 Fu3&Bd1 Bu2 Bd2 Iu3 Id3 Wu3 Wd3
Fu0 Fd0 Fu1 Fd1 Fu2 Bd0 Fd2&Bu0 Fu3&Bd1 Fd3&Bu1 Bd2 Bu2 Id3 Iu3 Wd3 Wu3
Fu0 Fu1 Fu2 Fd0 Id0 Wd0 Fd1 Fu3&Bd1 Fd2&Bu0 Bd2 Fd3&Bu1 Bd3 Iu2 Wu2 Iu3 Wu3"""

#: docs/literature/simulated-values.md, rows dualpipe with FB = f + b: p, m, makespan, ratio.
ROWS = [
    (2, 4, 12, 0.0),
    (2, 8, 24, 0.0),
    (4, 8, 26, 0.0769),
    (4, 16, 50, 0.0400),
    (8, 16, 54, 0.1111),
    (8, 32, 102, 0.0588),
]


def test_dualpipe_has_the_published_order():
    """DeepSeek's eight steps, to the op and to the pair; the n-th micro-batch down is 2n, the n-th
    up is 2n + 1.
    """
    for rank, (line, program) in enumerate(
        zip(ORDER.splitlines(), str(schedule("dualpipe", 4, 8)).splitlines(), strict=True)
    ):
        ways = {"d": (rank, 0), "u": (3 - rank, 1)}
        words = [
            "&".join(
                f"{ways[op[1]][0]}{op[0]}{2 * int(op[2:]) + ways[op[1]][1]}"
                for op in word.split("&")
            )
            for word in line.split()
        ]
        assert [word for word in program.partition("| ")[2].split() if "U" not in word] == words


@pytest.mark.parametrize(("p", "m", "makespan", "ratio"), ROWS)
def test_dualpipe_agrees_with_the_table_of_the_literature(p, m, makespan, ratio):
    """Values of docs/literature/simulated-values.md, which another simulator computed."""
    dualpipe = schedule("dualpipe", p, m)
    line = timeline_of(dualpipe)
    assert line.makespan == makespan
    assert line.bubble_ratio == pytest.approx(ratio, abs=5e-5)


@given(st.integers(1, 4), st.integers(0, 8), st.integers(1, 5))
@settings(deadline=None, max_examples=40)
def test_dualpipe_keeps_its_formulas(half, more, unit):
    """(p/2 - 1)(FB + b - 3w) for f = i = w, p + 1 micro-batches on every rank, two copies of every
    stage.
    """
    p, m = 2 * half, 4 * half + 2 * more
    dualpipe = schedule("dualpipe", p, m)
    assert timeline_of(dualpipe, unit, 2 * unit).makespan == unit * (
        3 * m + (p // 2 - 1) * (3 + 2 - 3)
    )
    assert check_copies(dualpipe).peak_on_rank == (p + 1,) * p
    ways = bidirectional(p)
    assert dualpipe.placement == {
        (s, m): ways[m % 2][s] for s in range(p) for m in range(dualpipe.micro_batches)
    }


def test_unequal_times_may_take_a_little_less_than_the_formula():
    """docs/literature/dualpipe.md: f = 2, i = 3, w = 1 and p = 8 leave 19 of the formula's 21."""
    assert timeline_of(schedule("dualpipe", 8, 16), 2, 4, 3, 1).makespan == 16 * 6 + 19


def test_numbers_that_dualpipe_does_not_take_are_refused():
    """Its steady state begins after 2p micro-batches, half of them each way."""
    with pytest.raises(
        ScheduleError,
        match=r"dualpipe puts two stages on every rank, .* an even number of stages and got 3",
    ):
        schedule("dualpipe", 3, 8)
    for m in (6, 9):
        with pytest.raises(
            ScheduleError,
            match=f"in 4 stages it takes an even number of 8 or more and got {m}; chimera takes fewer",
        ):
            schedule("dualpipe", 4, m)
