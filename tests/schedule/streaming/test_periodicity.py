"""Periodicity: the head and the loop of a program, against a search in lists."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.schedule.catalogue import schedule
from penstock.schedule.op import Kind, Op, Schedule
from penstock.schedule.streaming.periodicity import ProgramColumns


def batches_of(program, size):
    """The batch of every op: a U belongs to the batch of the gradient before it."""
    batches, last = [], 0
    for op in program:
        last = last if op.kind is Kind.U else op.micro_batch // size
        batches.append(last)
    return batches


def slow_split(program, complete, batch, batches, total, size):
    """Op by op: the shortest head behind which every op is that of a loop before, moved on."""
    middle = total // 2 // batches * batches
    loop = [op for op, b in zip(program, batch, strict=True) if middle <= b < middle + batches]
    if not loop:
        return None if program else ((), (), Counter())
    updates = Counter(op.stage for op in loop if op.kind is Kind.U)

    def moved(op):
        step = updates[op.stage] if op.kind is Kind.U else batches * size
        return op._replace(micro_batch=op.micro_batch + step)

    start = max(complete - len(loop), 0)
    while start and moved(program[start - 1]) == program[start - 1 + len(loop)]:
        start -= 1
    if complete - start < 2 * len(loop):
        return None
    return program[:start], program[start : start + len(loop)], updates


@settings(max_examples=60)
@given(st.data())
def test_head_and_loop_are_those_of_a_search_op_by_op(data):
    """Over real streams and ones with an op moved, for loops of every number of batches."""
    name = data.draw(st.sampled_from(["pipedream", "2bw", "hetpipe", "xpipe", "avgpipe", "wpipe"]))
    try:
        stream = schedule(
            name, 3, data.draw(st.integers(1, 3)), batches=data.draw(st.integers(1, 9))
        )
    except ValueError:
        return
    size = max(stream.micro_batches, 1)
    rank = data.draw(st.integers(0, stream.ranks - 1))
    program = list(stream.programs[rank])
    if program and data.draw(st.booleans()):
        op = program.pop(data.draw(st.integers(0, len(program) - 1)))
        program.insert(data.draw(st.integers(0, len(program))), op)
    programs = [*stream.programs[:rank], tuple(program), *stream.programs[rank + 1 :]]
    stream = Schedule(tuple(programs), synchronous=False, stream=stream.stream)
    batch = batches_of(program, size)
    columns = ProgramColumns.of(stream, rank, batch)
    ends = {op[:2]: place for place, op in enumerate(program)}
    assert columns.complete == min(ends.values(), default=len(program) - 1) + 1
    for batches in range(1, stream.batches + 1):
        expected = slow_split(
            tuple(program), columns.complete, batch, batches, stream.batches, size
        )
        assert columns.split(batches, stream.batches) == expected


@pytest.mark.parametrize(("repeats", "splits"), [(2, False), (3, True)])
def test_a_loop_must_occur_twice_before_the_end_shows(repeats, splits):
    """The last batch alone proves nothing: what follows it may be anything."""
    ops = [Op(kind, 0, n) for n in range(repeats) for kind in (Kind.F, Kind.B)]
    columns = ProgramColumns.of(
        Schedule((tuple(ops),)), 0, [n for n in range(repeats) for _ in "FB"]
    )
    columns = ProgramColumns(
        columns.program,
        1,
        columns.kind,
        columns.stage,
        columns.number,
        columns.batch,
        2 * repeats - 1,
    )
    split = columns.split(1, repeats)
    assert (split is not None) == splits
    if split is not None:
        assert split == ((), tuple(ops[:2]), Counter())


def test_a_rank_without_ops_repeats_nothing():
    """It is no reason to refuse a stream."""
    columns = ProgramColumns.of(Schedule(((), (Op(Kind.F, 0, 0),))), 0, [])
    assert columns.split(1, 1) == ((), (), Counter())
