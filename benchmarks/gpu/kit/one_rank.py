"""Schedules of several ranks, played by one: all of them in turn, or one of them alone."""

from __future__ import annotations

from collections import deque

from penstock.schedule.op import Kind, Op, Schedule


def all_in_turn(schedule: Schedule) -> Schedule:
    """The ops of all ranks in one program, in an order that their dependencies allow.

    A pipeline plays it in the caller's thread, without messages: what a single GPU needs, whose
    stages cannot run at the same time.

    >>> print(all_in_turn(Schedule.parse("rank 0 | 0F0 0B0 0U1\\nrank 1 | 1F0 1B0 1U1")))
    rank 0 | 0F0 1F0 1B0 1U1 0B0 0U1
    """
    waiting = [deque(program) for program in schedule.programs]
    done: set[Op] = set()
    order: list[Op] = []
    while any(waiting):
        before = len(order)
        for program in waiting:
            while program and _is_ready(program[0], schedule.stages, done):
                done.add(program[0])
                order.append(program.popleft())
        if len(order) == before:
            raise ValueError(f"{schedule.name}: no rank can go on after {order[-1]}")
    return Schedule((tuple(order),), f"{schedule.name}, one rank")


def _is_ready(op: Op, stages: int, done: set[Op]) -> bool:
    """Whether the op of the neighbouring stage that an op takes its input from is done."""
    if op.kind is Kind.F:
        return op.stage == 0 or op._replace(stage=op.stage - 1) in done
    if op.kind is Kind.B:
        return op.stage == stages - 1 or op._replace(stage=op.stage + 1) in done
    return True


def rank_alone(schedule: Schedule, rank: int) -> Schedule:
    """The program of a rank that has one stage, as the program of the only stage there is."""
    program = tuple(op._replace(stage=0) for op in schedule.programs[rank])
    return Schedule((program,), f"{schedule.name}, rank {rank} alone")
