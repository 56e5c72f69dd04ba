"""Ranks of a `Pipe`: in threads, and in turn in one thread."""

from __future__ import annotations

import threading

import pytest
import torch

import penstock as ps
from penstock.errors import ScheduleError
from penstock.pipe.pipe_world import PipeWorld, turns_of
from penstock.runtime.program_steps import steps_of
from penstock.schedule.catalogue import schedules
from penstock.schedule.lower import Message, lower
from penstock.schedule.op import Kind
from penstock.transport.payload import Payload

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


VALUE = Message(Kind.F, 0, 0)


def send(world, rank, value):
    """Send a number to the rank after this one."""
    world.transport(rank).send(rank + 1, VALUE, Payload.of(torch.tensor(value)), "")


def receive(world, rank):
    """Wait for the number that the rank before sends."""
    return world.transport(rank).post(rank - 1, VALUE, "").wait().value().item()


def test_every_rank_runs_its_job_in_a_thread_of_its_own():
    """The results are by rank. Messages pass between the threads."""
    world = PipeWorld(3, torch.device("cpu"))

    def job(rank):
        value = receive(world, rank) if rank else 1.0
        if rank < 2:
            send(world, rank, 2 * value)
        return value, threading.current_thread().name

    expected = {rank: (2.0**rank, f"penstock-pipe-{rank}") for rank in range(3)}
    for _ in range(2):
        results = world.run(job)
        assert {rank: results[rank] for rank in sorted(results)} == expected
    world.close()


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_the_error_of_the_rank_that_failed_is_raised_and_the_ranks_run_again(failing):
    """Ranks that wait for it end with errors of their own, which do not hide it. A message that the
    failed rank has not taken is not taken for that of the next batch.
    """
    world = PipeWorld(3, torch.device("cpu"))

    def job(rank, value, failing=None):
        if rank == failing:
            raise ArithmeticError(f"rank {rank}")
        if rank:
            value = receive(world, rank)
        if rank < 2:
            send(world, rank, value)
        return value

    for value in (5.0, 6.0):
        with pytest.raises(ArithmeticError, match=f"rank {failing}"):
            world.run(lambda rank: job(rank, 0.0, failing))
        assert list(world.run(lambda rank, value=value: job(rank, value)).values()) == [value] * 3
        assert [world.board(rank).failure() for rank in range(3)] == [None] * 3
    world.close()
