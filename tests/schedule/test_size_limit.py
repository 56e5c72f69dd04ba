"""A request beyond any memory is refused before an op of it is generated."""

from __future__ import annotations

import tracemalloc

import pytest

from penstock.errors import FileError, ScheduleError
from penstock.schedule.catalogue import schedule, schedules
from penstock.schedule.op import Schedule
from penstock.schedule.size_limit import MAX_FORWARDS, check_ops, check_size
from penstock.schedule.streaming.period import with_batch_count
from penstock.schedule.torch_csv.files import from_csv


def test_the_limit_itself_is_allowed_and_one_more_is_not():
    """The message says what it would take."""
    check_size("1f1b", 1000, MAX_FORWARDS // 1000)
    message = (
        r"1f1b with 1,000 stages x 5,001 micro-batches has at least 1e\+07 ops, which take 1 GB"
    )
    with pytest.raises(ScheduleError, match=message):
        check_size("1f1b", 1000, MAX_FORWARDS // 1000 + 1)


@pytest.mark.parametrize("name", schedules())
def test_no_schedule_is_generated_beyond_the_limit(name):
    """The memory of a billion ops is not even begun to be filled."""
    tracemalloc.start()
    with pytest.raises(ScheduleError, match="stages x micro-batches may be 5,000,000 at most"):
        schedule(name, 32_768, 32_768)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 10**6


def test_options_that_multiply_micro_batches_count():
    """Slices and batches are micro-batches of their own in the programs."""
    with pytest.raises(ScheduleError, match=r"x 1,000,000 \(batches or slices\)"):
        schedule("pipedream", 2, 4, batches=1_000_000)
    with pytest.raises(ScheduleError, match=r"x 10,000,000 \(batches or slices\)"):
        schedule("terapipe", 2, 4, slices=10_000_000)


@pytest.mark.parametrize("op", ["0F999999999999999999", "999999999999999999B0", "0U99999999"])
def test_programs_that_name_a_distant_op_are_refused(op):
    """Those of a plan that is read from a file are checked by this function."""
    with pytest.raises(ScheduleError, match=r"mine with .* may be 5,000,000 at most"):
        check_ops("mine", Schedule.parse(f"0F0 0B0 {op}", "mine").programs)


def test_a_stream_is_not_continued_beyond_the_limit():
    """The number of batches is an option of the command line."""
    with pytest.raises(ScheduleError, match="pipedream with 4 stages x 4,000,000,000 micro"):
        with_batch_count(schedule("pipedream", 4, 4), 10**9)


def test_a_csv_of_too_many_cells_is_refused_before_it_is_parsed():
    """A parsed cell takes forty times its text."""
    with pytest.raises(FileError, match="1,000,001 cells, more than the 1,000,000 allowed"):
        from_csv("," * 1_000_001)
    with pytest.raises(FileError, match="1,000,001 cells, more than the 1,000,000 allowed"):
        from_csv("\n" * 1_000_001)


def test_a_csv_that_names_a_distant_op_is_refused():
    """The same for files in torch's format."""
    with pytest.raises(ScheduleError, match="may be 5,000,000 at most"):
        from_csv("0F0,0F99999999,0B0")


@pytest.mark.parametrize("option", ["batches", "slices", "pipelines", "virtual_workers"])
def test_each_option_that_multiplies_counts_from_two(option):
    """One is the schedule itself; what is no number is checked elsewhere."""
    half = MAX_FORWARDS // 2
    for value in (1, None, "2", 0, -3):
        check_size("mine", 1, MAX_FORWARDS, {option: value})
        with pytest.raises(ScheduleError, match="may be 5,000,000 at most"):
            check_size("mine", 1, MAX_FORWARDS + 1, {option: value})
    check_size("mine", 1, half, {option: 2})
    with pytest.raises(ScheduleError) as caught:
        check_size("mine", 1, half + 1, {option: 2})
    assert str(caught.value).startswith(
        "mine with 1 stages x 2,500,001 micro-batches x 2 (batches or slices) has at least 1e+07 "
    )
    with pytest.raises(ScheduleError, match=r"1 stages x 5,000,001 micro-batches has at least"):
        check_size("mine", 1, MAX_FORWARDS + 1, {option: 1, "replicas": 9})


def test_programs_are_as_large_as_their_highest_numbers():
    """Exactly the limit is allowed."""
    check_ops("mine", [[("F", 0, MAX_FORWARDS - 1)], []])
    check_ops("mine", [[("F", 1, 0)], [("B", 0, MAX_FORWARDS // 2 - 1)]])
    with pytest.raises(ScheduleError, match="mine with 1 stages x 5,000,001 micro-batches"):
        check_ops("mine", [[("F", 0, MAX_FORWARDS)]])
    with pytest.raises(ScheduleError, match="mine with 2 stages x 2,500,001 micro-batches"):
        check_ops("mine", [[("F", 1, 0)], [("B", 0, MAX_FORWARDS // 2)]])
