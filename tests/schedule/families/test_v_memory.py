"""V-Half and V-Min: their orders, their time, their memory."""

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

from penstock.errors import ScheduleError
from penstock.schedule.catalogue import schedule
from penstock.schedule.placement import vee

both = pytest.mark.parametrize("name", ["v-half", "v-min"])

#: docs/literature/simulated-values.md, rows v-half and v-min: p, m, makespan, bubble ratio, peaks in whole stages.
ROWS = [
    ("v-half", 2, 4, 12.5, 0.0400, (2, 2)), ("v-half", 2, 8, 24.5, 0.0204, (2, 2)),
    ("v-half", 4, 8, 26.5, 0.0943, (3,) * 4), ("v-half", 4, 16, 50.5, 0.0495, (3,) * 4),
    ("v-half", 8, 16, 56.5, 0.1504, (5,) * 8), ("v-half", 8, 32, 104.5, 0.0813, (5,) * 8),
    ("v-min", 2, 4, 13.5, 0.1111, (1.5, 2)), ("v-min", 2, 8, 25.5, 0.0588, (1.5, 2)),
    ("v-min", 4, 8, 29.5, 0.1864, (2,) * 4), ("v-min", 4, 16, 53.5, 0.1028, (2,) * 4),
    ("v-min", 8, 16, 61.5, 0.2195, (3.5, *(4,) * 7)), ("v-min", 8, 32, 109.5, 0.1233, (3.5, *(4,) * 7)),
]  # fmt: skip

#: docs/literature/simulated-values.md, p = 4, m = 8.
ORDERS = {
    "v-half": """\
0F0 0F1 0F2 0F3 0F4 7F0 7I0 7W0 7F1 7I1 7W1 7F2 0I0 7I2 7W2 7F3 0W0 0F5 0I1 7I3 7W3 7F4 0W1 0F6 0I2 7I4 7W4 7F5 0W2 0F7 \
0I3 7I5 7W5 7F6 7I6 7W6 0I4 0W3 0W4 7F7 7I7 0I5 7W7 0I6 0W5 0W6 0I7 0W7
1F0 1F1 1F2 1F3 6F0 6F1 6I0 6W0 6F2 6I1 6W1 1I0 1W0 1F4 6F3 6I2 6W2 1I1 1W1 1F5 6F4 6I3 6W3 1I2 1W2 1F6 6F5 6I4 6W4 1I3 \
1F7 1W3 6F6 6I5 6W5 1I4 6I6 6W6 6F7 1W4 1I5 6I7 1I6 6W7 1W5 1W6 1I7 1W7
2F0 2F1 2F2 5F0 5F1 5F2 5I0 5W0 2F3 5I1 2I0 5W1 2W0 5F3 2F4 2I1 5I2 5W2 5F4 2W1 2F5 2I2 5I3 5W3 5F5 2W2 2F6 2I3 5I4 5W4 \
5F6 2W3 2F7 2I4 5I5 5W5 5F7 5I6 2I5 5W6 2I6 5I7 5W7 2W4 2I7 2W5 2W6 2W7
3F0 4F0 3F1 4F1 3F2 4F2 4I0 4W0 3I0 3W0 3F3 4F3 4I1 4W1 3I1 3W1 3F4 4F4 4I2 4W2 3I2 3W2 3F5 4F5 4I3 4W3 3I3 3F6 3W3 4F6 \
4I4 3I4 4W4 3F7 3W4 4F7 4I5 3I5 4I6 3I6 4W5 4W6 4I7 3I7 4W7 3W5 3W6 3W7""",
    "v-min": """\
0F0 0F1 0F2 7F0 7I0 7W0 7F1 7I1 7W1 0I0 0W0 0F3 7F2 7I2 0I1 7W2 0W1 0F4 7F3 7I3 0I2 7W3 0W2 0F5 7F4 7I4 0I3 7W4 0W3 0F6 \
7F5 7I5 0I4 7W5 0W4 0F7 7F6 7I6 0I5 7W6 0W5 7F7 7I7 0I6 7W7 0W6 0I7 0W7
1F0 1F1 6F0 6F1 6I0 6W0 1F2 1I0 6I1 6W1 1W0 6F2 1F3 1I1 6I2 6W2 1W1 6F3 1F4 1I2 6I3 6W3 1W2 6F4 1F5 1I3 6I4 6W4 1W3 6F5 \
1F6 1I4 6I5 6W5 1W4 6F6 1F7 1I5 6I6 6W6 1W5 6F7 1I6 6I7 6W7 1W6 1I7 1W7
2F0 2F1 5F0 5F1 5I0 5W0 2F2 2I0 2W0 5I1 5F2 5W1 2I1 2F3 2W1 5I2 5F3 5W2 2I2 2F4 2W2 5I3 5F4 5W3 2I3 2F5 2W3 5I4 5F5 5W4 \
2I4 2F6 2W4 5I5 5F6 5W5 2I5 2F7 2W5 5I6 5F7 5W6 2I6 2W6 5I7 5W7 2I7 2W7
3F0 4F0 3F1 4F1 4I0 3I0 4W0 3W0 3F2 4F2 4I1 3I1 4W1 3W1 3F3 4F3 4I2 3I2 4W2 3W2 3F4 4F4 4I3 3I3 4W3 3W3 3F5 4F5 4I4 3I4 \
4W4 3W4 3F6 4F6 4I5 3I5 4W5 3W5 3F7 4F7 4I6 3I6 4W6 3W6 4I7 3I7 4W7 3W7""",
}


