"""One thread runs the programs of all ranks in turn."""

from __future__ import annotations

import pytest

import penstock as ps
from penstock.errors import ScheduleError
from penstock.pipe.pipe_world import turns_of
from penstock.runtime.program_steps import steps_of
from penstock.schedule.catalogue import schedules
from penstock.schedule.lower import lower

#: Also asynchronous ones, and copies of stages: the order knows nothing of either.
NAMES = sorted(schedules())


@pytest.mark.parametrize("name", NAMES)
def test_turns_keep_the_order_of_every_rank_and_no_step_waits(name):
    """A step takes what its rank has made or what has been sent; all steps are run once."""
    for stages, micro_batches in ((4, 4), (4, 8), (2, 8)):
        try:
            schedule = ps.schedule(name, stages, micro_batches)
        except ScheduleError:  # it takes other numbers
            continue
        programs = [steps_of(program, schedule.stages) for program in lower(schedule).programs]
        turns = turns_of(programs)
        for rank, program in enumerate(programs):
            assert tuple(step for other, step in turns if other == rank) == program
        sent = set()
        received = [set() for _ in programs]
        for rank, step in turns:
            received[rank].update(message for _, message in step.posts)
            if step.input_message in received[rank]:
                assert (rank, step.input_message) in sent, (name, step.text)
            sent.update((peer, message) for peer, message in step.sends)
