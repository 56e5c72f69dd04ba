"""The optimum, proved by OR-Tools' CP-SAT.

The model has one interval for every op, those of a rank without overlap; messages are in the order
of their sending. Micro-batches of a route are in order, which loses nothing (see `arrays`), and
every op lies between its head and the best known makespan minus its tail (see `bound`), which is
most of the proof. With two routes, every number of micro-batches on each is a model of its own.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import combinations, pairwise, product
from typing import Any, NamedTuple

from penstock.errors import MissingExtra
from penstock.schedule.dependencies import dependencies_of
from penstock.schedule.op import Kind, Op, Schedule
from penstock.schedule.rules import ACTIVATION_CHANGE
from penstock.simulate.simulate import simulate_schedule
from penstock.synthesis.bound import RouteBounds, seconds_of
from penstock.synthesis.problem import Problem, StageCosts

#: If seconds are no whole numbers of any tick, the best known makespan is divided into this number
#: of ticks, and seconds are rounded down to them: a bound stays valid, and is too low by at most a
#: tick for every op of the longest path.
MOST_TICKS = 10**8


@dataclass(frozen=True)
class Proof:
    """Result of CP-SAT.

    Attributes:
        schedule: a schedule shorter than the given one, or None.
        lower_bound: lower bound of the makespan in seconds.
    """

    schedule: Schedule | None
    lower_bound: float


def load() -> Any:
    """Import OR-Tools' module.

    Raises:
        MissingExtra: it is not installed.
    """
    try:
        from ortools.sat.python import cp_model
    except ImportError as error:
        raise MissingExtra("ortools", "search", "exact=True") from error
    return cp_model


def prove(problem: Problem, best: Schedule, most: float, until_s: float, seed: int = 0) -> Proof:
    """Search for the optimum until `time.monotonic()` reaches `until_s`.

    Args:
        problem: the problem.
        best: a schedule without E, L and pairs.
        most: its makespan in seconds.
        until_s: when to stop.
        seed: seed of the solver.

    Raises:
        MissingExtra: OR-Tools is not installed.
    """
    cp = load()
    ticks = ticks_per_second(problem.costs, most)
    in_tick_costs = replace(problem, costs=in_ticks(problem.costs, ticks))
    schedule, bounds = None, []
    # Simulated again: costs are rounded down to ticks, so that `most` times the ticks can be longer
    # than what this schedule takes in the model.
    shortest = round(simulate_schedule(best, in_tick_costs.costs.costs()).makespan)
    for counts in _route_splits(problem):
        # Makespans are whole ticks; 7.0000001 by rounding is 7.
        bound = math.ceil(seconds_of(in_tick_costs, counts) - 1e-6)
        remaining_s = until_s - time.monotonic()
        if bound < shortest and remaining_s > 0:
            model = _Model(cp, in_tick_costs, counts, shortest)
            solution, bound = model.solve(bound, remaining_s, seed)
            if solution is not None:
                schedule, shortest = solution
        bounds.append(min(bound, shortest))
    return Proof(schedule, float(min(bounds) / ticks))


def _route_splits(problem: Problem) -> list[tuple[int, ...]]:
    """Return all numbers of micro-batches on the routes, the most even first."""
    m = problem.micro_batches
    if len(problem.routes) == 1:
        return [(m,)]
    counts = [(n, m - n) for n in range(1, m)]
    return sorted(counts, key=lambda split: abs(split[0] - split[1]))


def ticks_per_second(costs: StageCosts, most: float) -> Fraction:
    """Return the ticks per second with which all seconds are whole numbers, if `most` seconds then
    have at most `MOST_TICKS`; else the number with which they have `MOST_TICKS`.
    """
    fractions = {_decimal(number) for row in costs.seconds for number in row if number}
    denominator = math.lcm(*(fraction.denominator for fraction in fractions))
    numerators = [
        fraction.numerator * (denominator // fraction.denominator) for fraction in fractions
    ]
    # Without any seconds above 0 there are no numerators, whose divisor is then 0.
    ticks = Fraction(denominator, math.gcd(*numerators) or 1)
    return ticks if most * ticks <= MOST_TICKS else Fraction(MOST_TICKS) / Fraction(repr(most))


def _decimal(number: float) -> Fraction:
    """Return the decimal number that a float stands for: 0.3 for 0.1 + 0.2."""
    return Fraction(f"{number:.12g}")


def in_ticks(costs: StageCosts, ticks: Fraction) -> StageCosts:
    """Return the same costs in whole ticks, rounded down."""
    rows = []
    for row in costs.seconds:
        rows.append(tuple(float(math.floor(_decimal(number) * ticks)) for number in row))
    f, i, w, b, u, up, down = rows
    return StageCosts(f, i, w, b, u, up, down, costs.memory, costs.in_bytes)


@dataclass(frozen=True)
class _MicroBatch:
    """Variables of one micro-batch on one stage.

    Attributes:
        op: the stage and the number of the micro-batch.
        forward: start of F.
        backward: start of I or B.
        weight_grad: start of W.
        gradient_ready: end of I or B.
        released: end of W or B.
        joined: whether the backward is a B; None if it is always split.
    """

    op: tuple[int, int]
    forward: Any
    backward: Any
    weight_grad: Any
    gradient_ready: Any
    released: Any
    joined: Any


class _Message(NamedTuple):
    """Variables of a message.

    Attributes:
        begin: start of the op that makes its value.
        end: end of that op.
        leaves: when the message leaves.
        ticks: its ticks on the link.
    """

    begin: Any
    end: Any
    leaves: Any
    ticks: int


class _TimedOp(NamedTuple):
    """An op of a solution, with its ticks. `micro_batch` is above all others for an update; `order`
    is that of the dependencies within a micro-batch.
    """

    start: int
    end: int
    micro_batch: int
    order: int
    op: Op


#: A value that crosses a boundary: start and end of the op that makes it, start of the op that
#: takes it.
_Value = tuple[Any, Any, Any]


class _Model:
    """The model for one number of micro-batches on each route, every cost a whole number of ticks.

    Attributes:
        cp: OR-Tools' module.
        problem: the problem.
        counts: micro-batches on each route.
        most: makespan that a solution must undercut.
        model: the CP-SAT model.
        makespan: its objective.
        on_rank: per rank, the intervals of its ops.
        updates: per stage, the start of its update, and the stage.
        micro_batches: indexed by route, stage and number.
    """

    def __init__(self, cp: Any, problem: Problem, counts: Sequence[int], most: int) -> None:
        self.cp, self.problem, self.counts, self.most = cp, problem, tuple(counts), most
        self.model = cp.CpModel()
        self.makespan = self.model.new_int_var(0, most - 1, "makespan")
        self.on_rank: list[list[Any]] = [[] for _ in range(problem.ranks)]
        self.updates: list[tuple[Any, int]] = []
        self.micro_batches = [self._add_route(route) for route in range(len(counts))]
        self._add_messages()
        for rank in range(problem.ranks):
            self._add_memory_limit(rank)
        self._add_updates()
        for intervals in self.on_rank:
            self.model.add_no_overlap(intervals)
        self.model.minimize(self.makespan)

    def _add_route(self, route: int) -> list[list[_MicroBatch]]:
        """Add the ops of a route's micro-batches; return them by stage and number."""
        bounds = RouteBounds(self.problem, self.counts, route)
        first = sum(self.counts[:route])
        rows = []
        for s in range(bounds.stages):
            row = [self._add_micro_batch(bounds, s, n, first) for n in range(bounds.count)]
            for one, other in pairwise(row):
                self.model.add(other.forward >= one.forward + int(bounds.forward[s]))
                self.model.add(other.backward >= one.gradient_ready)
                if one.joined is None:
                    self.model.add(other.weight_grad >= one.released)
            rows.append(row)
        return rows

    def _add_micro_batch(self, bounds: RouteBounds, s: int, n: int, first: int) -> _MicroBatch:
        """Add micro-batch `n` of a route on stage `s`; `first` is the route's first micro-batch."""
        c, model, rank = self.problem.costs, self.model, self.on_rank[bounds.stage_ranks[s]]
        f, i, w, b, update = (
            int(row[s]) for row in (c.forward, c.input_grad, c.weight_grad, c.backward, c.update)
        )
        head_i, tail_i = bounds.head_i[s, n], bounds.tail_i[s, n]
        forward = self._var(bounds.head_f[s, n], f + bounds.tail_f[s, n])
        backward = self._var(head_i, min(i, b) + tail_i)
        # A B ends with its weight gradients, which the tail of an I still has before it.
        always_split = self.problem.split and i + w <= b
        gradient_ready = self._var(head_i + min(i, b), tail_i if always_split else update)
        weight_grad = self._var(head_i + min(i, b), update)
        released = self._var(head_i + min(i + w, b), update)
        rank.append(model.new_fixed_size_interval_var(forward, f, ""))
        joined = None
        if always_split:
            rank.append(model.new_interval_var(backward, i, gradient_ready, ""))
            rank.append(model.new_interval_var(weight_grad, w, released, ""))
        else:
            joined = model.new_bool_var("")
            model.add(joined == 1 if not self.problem.split else joined >= 0)
            size = i + (b - i) * joined
            rank.append(model.new_interval_var(backward, size, gradient_ready, ""))
            rank.append(model.new_optional_interval_var(weight_grad, w, released, ~joined, ""))
            model.add(released == gradient_ready).only_enforce_if(joined)
        split = [] if joined is None else [~joined]
        model.add(weight_grad >= gradient_ready).only_enforce_if(split)
        model.add(backward >= forward + f)
        return _MicroBatch(
            (s, first + n), forward, backward, weight_grad, gradient_ready, released, joined
        )

    def _var(self, head: float, tail: float) -> Any:
        """Return a variable for a time of at least `head` that leaves `tail` of the makespan."""
        low = math.ceil(head - 1e-6)
        return self.model.new_int_var(low, max(low, self.most - math.ceil(tail - 1e-6)), "")

    def _add_messages(self) -> None:
        """Make ops that consume a value start after its arrival, and links carry one message at a
        time, in the order of sending.
        """
        c = self.problem.costs
        # Per link the messages of one kind and boundary, in order.
        links: dict[tuple[int, int], list[list[_Message]]] = {}
        for route, stage_ranks in enumerate(self.problem.routes):
            for s, (rank, next_rank) in enumerate(pairwise(stage_ranks)):
                up, down = self._values(route, s)
                if rank == next_rank:
                    for _, end, receiver_start in [*up, *down]:
                        self.model.add(receiver_start >= end)
                    continue
                links.setdefault((rank, next_rank), []).append(self._send(up, int(c.up[s])))
                links.setdefault((next_rank, rank), []).append(self._send(down, int(c.down[s])))
        for kinds in links.values():
            for one_kind, other_kind in combinations(kinds, 2):
                if one_kind[0].ticks or other_kind[0].ticks:
                    for one, other in product(one_kind, other_kind):
                        self._add_order(one, other)

    def _values(self, route: int, s: int) -> tuple[list[_Value], list[_Value]]:
        """Return the activations from stage `s` of a route to the next, and the gradients back."""
        f = int(self.problem.costs.forward[s])
        lower, upper = self.micro_batches[route][s], self.micro_batches[route][s + 1]
        up, down = [], []
        for low, high in zip(lower, upper, strict=True):
            up.append((low.forward, low.forward + f, high.forward))
            down.append((high.backward, high.gradient_ready, low.backward))
        return up, down

    def _send(self, values: Sequence[_Value], ticks: int) -> list[_Message]:
        """Add the messages of one kind over one boundary, in order."""
        messages = []
        for begin, end, receiver_start in values:
            message = _Message(begin, end, self._var(0, 0), ticks)
            self.model.add(message.leaves >= end)
            self.model.add(receiver_start >= message.leaves + ticks)
            messages.append(message)
        for one, other in pairwise(messages):
            self.model.add(other.leaves >= one.leaves + ticks)
        return messages

    def _add_order(self, one: _Message, other: _Message) -> None:
        """Make two messages of different kinds use their link one after the other."""
        first = self.model.new_bool_var("")
        # The sending rank makes both values, and its ops do not overlap: one ends before the other
        # begins, and messages leave in that order.
        self.model.add(one.end <= other.begin).only_enforce_if(first)
        self.model.add(other.leaves >= one.leaves + one.ticks).only_enforce_if(first)
        self.model.add(other.end <= one.begin).only_enforce_if(~first)
        self.model.add(one.leaves >= other.leaves + other.ticks).only_enforce_if(~first)

    def _add_memory_limit(self, rank: int) -> None:
        """Limit the memory of a rank, if that is a limit at all. A micro-batch holds it from the
        start of F to the end of B or W.
        """
        p, model = self.problem, self.model
        copies, limit = p.copies_of_rank[rank], p.limits[rank]
        rows = [self.micro_batches[copy // p.stages][copy % p.stages] for copy in copies]
        sizes = [Fraction(repr(p.costs.memory[copy % p.stages])) for copy in copies]
        total = sum(size * len(row) for size, row in zip(sizes, rows, strict=True))
        if limit == math.inf or total <= limit:
            return
        # CP-SAT takes whole numbers: all sizes in the largest unit of which each is a multiple.
        unit = math.lcm(*(size.denominator for size in sizes))
        whole_limit = Fraction(repr(limit)) * unit
        if len(rows) == 1 and rows[0][0].joined is None:
            # All micro-batches are equal: with room for n, each waits for the n-th before it.
            room = math.floor(whole_limit / sizes[0] / unit)
            for micro_batch, later in zip(rows[0], rows[0][room:], strict=False):
                model.add(later.forward >= micro_batch.released)
            return
        spans, demands = [], []
        for row, size in zip(rows, sizes, strict=True):
            for micro_batch in row:
                length = model.new_int_var(0, self.most, "")
                spans.append(
                    model.new_interval_var(micro_batch.forward, length, micro_batch.released, "")
                )
                demands.append(int(size * unit))
        model.add_cumulative(spans, demands, math.floor(whole_limit))

    def _add_updates(self) -> None:
        """Add the updates: after all backwards of their stage, at one time on all its copies. The
        last of them ends the batch.
        """
        p = self.problem
        for s in range(p.stages):
            ticks = int(p.costs.update[s])
            start = self.model.new_int_var(0, self.most, "")
            for stages in self.micro_batches:
                for micro_batch in stages[s]:
                    self.model.add(start >= micro_batch.released)
            self.model.add(self.makespan >= start + ticks)
            self.updates.append((start, s))
            if ticks:
                for rank in {stage_ranks[s] for stage_ranks in p.routes}:
                    self.on_rank[rank].append(
                        self.model.new_fixed_size_interval_var(start, ticks, "")
                    )

    def solve(
        self, least: int, limit_s: float, seed: int
    ) -> tuple[tuple[Schedule, int] | None, int]:
        """Solve the model within `limit_s` seconds.

        Returns:
            A shorter schedule with its makespan in ticks, or None; and a lower bound in ticks.
        """
        self.model.add(self.makespan >= least)
        solver = self.cp.CpSolver()
        solver.parameters.max_time_in_seconds = max(limit_s, 0.05)
        solver.parameters.num_workers = min(8, max(2, os.cpu_count() or 1))
        solver.parameters.random_seed = seed
        status = solver.solve(self.model)
        # The makespan is below `most` in this model: without a solution `most` is the optimum.
        if status == self.cp.INFEASIBLE:
            return None, self.most
        bound = max(least, math.ceil(solver.best_objective_bound - 1e-6))
        if status not in (self.cp.OPTIMAL, self.cp.FEASIBLE):
            return None, bound
        schedule = self._schedule(solver)
        return None if schedule is None else (schedule, round(solver.objective_value)), bound

    def _schedule(self, solver: Any) -> Schedule | None:
        """Return the schedule of a solution: ops by their start times. Of ops with the same start,
        those that take no time come first: in the order of their dependencies, or backwards before
        forwards if only then all fits. None if neither order has programs that end and fit.
        """
        p = self.problem
        rows: list[list[_TimedOp]] = [[] for _ in range(p.ranks)]
        for stages, stage_ranks in zip(self.micro_batches, p.routes, strict=True):
            for row, rank in zip(stages, stage_ranks, strict=True):
                for micro_batch in row:
                    rows[rank] += self._ops(solver, micro_batch)
        for start, s in self.updates:
            # An update that takes no time must not wait for another copy's amid other work.
            begin = solver.value(start) if p.costs.update[s] else self.most
            end = begin + int(p.costs.update[s])
            for rank in {stage_ranks[s] for stage_ranks in p.routes}:
                rows[rank].append(_TimedOp(begin, end, p.micro_batches + s, 0, Op(Kind.U, s, 1)))
        # In the model a micro-batch that ends at a second leaves its memory to one that starts then.
        for forwards_last in (False, True):
            programs = []
            for timed_ops in rows:
                # By start and end, then forwards last if that is tried, then micro-batch and order.
                timed_ops.sort(key=lambda t: (t[:2], forwards_last and t.op.kind is Kind.F, t))
                programs.append(tuple(timed.op for timed in timed_ops))
            schedule = Schedule(tuple(programs), "synthesised")
            if self._fits(schedule) and not len(dependencies_of(schedule).blocked):
                return schedule
        return None

    def _fits(self, schedule: Schedule) -> bool:
        """Return whether every rank stays within its memory limit."""
        memory = self.problem.costs.memory
        for program, limit in zip(schedule.programs, self.problem.limits, strict=True):
            held = 0.0
            for op in program:
                held += ACTIVATION_CHANGE[op.kind] * memory[op.stage]
                # Sums of bytes that are no whole numbers drift by the rounding of floats.
                if held > limit * (1 + 1e-12):
                    return False
        return True

    def _ops(self, solver: Any, micro_batch: _MicroBatch) -> Iterator[_TimedOp]:
        """Yield the ops of a micro-batch on one stage, with their times in a solution."""
        (s, m), stages = micro_batch.op, self.problem.stages
        start = solver.value(micro_batch.forward)
        end = start + int(self.problem.costs.forward[s])
        yield _TimedOp(start, end, m, s, Op(Kind.F, s, m))
        joined = micro_batch.joined is not None and bool(solver.value(micro_batch.joined))
        start, end = solver.value(micro_batch.backward), solver.value(micro_batch.gradient_ready)
        yield _TimedOp(start, end, m, 2 * stages - s, Op(Kind.B if joined else Kind.I, s, m))
        if not joined:
            start, end = solver.value(micro_batch.weight_grad), solver.value(micro_batch.released)
            yield _TimedOp(start, end, m, 2 * stages + 1, Op(Kind.W, s, m))
