"""The terminal drawing."""

from __future__ import annotations

import re
import textwrap

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.draw.terminal import FILL, text
from penstock.errors import SettingError
from penstock.event import Event, Timeline
from penstock.schedule.catalogue import schedule
from penstock.schedule.op import Kind, Op, Schedule
from penstock.simulate.costs import Costs
from penstock.simulate.simulate import simulate_schedule


def timeline(name, stages, micro_batches, **costs):
    return simulate_schedule(
        schedule(name, stages=stages, micro_batches=micro_batches), Costs(**costs)
    )


def rows(drawing):
    return [line for line in drawing.splitlines() if line.startswith("rank ")]


def golden(picture):
    return textwrap.dedent(picture).lstrip("\n")


def test_gpipe_is_drawn_as_the_paper_draws_it():
    """All forwards, then all backwards, each twice as wide: figure 2c must be recognisable."""
    assert text([timeline("gpipe", 3, 4)], width=100) == golden("""
        gpipe, simulated
        rank 0 |F0░░░F1░░░F2░░░F3░░░······························B0▓▓▓▓▓▓▓▓B1▓▓▓▓▓▓▓▓B2▓▓▓▓▓▓▓▓B3▓▓▓▓▓▓▓▓|
        rank 1 |·····F0░░░F1░░░F2░░░F3░░░···············B0▓▓▓▓▓▓▓▓B1▓▓▓▓▓▓▓▓B2▓▓▓▓▓▓▓▓B3▓▓▓▓▓▓▓▓··········|
        rank 2 |··········F0░░░F1░░░F2░░░F3░░░B0▓▓▓▓▓▓▓▓B1▓▓▓▓▓▓▓▓B2▓▓▓▓▓▓▓▓B3▓▓▓▓▓▓▓▓····················|
        time    0    1    2    3    4    5    6    7    8    9    10   11   12   13   14   15   16   17
        makespan 18, bubble ratio 33.3 %, busy per rank 67 67 67 %, peak in flight 4 4 4
        F░ forward   B▓ backward   · idle
        """)


def test_one_f_one_b_is_drawn_unit_by_unit():
    """A whole number of columns per unit keeps the cells of all ranks in line."""
    assert text([timeline("1f1b", 3, 4)], width=64) == golden("""
        1f1b, simulated
        rank 0 |F0░F1░F2░············B0▓▓▓▓F3░B1▓▓▓▓···B2▓▓▓▓···B3▓▓▓▓|
        rank 1 |···F0░F1░······B0▓▓▓▓F2░B1▓▓▓▓F3░B2▓▓▓▓···B3▓▓▓▓······|
        rank 2 |······F0░B0▓▓▓▓F1░B1▓▓▓▓F2░B2▓▓▓▓F3░B3▓▓▓▓············|
        time    0     2     4     6     8     10    12    14    16
        makespan 18, bubble ratio 33.3 %, busy per rank 67 67 67 %
        peak in flight 3 2 1
        F░ forward   B▓ backward   · idle
        """)


def test_one_column_per_unit_still_names_the_micro_batches():
    """A digit alone is an F's: a B has room for its letter."""
    assert rows(text([timeline("gpipe", 3, 4)], width=30)) == [
        "rank 0 |0123······B0B1B2B3|",
        "rank 1 |·0123···B0B1B2B3··|",
        "rank 2 |··0123B0B1B2B3····|",
    ]


def test_units_other_than_one_are_aligned():
    """F = 2 ms and B = 3 ms have 1 ms in common, and the axis says ms."""
    drawing = text([timeline("gpipe", 2, 2, forward=0.002, backward=0.003)], width=40)
    assert rows(drawing) == [
        "rank 0 |F0░░F1░░··········B0▓▓▓▓B1▓▓▓▓|",
        "rank 1 |····F0░░F1░░B0▓▓▓▓B1▓▓▓▓······|",
    ]
    assert "time    0 ms      5 ms      10 ms" in drawing


