"""Encode schedules for the kernels, and decode programs to schedules."""

from __future__ import annotations

from collections import Counter

import numpy as np

from penstock.schedule.op import Kind, Op, Program, Schedule
from penstock.synthesis.arrays import (
    UPDATE,
    B,
    Encoding,
    F,
    I,
    Spec,
    W,
    Workspace,
    empty_encoding,
)
from penstock.synthesis.evaluate import evaluate
from penstock.synthesis.problem import Problem

_KINDS = {F: Kind.F, I: Kind.I, W: Kind.W, B: Kind.B}
_CODES = {kind: code for code, kind in _KINDS.items()}


def route_counts(problem: Problem, schedule: Schedule) -> tuple[int, ...] | None:
    """Return the number of micro-batches on each route, or None if the schedule is not placed as
    the problem requires.
    """
    if (schedule.ranks, schedule.stages, schedule.micro_batches) != (
        problem.ranks,
        problem.stages,
        problem.micro_batches,
    ):
        return None
    counts = [0] * len(problem.routes)
    for m in range(problem.micro_batches):
        stage_ranks = tuple(schedule.placement.get((s, m)) for s in range(problem.stages))
        if stage_ranks not in problem.routes:
            return None
        counts[problem.routes.index(stage_ranks)] += 1
    return tuple(counts) if min(counts) else None


def encode(problem: Problem, spec: Spec, schedule: Schedule) -> Encoding | None:
    """Encode a schedule that is placed as the problem requires; None if it has ops that cannot be
    encoded, or more of them.
    """
    encoding = empty_encoding(spec)
    first_ranks = [stage_ranks[0] for stage_ranks in problem.routes]
    route = {m: first_ranks.index(schedule.placement[0, m]) for m in range(problem.micro_batches)}
    for rank, program in enumerate(schedule.programs):
        codes = []
        for kind, stage, m in program:
            if kind is Kind.U:
                continue
            if kind not in _CODES or m not in route:
                return None
            codes.append(4 * (route[m] * problem.stages + stage) + _CODES[kind])
        if len(codes) > encoding.codes.shape[1]:
            return None
        encoding.lengths[rank] = len(codes)
        encoding.codes[rank, : len(codes)] = codes
    return encoding


def decode(problem: Problem, spec: Spec, encoding: Encoding, work: Workspace) -> Schedule:
    """Decode programs to a schedule: micro-batches are numbered by their turn, those of the second
    route after those of the first.
    """
    evaluate(spec, encoding, work)
    return Schedule(
        tuple(_program(problem, spec, encoding, work, rank) for rank in range(problem.ranks)),
        "synthesised",
    )


def join_halves(spec: Spec, encoding: Encoding, work: Workspace) -> None:
    """Join adjacent I and W of the same micro-batch to a B where that does not change the makespan:
    in practice halves cost a little more.
    """
    limit = evaluate(spec, encoding, work) * (1 + 1e-12)
    for rank in range(len(encoding.lengths)):
        # From the last one: a join moves all places behind it.
        places = _joinable(spec, encoding, rank)[::-1]
        if not places:
            continue
        # All pairs of a rank at once; if that is too slow, pair by pair.
        if not _try_join(spec, encoding, work, rank, places, limit):
            for place in places:
                _try_join(spec, encoding, work, rank, [place], limit)


def _try_join(
    spec: Spec, encoding: Encoding, work: Workspace, rank: int, places: list[int], limit: float
) -> bool:
    """Join the pairs at `places`, from the last to the first, unless the makespan then exceeds
    `limit`. Return whether they were joined.
    """
    codes, length = encoding.codes[rank].copy(), encoding.lengths[rank].copy()
    for place in places:
        _join(encoding, rank, place)
    if evaluate(spec, encoding, work) <= limit:
        return True
    encoding.codes[rank], encoding.lengths[rank] = codes, length
    return False


def _joinable(spec: Spec, encoding: Encoding, rank: int) -> list[int]:
    """Return the place of each I that its own W follows, if a B costs no more than both."""
    waiting: Counter[int] = Counter()
    places = []
    row = encoding.codes[rank, : encoding.lengths[rank]]
    for place, code in enumerate(map(int, row)):
        copy, kind = divmod(code, 4)
        if kind == I:
            follows = place + 1 < len(row) and int(row[place + 1]) == 4 * copy + W
            cost = spec.cost[copy]
            # If W of earlier micro-batches wait, the one that follows is theirs.
            if follows and not waiting[copy] and cost[B] <= (cost[I] + cost[W]) * (1 + 1e-12):
                places.append(place)
        waiting[copy] += (kind == I) - (kind == W)
    return places


def _join(encoding: Encoding, rank: int, place: int) -> None:
    """Replace the I and W at `place` by a B."""
    row, size = encoding.codes[rank], int(encoding.lengths[rank])
    row[place] += B - I
    row[place + 1 : size - 1] = row[place + 2 : size]
    encoding.lengths[rank] = size - 1


def _program(
    problem: Problem, spec: Spec, encoding: Encoding, work: Workspace, rank: int
) -> Program:
    """Return the program of a rank, with updates where `evaluate` puts them; updates that take no
    time come right after the last backward.
    """
    first = np.concatenate([[0], np.cumsum(spec.counts)])
    stages, has_one_route = problem.stages, len(problem.routes) == 1
    numbering = _Numbering()
    due = [*problem.copies_of_rank[rank]]
    unreleased = {copy: int(spec.counts[copy // stages]) for copy in due}
    ops: list[Op] = []
    free_s = 0.0
    for place in range(int(encoding.lengths[rank])):
        copy, code = divmod(int(encoding.codes[rank, place]), 4)
        start = float(work.start[rank, place])
        ready = [other for other in due if unreleased[other] == 0 and has_one_route]
        for other in ready:
            end = free_s + float(spec.cost[other, UPDATE])
            # An update that takes no time runs at once, any other one where the rank is idle long
            # enough.
            if end <= start:
                due.remove(other)
                free_s = end
                ops.append(Op(Kind.U, other % stages, 1))
        number = numbering.next(copy, code)
        if code in (W, B):
            unreleased[copy] -= 1
        ops.append(Op(_KINDS[code], copy % stages, int(first[copy // stages]) + number))
        free_s = max(free_s, start) + float(spec.cost[copy, code])
    last_updates = [Op(Kind.U, stage, 1) for stage in sorted({copy % stages for copy in due})]
    return (*ops, *last_updates)


class _Numbering:
    """Numbers micro-batches of every copy by their turn: the k-th F, and the k-th I or B; a W has
    the number of the first I that has no W yet.
    """

    def __init__(self) -> None:
        self._turns: Counter[tuple[int, bool]] = Counter()
        self._split: dict[int, list[int]] = {}

    def next(self, copy: int, code: int) -> int:
        """Return the number of the next op of this copy and kind."""
        if code == W:
            return self._split[copy].pop(0)
        key = copy, code == F
        number = self._turns[key]
        self._turns[key] += 1
        if code == I:
            self._split.setdefault(copy, []).append(number)
        return number
