"""Updates before the end of the batch, where that shortens a schedule."""

from __future__ import annotations

import pytest

from penstock.schedule.op import Schedule
from penstock.simulate.costs import Costs
from penstock.simulate.simulate import simulate_schedule
from penstock.synthesis.updates import with_early_updates


def early(text, **costs):
    """The programs with early updates, and the seconds before and after."""
    case = Schedule.parse(text)
    fields = Costs(**costs)

    def seconds(schedule):
        return simulate_schedule(schedule, fields).makespan

    moved = with_early_updates(case, seconds)
    assert seconds(moved) <= seconds(case)
    return str(moved).replace("rank 0 | ", "").replace("rank 1 | ", ""), seconds(case) - seconds(
        moved
    )


def test_an_update_moves_into_the_time_in_which_its_rank_waits():
    """Rank 0 waits for the gradient of stage 1, and has done all of stage 2."""
    text = "0F0 2F0 2B0 0B0 0U1 2U1\n1F0 1B0 1U1"
    fields = {"forward": (1.0,) * 3, "backward": (2.0,) * 3, "update": (0.0, 0.0, 2.0)}
    assert early(text, **fields) == ("0F0 2F0 2B0 2U1 0B0 0U1\n1F0 1B0 1U1", 2.0)


def test_an_update_moves_behind_the_weight_gradient_of_a_split_backward():
    """Its weights must not change before the gradients are complete."""
    text = "0F0 2F0 2I0 2W0 0B0 0U1 2U1\n1F0 1B0 1U1"
    fields = {"forward": (1.0,) * 3, "input_grad": 1.0, "weight_grad": 1.0, "update": (0.0, 0.0, 2)}
    assert early(text, **fields) == ("0F0 2F0 2I0 2W0 2U1 0B0 0U1\n1F0 1B0 1U1", 1.0)


def test_an_update_that_shortens_nothing_stays():
    """A rank that never waits is as fast either way."""
    text = "0F0 1F0 1B0 0B0 0U1 1U1"
    fields = {"forward": (1.0,) * 2, "backward": (2.0,) * 2, "update": (1.0, 1.0)}
    assert early(text, **fields) == (text, 0.0)


def test_updates_of_copies_move_on_all_of_their_ranks_and_never_into_a_deadlock():
    """Two ranks with two stages each in opposite orders would wait for each other forever."""
    text = "0F0 1F1 1B1 0B0 0U1 1U1\n1F0 0F1 1B0 0B1 0U1 1U1"
    fields = {"forward": (1.0, 1.0), "backward": (2.0, 2.0), "update": (1.0, 3.0)}
    moved, _ = early(text, **fields)
    rows = [row.split() for row in moved.splitlines()]
    orders = [[word for word in row if "U" in word] for row in rows]
    assert orders[0] == orders[1]


@pytest.mark.parametrize(
    ("makespans", "expected"),
    [
        ((10, 8, 9, 9), "2B0 2U1 1B0 0B0 1U1 0U1"),
        ((10, 10, 9, 8), "2B0 1B0 1U1 0B0 0U1 2U1"),
        ((10, 8, 7, 7), "2B0 2U1 1B0 1U1 0B0 0U1"),
        ((10, 11, 10, 10), "2B0 1B0 0B0 2U1 1U1 0U1"),
    ],
)
def test_a_moved_update_must_shorten_what_those_before_it_have_left(makespans, expected):
    """Stage 2 is tried first, then 1 and 0; an equal makespan is no reason to move one."""
    case = Schedule.parse("0F0 1F0 2F0 2B0 1B0 0B0 2U1 1U1 0U1")
    seconds = iter(makespans)
    moved = with_early_updates(case, lambda _: next(seconds))
    assert [*seconds] == []
    assert " ".join(map(str, moved.programs[0])) == f"0F0 1F0 2F0 {expected}"