@given(
    st.sampled_from(["gpipe", "1f1b", "naive"]),
    st.integers(1, 6),
    st.integers(1, 12),
    st.integers(20, 140),
    st.booleans(),
)
@settings(deadline=None, max_examples=60)
def test_every_drawing_has_one_row_per_rank_of_equal_length_within_the_width(
    name, stages, micro_batches, width, measured
):
    """Rows that differ in length or wrap at the terminal's edge cannot be compared."""
    costs = (
        {"forward": 0.0031, "backward": 0.0067, "transfer": 0.0004, "update": 0.0011}
        if measured
        else {}
    )
    drawing = text([timeline(name, stages, micro_batches, **costs)], width)
    assert len(rows(drawing)) == stages
    assert len({len(row) for row in rows(drawing)}) == 1
    assert max(map(len, drawing.splitlines())) <= width


def test_idle_columns_say_the_bubble_ratio():
    """In a drawing of whole units the share of idle columns is exactly the share of idle time."""
    panel = timeline("1f1b", 4, 6)
    cells = "".join(row[8:-1] for row in rows(text([panel], 100)))
    assert cells.count("·") / len(cells) == pytest.approx(panel.bubble_ratio)


def test_thousands_of_ops_in_eighty_columns_keep_their_mix():
    """Were every column given to its most frequent kind, the forwards would vanish behind the
    longer backwards.
    """
    panel = timeline("1f1b", 4, 1000)
    middle = rows(text([panel], 80))[0][20:-10]
    assert 0.6 < middle.count(FILL[Kind.B]) / len(middle) < 0.73
    assert 0.27 < middle.count(FILL[Kind.F]) / len(middle) < 0.4
    assert "column = 42.38" in text([panel], 80)


def test_an_empty_timeline_is_drawn_idle():
    """Before the first step there is nothing to show, and that is no error."""
    drawing = text([Timeline((), 2, 2)], 40)
    assert rows(drawing) == ["rank 0 |" + "·" * 31 + "|", "rank 1 |" + "·" * 31 + "|"]
    assert "makespan 0" in drawing
    assert rows(text([Timeline((), 0, 0)], 40)) == []


def test_ops_that_take_no_time_are_not_drawn():
    """Updates are often free in a simulation; a cell would show time that was not spent."""
    instant = Timeline.of([Event(0, Op(Kind.F, 0, 0), 0.0, 0.0)], ranks=1, stages=1)
    assert "F" not in rows(text([instant], 40))[0]


def test_a_rank_of_several_stages_names_them():
    """F1 could be of either stage."""
    both = Schedule.parse("rank 0 | 0F0 1F0 1I0 0I0 1W0 0W0 0U1 1U1")
    assert rows(text([simulate_schedule(both, Costs(update=1.0))], 60)) == [
        "rank 0 |0F0░░░1F0░░░1I0▒▒▒0I0▒▒▒1W0═══0W0═══0U1███1U1███|"
    ]


def test_colour_changes_the_ground_and_not_the_words():
    """A drawing in a file, or seen by a colour-blind reader, must have the same information."""
    panel = timeline("1f1b", 3, 4, transfer=0.25)
    plain, coloured = text([panel], 90), text([panel], 90, colour=True)
    assert "\x1b[48;5;111;30m" in coloured
    bare = re.sub(r"\x1b\[[0-9;]*m", "", coloured)
    for shade in FILL.values():
        plain = plain.replace(shade, " ")
    assert bare == plain


def test_seconds_are_written_where_ops_are_short_or_measured_and_units_elsewhere():
    """A measured time without a unit makes no sense."""
    assert "makespan 18.0 ms" in text([timeline("gpipe", 3, 4, forward=0.001)])
    assert "makespan 18," in text([timeline("gpipe", 3, 4)])
    panel = timeline("gpipe", 3, 4)
    assert "makespan 18.0 s" in text([Timeline(panel.events, 3, 3, source="measured")])


