"""Updates of synchronous schedules: after the last gradient, and no sooner."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.schedule.custom_schedules import custom_schedules

from penstock.schedule.catalogue import schedule
from penstock.schedule.op import Kind, Op
from penstock.schedule.updates import with_updates
from penstock.simulate.costs import Costs
from penstock.simulate.simulate import simulate_schedule
from penstock.verify.verify import verify


def test_with_a_split_backward_the_update_waits_for_the_weights_part():
    """I is not the end of the gradients."""
    ops = [Op.parse(word) for word in ["0F0", "1F0", "1I0", "0I0", "0W0", "1W0"]]
    assert " ".join(map(str, with_updates(ops))) == "0F0 1F0 1I0 0I0 0W0 0U1 1W0 1U1"


@given(custom_schedules(synchronous=True).filter(lambda made: all(len(ranks) == 1 for ranks in made.ranks_of_stage)))
@settings(deadline=None, max_examples=40)
def test_any_schedule_without_copies_is_sound_with_its_updates_put_back(made):
    """Every stage gets one, after all of its gradients."""
    bare = [[op for op in program if op.kind is not Kind.U] for program in made.programs]
    back = dataclasses.replace(made, programs=tuple(map(with_updates, bare)))
    verify(back)
    assert [[op for op in program if op.kind is not Kind.U] for program in back.programs] == bare


@pytest.mark.parametrize("name", ["interleaved", "breadth-first", "hanayo"])
@given(st.integers(1, 5), st.integers(1, 3), st.floats(0, 9))
@settings(deadline=None, max_examples=20)
def test_early_updates_cost_no_time_even_where_they_are_long(name, ranks, rounds, seconds):
    """They stand between other stages' backwards, which wait for other ranks anyway: the reason why they may stand there."""
    made = schedule(name, 2 * ranks, rounds * ranks)
    late = [[op for op in row if op.kind is not Kind.U] + [op for op in row if op.kind is Kind.U] for row in made.programs]
    costs = Costs(forward=1, backward=2, update=seconds)
    makespan = simulate_schedule(dataclasses.replace(made, programs=tuple(map(tuple, late))), costs).makespan
    assert simulate_schedule(made, costs).makespan == pytest.approx(makespan)