def bubble_of(name, p):
    """What the docstrings say, f = i = w = 1 on both stages of a rank together, p above 1."""
    if name == "v-half":
        return 0.5 if p == 2 else (3 * p - (7 if p % 2 == 0 else 4)) / 2
    return 2 * p - (3.5 if p % 3 == 0 else 2.5)


@both
def test_the_orders_are_those_of_the_literature(name):
    """The programs that the authors' code makes, op by op."""
    assert rows_of(schedule(name, 8, 8)) == ORDERS[name].splitlines()


@pytest.mark.parametrize(("name", "p", "m", "makespan", "ratio", "peaks"), ROWS)
def test_they_agree_with_the_table_of_the_literature(name, p, m, makespan, ratio, peaks):
    """Values of docs/literature/simulated-values.md, which another simulator computed."""
    check_row(schedule(name, 2 * p, m), 2, makespan, ratio, peaks)


@both
@pytest.mark.parametrize("p", [*range(2, 10), 12])
def test_the_bubble_is_the_closed_form_by_both_definitions(name, p):
    """docs/literature/controllable-memory.md for even p and p = 3 (V-Half) and for all p (V-Min); V-Half's figure for odd p
    was found here.
    """
    for m in (p + 1, 2 * p, 3 * p + 1):
        line = split_timeline(schedule(name, 2 * p, m), 0.5, 0.5, 0.5)
        assert line.makespan == 3 * m + bubble_of(name, p)
        assert line.bubble_ratio == pytest.approx(bubble_of(name, p) / line.makespan)
        if m >= 2 * p:
            assert longest_span(line) == line.makespan
            assert line.span_bubble_ratio == pytest.approx(line.bubble_ratio)


@pytest.mark.parametrize(
    ("p", "half", "least"),
    [(2, 2, 2), (3, 2, 2), (4, 3, 2), (6, 4, 3), (8, 5, 4), (12, 7, 5), (16, 9, 6)],
)
def test_the_memory_is_half_and_a_third_of_that_of_1f1b(p, half, least):
    """Peaks of docs/literature/controllable-memory.md, whatever the number of micro-batches: 1F1B holds p."""
    for m in (2 * p, 2 * p + 5) if p < 8 else (2 * p,):
        assert max(check_split(schedule("v-half", 2 * p, m)).peak_on_rank) == 2 * half
        assert max(check_split(schedule("v-min", 2 * p, m)).peak_on_rank) == 2 * least
        assert half == p // 2 + 1


@both
@given(st.integers(1, 7), st.integers(1, 16))
@settings(deadline=None, max_examples=40)
def test_any_size_is_sound_and_holds_no_more_than_1f1b(name, p, m):
    """Warm-up and cool-down may meet where micro-batches are few; they must still fit together."""
    family_schedule = schedule(name, 2 * p, m)
    assert max(check_split(family_schedule).peak_on_rank) <= 2 * min(
        m, max(p // 2 + 1, 2 if p > 1 else 1)
    )
    assert family_schedule.ranks_of_stage == tuple((rank,) for rank in vee(2 * p, p))


@both
@pytest.mark.parametrize("p", [*range(17, 23), 63, 64])
def test_the_block_repeats_for_many_ranks(name, p):
    """Two ops of a rank in one slot would be a bug of ours; the offsets depend on p modulo 6."""
    family_schedule = schedule(name, 2 * p, 3)
    assert family_schedule.ranks == p
    assert all(len(program) == 3 * 6 + 2 for program in family_schedule.programs)


@both
@pytest.mark.parametrize(("stages", "around"), [(1, "2"), (5, "4 or 6")])
def test_an_odd_number_of_stages_is_refused(name, stages, around):
    """With an odd number one rank would have only one stage."""
    with pytest.raises(
        ScheduleError,
        match=f"{name} goes down the ranks and back up, with two stages on each: it takes an even "
        f"number of stages and got {stages}; use {around}$",
    ):
        schedule(name, stages, 8)


@both
@pytest.mark.parametrize(("p", "m"), [(1, 2), (2, 5), (4, 4)])
def test_gradients_are_those_of_one_stage_to_the_bit(name, p, m):
    """A V and a split backward must not change what is learned."""
    check_gradients(schedule(name, 2 * p, m))