def test_two_ops_that_run_as_one_are_joined_by_an_ampersand():
    """`F1 B0` would be one after the other; a terminal has no half rows."""
    drawing = text([simulate_schedule(Schedule.parse("0F0 0F1&0B0 0F2&0B1 0B2 0U1"), Costs())], 60)
    assert rows(drawing) == ["rank 0 |F0░░░F1░░░░░░&B0▓▓▓▓F2░░░░░░&B1▓▓▓▓B2▓▓▓▓▓▓▓▓|"]
    assert "& with the op before, as one" in drawing
    assert "&" not in text([timeline("1f1b", 2, 2)], 60)


def test_slices_are_written_with_their_micro_batch_in_plain_units():
    """Half of a forward of 1 is not half a second."""
    drawing = text(
        [simulate_schedule(schedule("seq1f1b", stages=2, micro_batches=2, slices=2), Costs())], 90
    )
    assert (
        rows(drawing)[1]
        == "rank 1 |·····F0.0░F0.1░B0.1▓▓▓▓▓▓F1.0░B0.0▓▓▓▓▓▓F1.1░B1.1▓▓▓▓▓▓B1.0▓▓▓▓▓▓··········|"
    )
    assert "makespan 7.5," in drawing


def test_the_rank_with_the_most_memory_is_named_with_its_contents():
    """Which tensor to shrink is the question behind every peak."""
    drawing = text([timeline("1f1b", 2, 4, activation_bytes=1024, weight_bytes=512)])
    assert "largest on rank 0: activations 2.0 KiB, weights 512 B" in " ".join(drawing.split())


def test_memory_is_listed_if_known():
    """Schedules trade time for memory, so both belong into the summary."""
    assert "peak memory 2.0 KiB / 1.0 KiB" in text([timeline("1f1b", 2, 4, activation_bytes=1024)])


def test_many_ranks_are_summed_up_as_a_range():
    """Sixty-four percentages are not a summary."""
    assert "peak in flight 1 to 20" in text([timeline("1f1b", 20, 40)], 100)


def test_a_title_cannot_steer_the_terminal():
    """Titles come from files of others; an escape sequence could hide or fake what follows."""
    drawing = text([Timeline((), 1, 1, title="a\x1b[2Jb\nrank 9 |\x00")])
    assert "\x1b" not in drawing
    assert "\x00" not in drawing
    assert len(rows(drawing)) == 1


def test_a_width_below_twenty_is_refused_with_both_numbers():
    """Not even one op would fit beside the rank's name."""
    with pytest.raises(SettingError, match="needs a width of 20 columns or more, but got 19"):
        text([Timeline((), 1, 1)], 19)


def test_batches_of_a_stream_end_at_updates_without_duration():
    """With no flush between them nothing else would say where one ends."""
    drawing = text([timeline("pipedream", 2, 2)], 90)
    assert rows(drawing)[1].startswith("rank 1 |··F0B0▓▓F1B1▓█F2B2▓▓F3B3▓█")
    assert "█ at its end, an update" in drawing
    assert "█" not in text([timeline("1f1b", 2, 2)], 90)
    assert "█ at its end" not in text([timeline("pipedream", 2, 2, update=1)], 90)


@pytest.mark.parametrize("width", [20, 33, 47, 80, 141])
def test_marks_of_updates_hide_no_name_and_move_nothing(width):
    """Names are written on the fill of their cell and on nothing else, at all scales."""
    marked = simulate_schedule(
        schedule("pipedream", 3, 1, batches=9), Costs(forward=0.3, backward=0.7)
    )
    plain = simulate_schedule(
        Schedule(without_updates("pipedream", 3, 1, 9)), Costs(forward=0.3, backward=0.7)
    )
    for one, other in zip(rows(text([marked], width)), rows(text([plain], width)), strict=True):
        assert len(one) == len(other)
        assert all(a == b or (a, b) == ("█", "▓") for a, b in zip(one, other, strict=True))


def without_updates(name, stages, size, batches):
    """The programs with no U in them."""
    return tuple(
        tuple(op for op in row if op.kind is not Kind.U)
        for row in schedule(name, stages, size, batches=batches).programs
    )
