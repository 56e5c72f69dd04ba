"""Chimera: its orders, its time in both ways to more micro-batches, its memory, and where its
copies meet.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.schedule.families.laws import check_copies, timeline_of, without_updates

from penstock.errors import ScheduleError
from penstock.schedule.catalogue import schedule
from penstock.schedule.op import Kind
from penstock.verify.verify import verify

#: docs/literature/simulated-values.md, D = 4, without stages: N = 4, and N = 8 by forward doubling.
DIRECT = """\
F0 F1 F2 B2 F3 B3 B0 B1
F0 F2 F1 F3 B2 B0 B3 B1
F2 F0 F3 F1 B0 B2 B1 B3
F2 F3 F0 B0 F1 B1 B2 B3"""
DOUBLING = """\
F0 F1 F4 F5 F2 F3 B2 F6 F7 B3 B0 B6 B1 B7 B4 B5
F0 F1 F2 F3 F4 F5 F6 F7 B2 B0 B3 B1 B6 B4 B7 B5
F2 F3 F0 F1 F6 F7 F4 F5 B0 B2 B1 B3 B4 B6 B5 B7
F2 F3 F6 F7 F0 F1 B0 F4 F5 B1 B2 B4 B3 B5 B6 B7"""

#: docs/literature/simulated-values.md, the paragraph on Chimera, f = 1: p, m, makespan for b = 2; and for b = 1.
DIRECT_ROWS = [(4, 2, 12), (4, 4, 16), (4, 8, 30), (4, 12, 44), (4, 16, 58), (6, 6, 26), (6, 12, 48), (8, 2, 24), (8, 8, 36),
               (8, 16, 66), (8, 32, 126), (16, 16, 76), (16, 32, 138)]  # fmt: skip
EQUAL_ROWS = [
    (4, 4, 10),
    (4, 8, 18),
    (4, 12, 26),
    (8, 8, 22),
    (8, 16, 38),
    (8, 24, 54),
    (16, 16, 46),
    (16, 32, 78),
]
DOUBLING_ROWS = [
    (4, 8, 27),
    (4, 16, 51),
    (6, 12, 42),
    (6, 24, 78),
    (8, 16, 57),
    (8, 32, 105),
    (16, 32, 117),
]

sizes = st.tuples(
    st.integers(1, 4).map(lambda half: 2 * half), st.integers(1, 16).map(lambda half: 2 * half)
)


@pytest.mark.parametrize(
    ("m", "options", "order"), [(4, {}, DIRECT), (8, {"concatenation": "doubling"}, DOUBLING)]
)
def test_chimera_has_the_published_order(m, options, order):
    """The paper's figures, to the op: 0, 1, 4, 5 go down the ranks, 2, 3, 6, 7 up."""
    chimera = schedule("chimera", 4, m, **options)
    assert [
        " ".join(op[1:] for op in row) for row in without_updates(chimera)
    ] == order.splitlines()
    for (stage, micro_batch), rank in chimera.placement.items():
        assert rank == (stage if micro_batch % 4 < 2 else 3 - stage)


@pytest.mark.parametrize(("p", "m", "makespan"), DIRECT_ROWS)
def test_direct_concatenation_agrees_with_the_oracles(p, m, makespan):
    """Values of another simulator, which reproduces the paper's figures."""
    assert timeline_of(schedule("chimera", p, m)).makespan == makespan


@pytest.mark.parametrize(("p", "m", "makespan"), EQUAL_ROWS)
def test_chimera_with_backwards_as_fast_as_forwards_agrees_with_the_oracles(p, m, makespan):
    """The paper's own bubble ratio, (D - 2)/(2N + D - 2), is of this case."""
    line = timeline_of(schedule("chimera", p, m), 1, 1)
    assert line.makespan == makespan
    assert line.bubble_ratio == pytest.approx((p - 2) / (2 * m + p - 2))


@pytest.mark.parametrize(("p", "m", "makespan"), DOUBLING_ROWS)
def test_forward_doubling_agrees_with_the_oracles(p, m, makespan):
    """1.5(D - 2) however many units: the next unit's forwards fill the last one's bubbles without
    rest.
    """
    assert timeline_of(schedule("chimera", p, m, concatenation="doubling")).makespan == makespan


