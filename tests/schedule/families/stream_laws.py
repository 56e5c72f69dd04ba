"""What every asynchronous family promises, and its figures counted from the programs and from a
simulation.
"""

from __future__ import annotations

import math
from collections import Counter

import pytest

from penstock.schedule.op import Kind, Schedule
from penstock.schedule.period import period_of, prolonged
from penstock.simulate.costs import Costs
from penstock.simulate.simulate import simulate_schedule
from penstock.verify.verify import Report, verify


def check_stream(made: Schedule) -> Report:
    """Sound; its text reads back; on every rank a stage has its gradients in plain order, and one U
    per batch, right after the last.

    Returns:
        What `verify` found.
    """
    report = verify(made)
    assert not made.synchronous
    assert Schedule.parse(str(made)).programs == made.programs
    for rank, program in enumerate(made.programs):
        for stage in made.stages_of_rank[rank]:
            own = [n for (of, n), home in made.placement.items() if (of, home) == (stage, rank)]
            assert [
                op.micro_batch for op in program if op.stage == stage and op.kind is Kind.B
            ] == sorted(own)
            last = [
                n
                for n, after in zip(sorted(own), [*sorted(own)[1:], -1], strict=True)
                if after < 0 or after // made.micro_batches > n // made.micro_batches
            ]
            updates = [
                (program[place - 1], op)
                for place, op in enumerate(program)
                if op.kind is Kind.U and op.stage == stage
            ]
            assert [(str(before), str(op)) for before, op in updates] == [
                (f"{stage}B{n}", f"{stage}U{version}") for version, n in enumerate(last, start=1)
            ]
    period_of(made)
    return report


def gaps(made: Schedule) -> dict[tuple[int, int], int]:
    """By stage and micro-batch, the updates of its rank's copy between its forward and its
    backward, counted op by op.
    """
    found: dict[tuple[int, int], int] = {}
    for program in made.programs:
        version: Counter[int] = Counter()
        for kind, stage, number in program:
            if kind is Kind.F:
                found[stage, number] = -version[stage]
            elif kind is Kind.B:
                found[stage, number] += version[stage]
            elif kind is Kind.U:
                version[stage] += 1
    return found


def expected_gap(ahead: int, size: int, number: int) -> int:
    """LITERATURE 5 and 13.3, where `ahead` is p - s: min(t, max(0, ceil((p - 1 - s - j) / m)))."""
    batch, place = divmod(number, size)
    return min(batch, max(0, math.ceil((ahead - 1 - place) / size)))


def seconds_per_batch(made: Schedule, f: float = 1, b: float = 2) -> float:
    """Where every rank needs f and b for a micro-batch: seconds from one batch's last op to the
    next one's, on the first stage.

    Counted over a dozen batches of each copy in the middle of a long stream; asked of every rank,
    which all must say the same.
    """
    each = max(map(len, made.stages_of_rank))
    copies = len(made.ranks_of_stage[0])
    long = prolonged(made, 40 * copies)
    line = simulate_schedule(long, Costs(forward=f / each, backward=b / each))
    ends = {(event.rank, event.op): event.end for event in line.compute if event.op.kind is Kind.U}
    found = []
    for rank, program in enumerate(long.programs):
        updates = [op for op in program if op.kind is Kind.U and op.stage == program[0].stage]
        found.append((ends[rank, updates[30]] - ends[rank, updates[18]]) / 12)
    assert found == pytest.approx([found[0]] * len(found))
    return found[0]
