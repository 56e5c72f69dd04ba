"""The optimum, proved by OR-Tools' CP-SAT.

One interval for every op, none of a rank's overlapping; messages in the order of their sending.
Micro-batches of a route are in order, which loses nothing (see `arrays`), and every op lies between
its head and what its tail leaves of the best makespan known (see `bound`), which is most of the
proof. Where micro-batches go two ways every number of each is a model of its own.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import combinations, pairwise, product
from typing import Any, NamedTuple

from penstock.errors import MissingExtra
from penstock.schedule.op import Kind, Op, Schedule
from penstock.search.synthesis.bound import Way, seconds_of
from penstock.search.synthesis.problem import Problem, StageCosts
from penstock.simulate.simulate import simulate_schedule

#: Where seconds are no whole numbers of any tick, so many ticks make the best makespan known, and
#: seconds are rounded down to
#: them: a bound stays one, and is short of the truth by a tick for every op of the longest path.
MOST_TICKS = 10**8


@dataclass(frozen=True)
class Proof:
    """What CP-SAT found: a schedule shorter than the one given, if there is one, and what no
    schedule undercuts.
    """

    schedule: Schedule | None
    lower_bound: float


def load() -> Any:
    """OR-Tools' module.

    Raises:
        MissingExtra: it is not installed.
    """
    try:
        from ortools.sat.python import cp_model
    except ImportError as error:
        raise MissingExtra("ortools", "search", "exact=True") from error
    return cp_model


def prove(problem: Problem, best: Schedule, most: float, until_s: float, seed: int = 0) -> Proof:
    """Search for the optimum until `time.monotonic()` is `until_s`.

    Args:
        problem: the problem.
        best, most: a schedule without E, L and pairs, and its makespan.
        until_s: when to stop.
        seed: of the solver.

    Raises:
        MissingExtra: OR-Tools is not installed.
    """
    cp = load()
    ticks = ticks_per_second(problem.costs, most)
    whole = replace(problem, costs=in_ticks(problem.costs, ticks))
    m = problem.micro_batches
    splits = (
        [(m,)]
        if len(problem.routes) == 1
        else sorted(((n, m - n) for n in range(1, m)), key=lambda c: abs(c[0] - c[1]))
    )
    found, bounds = None, []
    top = round(simulate_schedule(best, whole.costs.costs()).makespan)
    for counts in splits:
        low = math.ceil(seconds_of(whole, counts) - 1e-6)
        left = until_s - time.monotonic()
        if low < top and left > 0:
            made, low = _Model(cp, whole, counts, top).solve(low, left, seed)
            if made is not None:
                found, top = made
        bounds.append(min(low, top))
    return Proof(found, float(min(bounds) / ticks))


def ticks_per_second(costs: StageCosts, most: float) -> Fraction:
    """Ticks in which all seconds are whole numbers if `most` then has less than `MOST_TICKS`, else
    so many that it has these.
    """
    numbers = {number for row in costs.seconds for number in row if number}
    exact = [_decimal(number) for number in numbers]
    bottom = math.lcm(*(each.denominator for each in exact))
    ticks = Fraction(
        bottom, math.gcd(*(each.numerator * (bottom // each.denominator) for each in exact)) or 1
    )
    return ticks if most * ticks <= MOST_TICKS else Fraction(MOST_TICKS) / Fraction(repr(most))


def _decimal(number: float) -> Fraction:
    """What was meant: 0.3 for 0.1 + 0.2."""
    return Fraction(f"{number:.12g}")


def in_ticks(costs: StageCosts, ticks: Fraction) -> StageCosts:
    """The same costs in whole ticks, rounded down."""
    f, i, w, b, u, up, down = (
        tuple(float(math.floor(_decimal(number) * ticks)) for number in row)
        for row in costs.seconds
    )
    return StageCosts(f, i, w, b, u, up, down, costs.hold, costs.in_bytes)


@dataclass(frozen=True)
class _Turn:
    """One micro-batch on one stage: variables of the starts of F, of I or B, of W; of the end of I
    or B, and of W or B.
    """

    op: tuple[int, int]
    forward: Any
    back: Any
    weights: Any
    turned: Any
    released: Any
    whole: Any


class _Message(NamedTuple):
    """A value on its way: variables of the start and end of the op that makes it, and of when it
    leaves; its ticks on the link.
    """

    begin: Any
    made: Any
    leaves: Any
    seconds: int


class _Model:
    """One number of micro-batches on each route, every cost a whole number of ticks."""

    def __init__(self, cp: Any, problem: Problem, counts: Sequence[int], most: int) -> None:
        self.cp, self.problem, self.counts, self.most = cp, problem, tuple(counts), most
        self.model = cp.CpModel()
        self.makespan = self.model.new_int_var(0, most - 1, "makespan")
        self.on_rank: list[list[Any]] = [[] for _ in range(problem.ranks)]
        self.updates: list[tuple[Any, int]] = []
        self.turns = [self._route(route) for route in range(len(counts))]
        self._messages()
        self._memory()
        self._end()
        for intervals in self.on_rank:
            self.model.add_no_overlap(intervals)
        self.model.minimize(self.makespan)

    def _route(self, route: int) -> list[list[_Turn]]:
        """The ops of a route's micro-batches, by stage and number."""
        way = Way(self.problem, self.counts, route)
        first = sum(self.counts[:route])
        rows = [[self._turn(way, s, n, first) for n in range(way.count)] for s in range(way.stages)]
        for row in rows:
            for one, other in pairwise(row):
                self.model.add(other.forward >= one.forward + int(way.f[one.op[0]]))
                self.model.add(other.back >= one.turned)
                if one.whole is None:
                    self.model.add(other.weights >= one.released)
        return rows

    def _turn(self, way: Way, s: int, n: int, first: int) -> _Turn:
        c, model, rank = self.problem.costs, self.model, self.on_rank[way.homes[s]]
        f, i, w, b, update = (
            int(each[s]) for each in (c.forward, c.inputs, c.weights, c.whole, c.update)
        )
        forward = self._var(way.head_f[s, n], f + way.tail_f[s, n])
        back = self._var(way.head_i[s, n], min(i, b) + way.tail_i[s, n])
        # A whole backward ends with its weights' part, which the tail of an I still has before it.
        halves = self.problem.split and i + w <= b
        turned = self._var(way.head_i[s, n] + min(i, b), way.tail_i[s, n] if halves else update)
        weights = self._var(way.head_i[s, n] + min(i, b), update)
        released = self._var(way.head_i[s, n] + min(i + w, b), update)
        rank.append(model.new_fixed_size_interval_var(forward, f, ""))
        whole = None
        if halves:
            rank.append(model.new_interval_var(back, i, turned, ""))
            rank.append(model.new_interval_var(weights, w, released, ""))
        else:
            whole = model.new_bool_var("")
            model.add(whole == 1 if not self.problem.split else whole >= 0)
            rank.append(model.new_interval_var(back, i + (b - i) * whole, turned, ""))
            rank.append(model.new_optional_interval_var(weights, w, released, ~whole, ""))
            model.add(released == turned).only_enforce_if(whole)
        model.add(weights >= turned).only_enforce_if([] if whole is None else [~whole])
        model.add(back >= forward + f)
        return _Turn((s, first + n), forward, back, weights, turned, released, whole)

    def _var(self, head: float, tail: float) -> Any:
        low = math.ceil(head - 1e-6)
        return self.model.new_int_var(low, max(low, self.most - math.ceil(tail - 1e-6)), "")

    def _messages(self) -> None:
        """An op that takes a value starts when it has come; each link carries its messages one at a
        time, as they are sent.
        """
        c, model = self.problem.costs, self.model
        links: dict[tuple[int, int], list[list[_Message]]] = {}
        for route, homes in enumerate(self.problem.routes):
            for s, (home, above) in enumerate(pairwise(homes)):
                here, there = self.turns[route][s], self.turns[route][s + 1]
                f, up, down = (int(each[s]) for each in (c.forward, c.up, c.down))
                rising = [
                    (a.forward, a.forward + f, b.forward) for a, b in zip(here, there, strict=True)
                ]
                falling = [(b.back, b.turned, a.back) for a, b in zip(here, there, strict=True)]
                for values, link, seconds in (
                    (rising, (home, above), up),
                    (falling, (above, home), down),
                ):
                    if home == above:
                        for _, made, taken in values:
                            model.add(taken >= made)
                        continue
                    sent = [
                        _Message(begin, made, self._var(0, 0), seconds) for begin, made, _ in values
                    ]
                    links.setdefault(link, []).append(sent)
                    for message, (*_, taken) in zip(sent, values, strict=True):
                        model.add(message.leaves >= message.made)
                        model.add(taken >= message.leaves + seconds)
                    for one, other in pairwise(sent):
                        model.add(other.leaves >= one.leaves + seconds)
        for kinds in links.values():
            for rows in combinations(kinds, 2):
                for one, other in product(*rows) if any(row[0].seconds for row in rows) else ():
                    first = model.new_bool_var("")
                    model.add(one.made <= other.begin).only_enforce_if(first)
                    model.add(other.leaves >= one.leaves + one.seconds).only_enforce_if(first)
                    model.add(other.made <= one.begin).only_enforce_if(~first)
                    model.add(one.leaves >= other.leaves + other.seconds).only_enforce_if(~first)

    def _memory(self) -> None:
        """No rank holds more than its limit, from the start of F to the end of B or W."""
        p, model = self.problem, self.model
        for rank, copies in enumerate(p.held_on):
            rows = [self.turns[copy // p.stages][copy % p.stages] for copy in copies]
            holds = [Fraction(repr(p.costs.hold[copy % p.stages])) for copy in copies]
            if (
                p.limits[rank] == math.inf
                or sum(h * len(row) for h, row in zip(holds, rows, strict=True)) <= p.limits[rank]
            ):
                continue
            unit = math.lcm(*(hold.denominator for hold in holds))
            limit = Fraction(repr(p.limits[rank])) * unit
            if len(rows) == 1 and rows[0][0].whole is None:
                room = math.floor(limit / holds[0] / unit)
                for turn, other in zip(rows[0], rows[0][room:], strict=False):
                    model.add(other.forward >= turn.released)
                continue
            spans, demands = [], []
            for row, hold in zip(rows, holds, strict=True):
                for turn in row:
                    size = model.new_int_var(0, self.most, "")
                    spans.append(model.new_interval_var(turn.forward, size, turn.released, ""))
                    demands.append(int(hold * unit))
            model.add_cumulative(spans, demands, math.floor(limit))

    def _end(self) -> None:
        """Updates come after all backwards of their stage, at one time on all copies; the last of
        them ends the batch.
        """
        p = self.problem
        for s in range(p.stages):
            seconds = int(p.costs.update[s])
            turns = [turn for rows in self.turns for turn in rows[s]]
            ranks = {homes[s] for homes in p.routes}
            start = self.model.new_int_var(0, self.most, "")
            for turn in turns:
                self.model.add(start >= turn.released)
            self.model.add(self.makespan >= start + seconds)
            self.updates.append((start, s))
            if seconds:
                for rank in ranks:
                    self.on_rank[rank].append(
                        self.model.new_fixed_size_interval_var(start, seconds, "")
                    )

    def solve(
        self, least: int, left_s: float, seed: int
    ) -> tuple[tuple[Schedule, int] | None, int]:
        """A shorter schedule with its ticks, if one was found, and what no schedule undercuts."""
        self.model.add(self.makespan >= least)
        solver = self.cp.CpSolver()
        solver.parameters.max_time_in_seconds = max(left_s, 0.05)
        solver.parameters.num_workers = min(8, max(2, os.cpu_count() or 1))
        solver.parameters.random_seed = seed
        status = solver.solve(self.model)
        if status == self.cp.INFEASIBLE:
            return None, self.most
        bound = max(least, math.ceil(solver.best_objective_bound - 1e-6))
        if status not in (self.cp.OPTIMAL, self.cp.FEASIBLE):
            return None, bound
        return (self._schedule(solver), round(solver.objective_value)), bound

    def _schedule(self, solver: Any) -> Schedule:
        """The programs that start times are; of what starts at one time, first what takes no time
        and is needed first.
        """
        p = self.problem
        rows: list[list[tuple[int, int, int, int, Op]]] = [[] for _ in range(p.ranks)]
        for route, homes in enumerate(p.routes):
            for s, home in enumerate(homes):
                for turn in self.turns[route][s]:
                    _, m = turn.op
                    joined = turn.whole is not None and bool(solver.value(turn.whole))
                    ops = [
                        (turn.forward, turn.forward + int(p.costs.forward[s]), s, Kind.F),
                        (turn.back, turn.turned, 2 * p.stages - s, Kind.B if joined else Kind.I),
                    ]
                    ops += (
                        [] if joined else [(turn.weights, turn.released, 2 * p.stages + 1, Kind.W)]
                    )
                    rows[home] += [
                        (solver.value(a), solver.value(z), m, order, Op(kind, s, m))
                        for a, z, order, kind in ops
                    ]
        for start, s in self.updates:
            # One that takes no time must not wait for the other copy's amid other work.
            begin = solver.value(start) if p.costs.update[s] else self.most
            for home in {homes[s] for homes in p.routes}:
                end = begin + int(p.costs.update[s])
                rows[home].append((begin, end, p.micro_batches + s, 0, Op(Kind.U, s, 1)))
        programs = (sorted(row, key=lambda each: each[:4]) for row in rows)
        return Schedule(
            tuple(tuple(op for *_, op in program) for program in programs), "synthesised"
        )
