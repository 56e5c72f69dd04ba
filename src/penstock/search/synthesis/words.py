"""Words to schedules, and schedules to words."""

from __future__ import annotations

from collections import Counter

import numpy as np

from penstock.schedule.op import Kind, Op, Program, Schedule
from penstock.search.synthesis.arrays import UPDATE, B, F, I, Spec, W, Words, Work, words_for
from penstock.search.synthesis.play import play
from penstock.search.synthesis.problem import Problem

_KINDS = {F: Kind.F, I: Kind.I, W: Kind.W, B: Kind.B}
_CODES = {kind: code for code, kind in _KINDS.items()}


def counts_of(problem: Problem, schedule: Schedule) -> tuple[int, ...] | None:
    """Micro-batches on each route, or None if the schedule is not placed as the problem asks."""
    if (schedule.ranks, schedule.stages, schedule.micro_batches) != (
        problem.ranks,
        problem.stages,
        problem.micro_batches,
    ):
        return None
    ways = [
        next(
            (
                route
                for route, homes in enumerate(problem.routes)
                if all(schedule.placement.get((s, m)) == home for s, home in enumerate(homes))
            ),
            None,
        )
        for m in range(problem.micro_batches)
    ]
    if None in ways:
        return None
    counts = tuple(ways.count(route) for route in range(len(problem.routes)))
    return counts if min(counts) else None


def words_of(problem: Problem, spec: Spec, schedule: Schedule) -> Words | None:
    """The words of a schedule placed as the problem asks; None if it has ops that words have not,
    or more of them.
    """
    words = words_for(spec)
    route = {
        m: next(
            way for way, homes in enumerate(problem.routes) if schedule.placement[0, m] == homes[0]
        )
        for m in range(problem.micro_batches)
    }
    for rank, program in enumerate(schedule.programs):
        codes = []
        for kind, stage, m in program:
            if kind is Kind.U:
                continue
            if kind not in _CODES or m not in route:
                return None
            codes.append(4 * (route[m] * problem.stages + stage) + _CODES[kind])
        if len(codes) > words.codes.shape[1]:
            return None
        words.lengths[rank] = len(codes)
        words.codes[rank, : len(codes)] = codes
    return words


def schedule_of(problem: Problem, spec: Spec, words: Words, work: Work) -> Schedule:
    """The schedule that words are: micro-batches numbered by their turn, those of the second route
    after those of the first.
    """
    play(spec, words, work)
    return Schedule(
        tuple(_program(problem, spec, words, work, rank) for rank in range(problem.ranks)),
        "synthesised",
    )


def joined(spec: Spec, words: Words, work: Work) -> None:
    """Make every I and W of one micro-batch that stand together one B, where the makespan stays:
    real halves cost a little more.
    """
    least = play(spec, words, work)
    rows = range(len(words.lengths))
    for places in [[(rank, pair) for pair in _pairs(spec, words, rank)[::-1]] for rank in rows]:
        # A whole rank at once; where that is too much, pair by pair.
        rank = places[0][0] if places else 0
        kept = words.codes[rank].copy(), words.lengths[rank].copy()
        for one in places:
            _join(words, *one)
        if places and play(spec, words, work) > least * (1 + 1e-12):
            words.codes[rank], words.lengths[rank] = kept
            for one in places:
                kept = words.codes[rank].copy(), words.lengths[rank].copy()
                _join(words, *one)
                if play(spec, words, work) > least * (1 + 1e-12):
                    words.codes[rank], words.lengths[rank] = kept


def _pairs(spec: Spec, words: Words, rank: int) -> list[int]:
    """Places of an I that its own W follows, where a B costs no more than both."""
    waiting: Counter[int] = Counter()
    found = []
    row = words.codes[rank, : words.lengths[rank]]
    for place, code in enumerate(map(int, row)):
        copy, kind = divmod(code, 4)
        if kind == I:
            follows = place + 1 < len(row) and int(row[place + 1]) == 4 * copy + W
            cost = spec.cost[copy]
            if follows and not waiting[copy] and cost[B] <= (cost[I] + cost[W]) * (1 + 1e-12):
                found.append(place)
        waiting[copy] += (kind == I) - (kind == W)
    return found


def _join(words: Words, rank: int, place: int) -> None:
    row, size = words.codes[rank], int(words.lengths[rank])
    row[place] += B - I
    row[place + 1 : size - 1] = row[place + 2 : size]
    words.lengths[rank] = size - 1


def _program(problem: Problem, spec: Spec, words: Words, work: Work, rank: int) -> Program:
    """The program of a rank, with updates where `play` has them; those that take no time right
    after the last backward.
    """
    first = np.concatenate([[0], np.cumsum(spec.counts)])
    width, stages = len(problem.routes), problem.stages
    turn: Counter[tuple[int, int]] = Counter()
    halves: dict[int, list[int]] = {copy: [] for copy in problem.held_on[rank]}
    due, free, ops = [*problem.held_on[rank]], 0.0, list[Op]()
    left = {copy: int(spec.counts[copy // stages]) for copy in due}
    for place in range(int(words.lengths[rank])):
        copy, code = divmod(int(words.codes[rank, place]), 4)
        start = float(work.start[rank, place])
        for other in [other for other in due if left[other] == 0 and width == 1]:
            end = free + float(spec.cost[other, UPDATE])
            if end <= start and (end == free or start > free):
                due.remove(other)
                free = end
                ops.append(Op(Kind.U, other % stages, 1))
        if code == W:
            number = halves[copy].pop(0)
        else:
            number = turn[copy, 0 if code == F else 1]
            turn[copy, 0 if code == F else 1] += 1
        if code == I:
            halves[copy].append(number)
        if code in (W, B):
            left[copy] -= 1
        ops.append(Op(_KINDS[code], copy % stages, int(first[copy // stages]) + number))
        free = max(free, start) + float(spec.cost[copy, code])
    return (*ops, *(Op(Kind.U, stage, 1) for stage in sorted({copy % stages for copy in due})))
