"""Programs over slices of sequences, written by hand from the papers; the catalogue's families need
not be right for these tests.
"""

from __future__ import annotations

from penstock.schedule.op import Kind, Op, Schedule
from penstock.schedule.slicing import Slicing


def forward_order(slicing: Slicing) -> list[int]:
    """Slices one after another."""
    return list(range(len(slicing.share)))


def backward_order(slicing: Slicing) -> list[int]:
    """Micro-batch after micro-batch, of each the last slice first."""
    return [
        n
        for first, row in zip(slicing.first_of, slicing.shares, strict=True)
        for n in reversed(range(first, first + len(row)))
    ]


def terapipe(stages: int, slicing: Slicing) -> Schedule:
    """All forwards, then all backwards (Li et al. 2021)."""
    programs = []
    for stage in range(stages):
        forwards = [Op(Kind.F, stage, n) for n in forward_order(slicing)]
        programs.append(
            (
                *forwards,
                *(Op(Kind.B, stage, n) for n in backward_order(slicing)),
                Op(Kind.U, stage, 1),
            )
        )
    return Schedule(tuple(programs), "terapipe by hand", slicing=slicing)


def seq1f1b(stages: int, slicing: Slicing, split: bool = False) -> Schedule:
    """One forward, one backward, on slices (Sun et al. 2024): stage s begins with S - s - 2 + k
    forwards. Every micro-batch has k slices. With `split`, every backward is I and, after the next
    I, W.
    """
    most = max(map(len, slicing.shares))
    programs = []
    for stage in range(stages):
        forwards = [Op(Kind.F, stage, n) for n in forward_order(slicing)]
        backwards = [Op(Kind.B, stage, n) for n in backward_order(slicing)]
        if split:
            backwards = [
                op
                for n in backward_order(slicing)
                for op in (Op(Kind.I, stage, n), Op(Kind.W, stage, n))
            ]
        per_step = 2 if split else 1
        warm_up = min(stages - stage - 2 + most, len(forwards))
        program, rest = forwards[:warm_up], forwards[warm_up:]
        while rest or backwards:
            program += [*rest[:1], *backwards[:per_step]]
            rest, backwards = rest[1:], backwards[per_step:]
        programs.append((*program, Op(Kind.U, stage, 1)))
    return Schedule(tuple(programs), "seq1f1b by hand", slicing=slicing)


def on_fewer_ranks(schedule: Schedule, ranks: int) -> Schedule:
    """The same with stage s on rank s mod `ranks`, in an order of GPipe's kind: sound whatever the
    stages.
    """
    programs: list[list[Op]] = [[] for _ in range(ranks)]
    slicing = schedule.slicing
    assert slicing is not None
    for stage in range(schedule.stages):
        programs[stage % ranks] += [Op(Kind.F, stage, n) for n in forward_order(slicing)]
    for stage in reversed(range(schedule.stages)):
        programs[stage % ranks] += [Op(Kind.B, stage, n) for n in backward_order(slicing)]
        programs[stage % ranks].append(Op(Kind.U, stage, 1))
    return Schedule(
        tuple(map(tuple, programs)), f"{schedule.name} on {ranks} ranks", slicing=slicing
    )