@pytest.mark.parametrize(
    ("p", "peaks"), [(4, (3, 4, 4, 3)), (6, (4, 5, 6, 6, 5, 4)), (8, (5, 6, 7, 8, 8, 7, 6, 5))]
)
def test_chimera_holds_the_published_numbers_of_micro_batches(p, peaks):
    """docs/literature/simulated-values.md; most in the middle, where 1F1B has least and most together."""
    assert verify(schedule("chimera", p, 2 * p)).peak_on_rank == peaks


@given(sizes)
@settings(deadline=None, max_examples=60)
def test_direct_concatenation_keeps_its_formulas_with_a_last_unit_of_any_size(size):
    """The docstring's facts, where p does not divide m too."""
    p, m = size
    chimera = schedule("chimera", p, m)
    units = -(-m // p)
    lack = units * p - m
    assert timeline_of(chimera, 1, 1).makespan == 2 * m + p - 2 + lack
    assert timeline_of(chimera, 1, 2).makespan == 3 * m + (units + 1) * (p - 2) + lack - (
        units > 1 and lack > 0
    )
    held = tuple(min(m, min(m, p) // 2 + 1 + min(rank, p - 1 - rank)) for rank in range(p))
    assert check_copies(chimera).peak_on_rank == held


@given(st.integers(1, 4).map(lambda half: 2 * half), st.integers(1, 4))
@settings(deadline=None, max_examples=30)
def test_forward_doubling_keeps_its_formulas(p, units):
    """The bubble of a unit is half that of two direct units, for 1.5 times the memory."""
    chimera = schedule("chimera", p, 2 * p * units, concatenation="doubling")
    assert timeline_of(chimera).makespan == 6 * p * units + 1.5 * (p - 2)
    assert check_copies(chimera).peak_on_rank == tuple(
        3 * p // 2 + 1 + min(rank, p - 1 - rank) for rank in range(p)
    )


def test_units_of_forward_doubling_follow_each_other_by_three_slots_per_stage():
    """Closer units would take as long and hold as much, but run forwards before they are due."""
    chimera = schedule("chimera", 4, 16, concatenation="doubling")
    order = " ".join(map(str, chimera.programs[0]))
    assert " 0B4 0F8 0F9 0B5 0F12 0F13 3F10 3F11 3B10 " in order


@given(sizes, st.floats(0, 9), st.sampled_from([1, 2]))
@settings(deadline=None, max_examples=40)
def test_copies_meet_as_early_as_costs_nothing(size, update_s, b):
    """The paper's eager synchronisation, only where bubbles hide it: never later than with all
    meetings at the end.
    """
    chimera = schedule("chimera", *size)
    programs = []
    for program in chimera.programs:
        updates = sorted((op for op in program if op.kind is Kind.U), key=lambda op: -op.stage)
        programs.append((*(op for op in program if op.kind is not Kind.U), *updates))
    late = replace(chimera, programs=tuple(programs))
    assert (
        timeline_of(chimera, 1, b, u=update_s).makespan
        <= timeline_of(late, 1, b, u=update_s).makespan + 1e-9
    )


def test_a_meeting_is_hidden_where_there_is_a_bubble():
    """On the outer ranks the late stage is done before the early one's last gradients come: 2 of 4
    seconds are free.
    """
    chimera = schedule("chimera", 4, 4)
    assert str(chimera).splitlines()[0] == "rank 0 | 0F0 0F1 3F2 3B2 3F3 3B3 3U1 0B0 0B1 0U1"
    assert timeline_of(chimera, u=2).makespan == timeline_of(chimera).makespan + 4 - 2


@pytest.mark.parametrize(
    ("p", "m", "options", "message"),
    [
        (
            5,
            4,
            {},
            r"chimera puts two stages on every rank, s and 4 - s, .* even number of stages and got 5; gems takes any",
        ),
        (1, 2, {}, r"chimera puts two stages on every rank, s and 0 - s"),
        (
            4,
            5,
            {},
            r"chimera sends half of the micro-batches each way: .* even number of them and got 5; gems takes any",
        ),
        (
            4,
            12,
            {"concatenation": "doubling"},
            r"concatenation='doubling' takes a multiple of 8 micro-batches, not 12; 'direct' ",
        ),
        (
            4,
            8,
            {"concatenation": "halving"},
            r"chimera takes concatenation 'direct' or 'doubling', not 'halving'",
        ),
    ],
)
def test_numbers_that_chimera_does_not_take_are_refused(p, m, options, message):
    """Each message has the valid values."""
    with pytest.raises(ScheduleError, match=message):
        schedule("chimera", p, m, **options)
