"""Lower bounds on the makespan of all programs of a problem.

Every op gets a *head*, the earliest time at which it can start, and a *tail*, the least time from
its end to the end of the batch. Both follow from the ops that must come before and after it: those
of the same micro-batch on other stages; on the same rank those of earlier and later micro-batches;
and where memory is tight, the backwards that must have freed memory for it. A rank whose ops do not
start before their heads, and are each followed by their tail, needs at least the time of Jackson's
preemptive schedule (Carlier 1982), in which the op with the longest tail always runs first.

Micro-batches of a route may be assumed to be in order (see `arrays`). If the rank has memory for k
of them on the stage, these ops of the stage come

    before F n    F 0..n-1, I 0..n-k, W 0..n-k              after F n    F n+1.., I n.., W n.., U
    before I n    F 0..n,   I 0..n-1, W 0..n-k              after I n    F n+k.., I n+1.., W n.., U

and of other stages on the same rank those ops that are before or after on the path of the same
micro-batches: up the stages with forwards, then down with backwards.

To stay a lower bound for all programs, a whole B counts as an I and a W, each at its cheapest, and
a message waits only for messages of the same kind over the same boundary.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Sequence
from itertools import pairwise

import numpy as np

from penstock.synthesis.problem import Problem

#: An op: its head, its seconds, its tail.
Job = tuple[float, float, float]


def lower_bound(problem: Problem) -> float:
    """Return the lower bound in seconds; with two routes, the least over all numbers of
    micro-batches on each.
    """
    m = problem.micro_batches
    if len(problem.routes) == 1:
        return seconds_of(problem, (m,))
    splits = sorted((_busiest(problem, (n, m - n)), n) for n in range(1, m))
    least = math.inf
    for busiest, n in splits:
        # The splits are sorted by their work, which is a bound itself: no later one can have a
        # lower bound.
        if busiest >= least:
            break
        least = min(least, seconds_of(problem, (n, m - n)))
    return least


def _busiest(problem: Problem, counts: tuple[int, ...]) -> float:
    """Return the work of the busiest rank in seconds, with `counts` micro-batches on each route."""
    c, stages = problem.costs, problem.stages
    busiest = 0.0
    for copies in problem.copies_of_rank:
        work = 0.0
        for copy in copies:
            stage = copy % stages
            work += counts[copy // stages] * (c.forward[stage] + c.least_backward[stage])
        updates = sum(c.update[stage] for stage in {copy % stages for copy in copies})
        busiest = max(busiest, work + updates)
    return busiest


def seconds_of(problem: Problem, counts: tuple[int, ...]) -> float:
    """Return the lower bound with `counts` micro-batches on each route."""
    routes = [RouteBounds(problem, counts, route) for route in range(len(counts))]
    stages, least = problem.stages, _busiest(problem, counts)
    update = problem.costs.update
    for rank, copies in enumerate(problem.copies_of_rank):
        jobs: list[Job] = []
        for copy in copies:
            jobs += routes[copy // stages].jobs(copy % stages)
        memory_seconds = sum(
            routes[copy // stages].memory_seconds(copy % stages) for copy in copies
        )
        first = min(float(routes[copy // stages].head_f[copy % stages, 0]) for copy in copies)
        last = min(update[copy % stages] for copy in copies)
        # From the first F to the last release of memory the rank holds at most its limit at any
        # time, and together that must reach `memory_seconds`.
        by_memory = first + memory_seconds / problem.limits[rank] + last
        least = max(least, preemptive(jobs), by_memory)
    return least


class _Machine:
    """Ops that run one after the other, none before its release: the earliest time at which all can
    have ended.
    """

    def __init__(self, most: int) -> None:
        # `_load[k]`: seconds of op k and of all others that are not released before it.
        self._release, self._seconds, self._load = np.zeros(most), np.zeros(most), np.zeros(most)
        self._count = 0

    def add(self, release: float, seconds: float) -> None:
        """Add an op that cannot start before `release`."""
        n = self._count
        self._load[:n] += seconds * (self._release[:n] <= release)
        self._load[n] = seconds + float(self._seconds[:n] @ (self._release[:n] >= release))
        self._release[n], self._seconds[n] = release, seconds
        self._count += 1

    def end(self) -> float:
        """Return the end of the last op if ops run in the order of their releases.

        The ops that are not released before op k take their seconds from that release on. One of
        the ops starts at its release and is followed by all later ones without a pause, so the
        maximum over all k is the end.
        """
        return float((self._release[: self._count] + self._load[: self._count]).max(initial=0.0))


class RouteBounds:
    """Heads and tails of one route, by stage and micro-batch.

    Attributes:
        count: micro-batches of the route.
        stages: number of stages.
        stage_ranks: the rank of every stage.
        forward, until_gradient, after_gradient, update: per stage, seconds of the forward, of the
            backward until its gradient leaves, of the rest of the backward, and of the update.
        up, down: per boundary, seconds of a message; 0 inside a rank.
        memory: per stage, what a micro-batch holds.
        capacity: per stage, the number of its micro-batches for which the rank has memory if it
            holds nothing else.
        same_rank: per stage, all stages on its rank, itself included.
        head_f, head_i, tail_f, tail_i: heads and tails of F, and of I or B, shape (stages, count).
    """

    def __init__(self, problem: Problem, counts: tuple[int, ...], route: int) -> None:
        c, stage_ranks = problem.costs, problem.routes[route]
        self.count, self.stages, self.stage_ranks = counts[route], problem.stages, stage_ranks
        self.forward, self.until_gradient, self.update = c.forward, c.until_gradient, c.update
        self.memory = c.memory
        self.after_gradient = tuple(
            backward - first
            for backward, first in zip(c.least_backward, c.until_gradient, strict=True)
        )
        crosses = [a != b for a, b in pairwise(stage_ranks)]
        self.up = [seconds * far for seconds, far in zip(c.up, crosses, strict=True)]
        self.down = [seconds * far for seconds, far in zip(c.down, crosses, strict=True)]
        self.capacity = [
            self._capacity(problem.limits[rank], c.memory[s]) for s, rank in enumerate(stage_ranks)
        ]
        self.same_rank = [_indices(stage_ranks, rank) for rank in stage_ranks]
        shape = self.stages, self.count
        self.head_f, self.head_i, self.tail_f, self.tail_i = (np.zeros(shape) for _ in range(4))
        self._fill_heads()
        self._fill_tails()

    def _capacity(self, limit: float, memory: float) -> int:
        """Return the number of micro-batches of one stage that fit a limit alone."""
        if memory == 0 or limit / memory >= self.count:
            return self.count
        # A quotient that is whole up to rounding counts in full.
        return int(limit / memory * (1 + 1e-12))

    def jobs(self, s: int) -> Iterable[Job]:
        """Yield the F, I and W of a stage. What a B does after its input gradient counts as W."""
        for n in range(self.count):
            head_i, gradient_s = float(self.head_i[s, n]), self.until_gradient[s]
            yield float(self.head_f[s, n]), self.forward[s], float(self.tail_f[s, n])
            yield head_i, gradient_s, float(self.tail_i[s, n])
            yield head_i + gradient_s, self.after_gradient[s], self.update[s]

    def memory_seconds(self, s: int) -> float:
        """Return a lower bound of the stage's memory times the seconds for which it is held.

        A micro-batch holds it at least for its own F, its path to the last stage and back, and its
        own backward.
        """
        later_stages_s = (
            sum(self.forward[s + 1 :])
            + sum(self.until_gradient[s + 1 :])
            + sum(self.up[s:])
            + sum(self.down[s:])
        )
        backward_s = self.until_gradient[s] + self.after_gradient[s]
        return self.memory[s] * self.count * (self.forward[s] + later_stages_s + backward_s)

    def _machines(self) -> list[_Machine]:
        """Return an empty machine per stage, with space for all ops of its rank."""
        # For a micro-batch `_add_before_*` or `_add_after_*` adds at most four ops per stage of the
        # rank; updates are added once.
        return [_Machine((4 * self.count + 1) * len(stages)) for stages in self.same_rank]

    def _fill_heads(self) -> None:
        """Compute all heads, micro-batch by micro-batch: forwards up, then backwards down."""
        before_f, before_i = self._machines(), self._machines()
        head_f, head_i = self.head_f, self.head_i
        arrived_f, arrived_i = [0.0] * self.stages, [0.0] * self.stages
        for n in range(self.count):
            for s in range(self.stages):
                self._add_before_f(before_f[s], s, n)
                head_f[s, n] = before_f[s].end()
                if s:
                    # A message leaves once the one of micro-batch n - 1 has arrived.
                    arrived_f[s] = (
                        max(arrived_f[s], head_f[s - 1, n] + self.forward[s - 1]) + self.up[s - 1]
                    )
                    head_f[s, n] = max(head_f[s, n], arrived_f[s])
            for s in reversed(range(self.stages)):
                self._add_before_i(before_i[s], s, n)
                head_i[s, n] = before_i[s].end()
                if s + 1 < self.stages:
                    arrived_i[s] = (
                        max(arrived_i[s], head_i[s + 1, n] + self.until_gradient[s + 1])
                        + self.down[s]
                    )
                    head_i[s, n] = max(head_i[s, n], arrived_i[s])

    def _add_before_f(self, machine: _Machine, s: int, n: int) -> None:
        """Add what F n of stage s waits for on its rank in addition to what F n - 1 waits for."""
        for q in self.same_rank[s]:
            if q < s:
                machine.add(self.head_f[q, n], self.forward[q])
        if n:
            machine.add(self.head_f[s, n - 1], self.forward[s])
        if n >= self.capacity[s]:
            self._add_backward(machine, s, n - self.capacity[s])

    def _add_before_i(self, machine: _Machine, s: int, n: int) -> None:
        """Add what I n of stage s waits for on its rank in addition to what I n - 1 waits for: its
        own F too.
        """
        for q in self.same_rank[s]:
            machine.add(self.head_f[q, n], self.forward[q])
            if q > s:
                machine.add(self.head_i[q, n], self.until_gradient[q])
        if n:
            machine.add(self.head_i[s, n - 1], self.until_gradient[s])
        if n >= self.capacity[s]:
            done = n - self.capacity[s]
            machine.add(self.head_i[s, done] + self.until_gradient[s], self.after_gradient[s])

    def _add_backward(self, machine: _Machine, s: int, n: int) -> None:
        """Add the backward of a micro-batch: until its gradient leaves, and the rest."""
        machine.add(self.head_i[s, n], self.until_gradient[s])
        machine.add(self.head_i[s, n] + self.until_gradient[s], self.after_gradient[s])

    def _fill_tails(self) -> None:
        """Compute all tails, in reverse: last micro-batch first."""
        after_f, after_i = self._machines(), self._machines()
        tail_f, tail_i = self.tail_f, self.tail_i
        sent_f, sent_i = [0.0] * self.stages, [0.0] * self.stages
        for s in range(self.stages):
            for q in self.same_rank[s]:
                after_f[s].add(0.0, self.update[q])
                # The update of a later stage on the rank may run before the last I of this one.
                if q <= s:
                    after_i[s].add(0.0, self.update[q])
        for n in reversed(range(self.count)):
            for s in range(self.stages):
                self._add_after_i(after_i[s], s, n)
                tail_i[s, n] = after_i[s].end()
                if s:
                    sent_i[s] = (
                        max(sent_i[s], self.until_gradient[s - 1] + tail_i[s - 1, n])
                        + self.down[s - 1]
                    )
                    tail_i[s, n] = max(tail_i[s, n], sent_i[s])
            for s in reversed(range(self.stages)):
                self._add_after_f(after_f[s], s, n)
                tail_f[s, n] = after_f[s].end()
                if s + 1 < self.stages:
                    sent_f[s] = max(sent_f[s], self.forward[s + 1] + tail_f[s + 1, n]) + self.up[s]
                    tail_f[s, n] = max(tail_f[s, n], sent_f[s])

    def _add_after_i(self, machine: _Machine, s: int, n: int) -> None:
        """Add what follows I n of stage s on its rank in addition to what follows I n + 1. In
        reversed time tails are heads.
        """
        for q in self.same_rank[s]:
            if q < s:
                machine.add(self.tail_i[q, n], self.until_gradient[q])
            if q <= s:
                machine.add(self.update[q], self.after_gradient[q])
        if n + 1 < self.count:
            machine.add(self.tail_i[s, n + 1], self.until_gradient[s])
        if n + self.capacity[s] < self.count:
            machine.add(self.tail_f[s, n + self.capacity[s]], self.forward[s])

    def _add_after_f(self, machine: _Machine, s: int, n: int) -> None:
        """Add what follows F n of stage s on its rank in addition to what follows F n + 1: its own
        I too.
        """
        for q in self.same_rank[s]:
            machine.add(self.tail_i[q, n], self.until_gradient[q])
            machine.add(self.update[q], self.after_gradient[q])
            if q > s:
                machine.add(self.tail_f[q, n], self.forward[q])
        if n + 1 < self.count:
            machine.add(self.tail_f[s, n + 1], self.forward[s])


def _indices(values: Sequence[int], value: int) -> list[int]:
    """Return the indices at which a value occurs."""
    return [index for index, item in enumerate(values) if item == value]


def preemptive(jobs: Iterable[Job]) -> float:
    """Return the least time of a preemptive schedule of jobs with heads and tails on one machine:
    that of Jackson's rule. A job with a longer tail interrupts the one that runs.

    >>> preemptive([(0, 3, 5), (1, 2, 9), (4, 1, 0)])
    12
    """
    waiting = sorted((job for job in jobs if job[1] > 0), reverse=True)
    # The jobs that can run, as (negative tail, remaining seconds): a heap has its least entry first.
    ready: list[tuple[float, float]] = []
    now = most = 0.0
    while waiting or ready:
        if not ready:
            now = waiting[-1][0]
        while waiting and waiting[-1][0] <= now:
            _, seconds, tail = waiting.pop()
            heapq.heappush(ready, (-tail, seconds))
        negative_tail, seconds = heapq.heappop(ready)
        next_head = waiting[-1][0] if waiting else math.inf
        if now + seconds <= next_head:
            now += seconds
            most = max(most, now - negative_tail)
        else:
            # Stop for the next job, which may have a longer tail.
            heapq.heappush(ready, (negative_tail, seconds - (next_head - now)))
            now = next_head
    return most
