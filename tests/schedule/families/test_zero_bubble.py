"""ZB-H1 and ZB-H2: their orders, their time by both definitions of a bubble, their memory, and the
paper's own table.
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.schedule.families.laws import check_row, rows_of
from tests.schedule.families.split_laws import (
    check_gradients,
    check_split,
    longest_span,
    split_timeline,
)

from penstock.schedule.catalogue import schedule
from penstock.schedule.op import Kind

both = pytest.mark.parametrize("name", ["zb-h1", "zb-h2"])

#: docs/literature/simulated-values.md, rows zb-h1 and zb-h2: p, m, makespan and ratio of each, peak of each on every
#: rank. f = i = w = 1.
ROWS = [
    (2, 2, (7, 0.1429, 2), (7, 0.1429, 2)), (2, 4, (13, 0.0769, 2), (13, 0.0769, 3)), (2, 8, (25, 0.0400, 2), (25, 0.0400, 3)),
    (4, 4, (15, 0.2000, 4), (16, 0.2500, 4)), (4, 8, (27, 0.1111, 4), (27, 0.1111, 7)),
    (4, 16, (51, 0.0588, 4), (51, 0.0588, 7)),
    (8, 8, (31, 0.2258, 8), (34, 0.2941, 8)), (8, 16, (55, 0.1273, 8), (55, 0.1273, 15)),
    (8, 32, (103, 0.0680, 8), (103, 0.0680, 15)),
]  # fmt: skip

#: docs/literature/simulated-values.md: ZB-H1 with p = 4, m = 6; ZB-H2 with p = 4, m = 8.
H1 = """\
0F0 0F1 0F2 0F3 0I0 0W0 0F4 0I1 0W1 0F5 0I2 0W2 0I3 0W3 0I4 0W4 0I5 0W5
1F0 1F1 1F2 1I0 1F3 1I1 1W0 1F4 1I2 1W1 1F5 1I3 1W2 1I4 1W3 1I5 1W4 1W5
2F0 2F1 2I0 2F2 2I1 2F3 2I2 2W0 2F4 2I3 2W1 2F5 2I4 2W2 2I5 2W3 2W4 2W5
3F0 3I0 3F1 3I1 3F2 3I2 3F3 3I3 3W0 3F4 3I4 3W1 3F5 3I5 3W2 3W3 3W4 3W5"""
H2 = """\
0F0 0F1 0F2 0F3 0F4 0F5 0F6 0I0 0W0 0F7 0I1 0W1 0I2 0W2 0I3 0W3 0I4 0W4 0I5 0W5 0I6 0W6 0I7 0W7
1F0 1F1 1F2 1F3 1F4 1I0 1F5 1I1 1F6 1I2 1W0 1F7 1I3 1W1 1I4 1W2 1I5 1W3 1I6 1W4 1I7 1W5 1W6 1W7
2F0 2F1 2F2 2I0 2F3 2I1 2F4 2I2 2F5 2I3 2F6 2I4 2W0 2F7 2I5 2W1 2I6 2W2 2I7 2W3 2W4 2W5 2W6 2W7
3F0 3I0 3F1 3I1 3F2 3I2 3F3 3I3 3F4 3I4 3F5 3I5 3F6 3I6 3W0 3F7 3I7 3W1 3W2 3W3 3W4 3W5 3W6 3W7"""

#: Qi et al. 2024, tables 9 and 5 (docs/literature/zero-bubble.md): p, m, measured ms of F, I, W and a hop; bubble
#: rates of 1F1B, ZB-H1, ZB-H2.
MEASURED = [
    (8, 24, (18.522, 18.086, 9.337, 0.601), (0.2431, 0.1585, 0.1083)),
    (8, 32, (18.513, 18.086, 9.331, 0.626), (0.1985, 0.1242, 0.0837)),
    (8, 64, (18.546, 18.097, 9.321, 0.762), (0.1240, 0.0674, 0.0444)),
    (8, 24, (29.718, 29.444, 19.927, 0.527), (0.2347, 0.1323, 0.0698)),
    (8, 32, (29.802, 29.428, 19.530, 0.577), (0.1898, 0.1045, 0.0559)),
    (8, 64, (29.935, 29.621, 19.388, 0.535), (0.1091, 0.0554, 0.0294)),
    (16, 48, (11.347, 11.248, 8.132, 0.377), (0.2552, 0.1397, 0.0672)),
    (16, 64, (11.307, 11.254, 8.101, 0.379), (0.2082, 0.1088, 0.0516)),
    (16, 128, (11.325, 11.308, 8.109, 0.378), (0.1251, 0.0576, 0.0266)),
    (32, 96, (10.419, 10.207, 7.715, 0.408), (0.2646, 0.1421, 0.0641)),
    (32, 128, (10.408, 10.204, 7.703, 0.408), (0.2168, 0.1106, 0.0490)),
    (32, 256, (10.402, 10.248, 7.698, 0.460), (0.1352, 0.0594, 0.0257)),
]


@pytest.mark.parametrize(("name", "m", "order"), [("zb-h1", 6, H1), ("zb-h2", 8, H2)])
def test_the_handmade_schedules_have_the_published_orders(name, m, order):
    """Qi et al. 2024, figures 2 and 3, to the op."""
    assert rows_of(schedule(name, 4, m)) == order.splitlines()


@pytest.mark.parametrize(("p", "m", "h1", "h2"), ROWS)
def test_the_handmade_schedules_agree_with_the_table_of_the_literature(p, m, h1, h2):
    """The oracle was made by another simulator; its ratio is of the makespan, by which ZB-H2 gains
    nothing over ZB-H1.
    """
    for name, (makespan, ratio, peak) in (("zb-h1", h1), ("zb-h2", h2)):
        check_row(schedule(name, p, m), 1, makespan, ratio, (peak,) * p)


@pytest.mark.parametrize(("p", "m", "times", "rates"), MEASURED)
def test_the_papers_measured_times_give_the_papers_bubble_rates(p, m, times, rates):
    """The best outside oracle for a simulator with hops: another group's profile of another
    machine, to four digits.

    By the span definition, the only one in which the paper's figures can be met.
    """
    for name, rate in zip(("1f1b", "zb-h1", "zb-h2"), rates, strict=True):
        assert split_timeline(schedule(name, p, m), *times).span_bubble_ratio == pytest.approx(
            rate, abs=5e-5
        ), name


@pytest.mark.parametrize(("m", "makespan"), [(2, 19), (4, 23), (8, 31)])
def test_zb_h1_with_few_micro_batches_agrees_with_the_oracles(m, makespan):
    """docs/literature/simulated-values.md, 8 stages, f = i = w = 1."""
    assert split_timeline(schedule("zb-h1", 8, m)).makespan == makespan


times = st.tuples(st.integers(1, 9), st.integers(1, 9), st.integers(1, 9)).filter(
    lambda fiw: fiw[2] <= min(fiw[:2])
)


@given(st.integers(1, 8), st.integers(1, 24), times)
@settings(deadline=None, max_examples=100)
def test_zb_h1_hides_a_weight_gradient_of_every_stage_but_one(p, m, fiw):
    """1F1B's bubble is (p - 1)(f + i + w): twice w less. With few micro-batches all but one W of m
    are hidden.
    """
    f, i, w = fiw
    line = split_timeline(schedule("zb-h1", p, m), f, i, w)
    if m >= p:
        assert line.makespan == m * (f + i + w) + (p - 1) * (f + i - w)
    if m <= p:
        assert line.makespan == (m + p - 1) * (f + i) + w
    # Some rank works from the first moment to the last, so that both definitions agree.
    assert line.span_bubble_ratio == pytest.approx(line.bubble_ratio)


@given(st.integers(1, 8), st.integers(0, 12), times)
@settings(deadline=None, max_examples=100)
def test_zb_h2_hides_two_weight_gradients_in_the_span_of_a_stage(p, more, fiw):
    """(p - 1)(f + i - 2w): zero for equal times, which is what the paper is named for."""
    f, i, w = fiw
    m = 2 * p - 1 + more
    line = split_timeline(schedule("zb-h2", p, m), f, i, w)
    work = m * (f + i + w)
    assert longest_span(line) == work + (p - 1) * (f + i - 2 * w)
    assert line.span_bubble_ratio == pytest.approx(1 - work / longest_span(line))


@given(st.integers(1, 10), st.integers(0, 12), st.integers(1, 9))
@settings(deadline=None, max_examples=50)
def test_zb_h2_has_the_makespan_of_zb_h1_for_equal_times(p, more, t):
    """Its zero is a matter of definition: the last stage still starts late, and the first still
    ends early.
    """
    timelines = [
        split_timeline(schedule(name, p, 2 * p - 1 + more), t, t, t) for name in ("zb-h1", "zb-h2")
    ]
    assert timelines[0].makespan == timelines[1].makespan == (3 * (2 * p - 1 + more) + p - 1) * t
    assert timelines[1].span_bubble_ratio == 0


@pytest.mark.parametrize("p", range(2, 9))
def test_zb_h2_with_too_few_micro_batches_takes_longer_than_zb_h1(p):
    """Its forwards run far ahead of backwards that could begin; it is made all the same, since it
    is sound.
    """
    for m in range(1, 2 * p):
        longer = (
            split_timeline(schedule("zb-h2", p, m)).makespan
            - split_timeline(schedule("zb-h1", p, m)).makespan
        )
        assert longer > 0 if 3 <= m <= 2 * p - 3 else longer == 0, m


@given(st.integers(1, 8), st.integers(1, 24))
@settings(deadline=None, max_examples=60)
def test_the_handmade_schedules_are_sound_and_hold_what_they_say(p, m):
    """A stage further down waits less for its I and has more W behind it: the sum is the same on
    all.
    """
    assert check_split(schedule("zb-h1", p, m)).peak_on_rank == (min(m, p),) * p
    assert check_split(schedule("zb-h2", p, m)).peak_on_rank == (min(m, 2 * p - 1),) * p


@both
@pytest.mark.parametrize("p", range(1, 9))
def test_the_memory_of_stage_s_is_of_two_sizes(name, p):
    """After I a stage keeps only what W needs: (p - s) M_B + s M_W in ZB-H1, (2p - 2s - 1) M_B + 2s
    M_W in ZB-H2.
    """
    whole, weights = 5, 2  # M_W < M_B
    for stage, program in enumerate(schedule(name, p, 3 * p).programs):
        change = {Kind.F: whole, Kind.I: weights - whole, Kind.W: -weights, Kind.U: 0}
        held = [0]
        for op in program:
            held.append(held[-1] + change[op.kind])
        expected = (p - stage, stage) if name == "zb-h1" else (2 * (p - stage) - 1, 2 * stage)
        assert max(held) == expected[0] * whole + expected[1] * weights


@both
@pytest.mark.parametrize(("p", "m"), [(1, 2), (2, 5), (4, 6)])
def test_gradients_are_those_of_one_stage_to_the_bit(name, p, m):
    """Splitting a backward must not change what is learned."""
    check_gradients(schedule(name, p, m))
