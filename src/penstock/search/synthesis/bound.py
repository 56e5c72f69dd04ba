"""Seconds that no program of a problem undercuts.

Every op gets a *head*, before which it cannot start, and a *tail*, which is left when it has ended.
Both grow from what must come before and after it: its own micro-batch's way up and back, and on its
rank the micro-batches before it; and where limits are tight, the backwards that must have made room
for it. Then every rank alone, its ops not starting before their heads, each followed by its tail,
takes at least the seconds of Jackson's preemptive schedule (Carlier 1982): the op with the longest
tail always goes first, and is put aside for one with a longer tail.

Micro-batches of a route may be taken in order (see `arrays`). So with room for k of them on a copy
of a stage:

    before F n    F 0..n-1, I 0..n-k, W 0..n-k              after F n    F n+1.., I n.., W n.., U
    before I n    F 0..n,   I 0..n-1, W 0..n-k              after I n    F n+k.., I n+1.., W n.., U

and what other stages of the same rank do for the same micro-batches on their way. A whole B counts
as I and W, each at its cheapest: links are free at all times but when they carry messages of the
same kind and boundary.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable
from itertools import pairwise

import numpy as np

from penstock.search.synthesis.problem import Problem

#: An op: seconds before it, its own, seconds after it.
Job = tuple[float, float, float]


def lower_bound(problem: Problem) -> float:
    """The bound; where micro-batches go two ways, the least over all numbers of each."""
    m = problem.micro_batches
    if len(problem.routes) == 1:
        return seconds_of(problem, (m,))
    splits = sorted((_busiest(problem, (n, m - n)), n) for n in range(1, m))
    least = math.inf
    for busiest, n in splits:
        if busiest >= least:
            break
        least = min(least, seconds_of(problem, (n, m - n)))
    return least


def _busiest(problem: Problem, counts: tuple[int, ...]) -> float:
    """The work of the busiest rank."""
    c, stages = problem.costs, problem.stages
    work = [
        sum(
            counts[copy // stages] * (c.forward[copy % stages] + c.back[copy % stages])
            for copy in copies
        )
        + sum(c.update[stage] for stage in {copy % stages for copy in copies})
        for copies in problem.held_on
    ]
    return max(work)


def seconds_of(problem: Problem, counts: tuple[int, ...]) -> float:
    """The bound for so many micro-batches on each route."""
    ways = [Way(problem, counts, route) for route in range(len(counts))]
    stages, least = problem.stages, _busiest(problem, counts)
    for rank, copies in enumerate(problem.held_on):
        jobs: list[Job] = [
            job for copy in copies for job in ways[copy // stages].jobs(copy % stages)
        ]
        jobs += [
            (0.0, problem.costs.update[stage], 0.0) for stage in {copy % stages for copy in copies}
        ]
        held = sum(ways[copy // stages].held(copy % stages) for copy in copies)
        first = min(float(ways[copy // stages].head_f[copy % stages, 0]) for copy in copies)
        last = min(problem.costs.update[copy % stages] for copy in copies)
        least = max(least, preemptive(jobs), first + held / problem.limits[rank] + last)
    return least


class _Machine:
    """One rank and ops that all must end before some moment: how early that can be, however they
    are ordered.
    """

    def __init__(self, most: int) -> None:
        self._at, self._own, self._load = np.zeros(most), np.zeros(most), np.zeros(most)
        self._count = 0

    def add(self, at: float, seconds: float) -> None:
        """One more op, not before `at`."""
        n = self._count
        self._load[:n] += seconds * (self._at[:n] <= at)
        self._load[n] = seconds + float(self._own[:n] @ (self._at[:n] >= at))
        self._at[n], self._own[n] = at, seconds
        self._count += 1

    def end(self) -> float:
        """The most, over all moments, of that moment and the seconds of the ops that cannot start
        earlier.
        """
        return float((self._at[: self._count] + self._load[: self._count]).max(initial=0.0))


class Way:
    """Heads and tails of one route, by stage and micro-batch."""

    def __init__(self, problem: Problem, counts: tuple[int, ...], route: int) -> None:
        c, homes = problem.costs, problem.routes[route]
        self.count, self.stages, self.homes = counts[route], problem.stages, homes
        self.f, self.turn, self.hold, self.update = c.forward, c.turn, c.hold, c.update
        self.rest = tuple(back - turn for back, turn in zip(c.back, c.turn, strict=True))
        apart = [a != b for a, b in pairwise(homes)]
        self.up = [seconds * far for seconds, far in zip(c.up, apart, strict=True)]
        self.down = [seconds * far for seconds, far in zip(c.down, apart, strict=True)]
        self.room = [self._room(problem.limits[home], c.hold[s]) for s, home in enumerate(homes)]
        self.beside = [[q for q in range(self.stages) if homes[q] == home] for home in homes]
        shape = self.stages, self.count
        self.head_f, self.head_i, self.tail_f, self.tail_i = (np.zeros(shape) for _ in range(4))
        self._fill_heads()
        self._fill_tails()

    def _room(self, limit: float, hold: float) -> int:
        """How many micro-batches of one stage alone fit a limit."""
        return (
            self.count
            if hold == 0 or limit / hold >= self.count
            else int(limit / hold * (1 + 1e-12))
        )

    def jobs(self, s: int) -> Iterable[Job]:
        """The ops of a stage. What a backward has to do besides its input gradient counts as W."""
        for n in range(self.count):
            yield float(self.head_f[s, n]), self.f[s], float(self.tail_f[s, n])
            yield float(self.head_i[s, n]), self.turn[s], float(self.tail_i[s, n])
            yield float(self.head_i[s, n]) + self.turn[s], self.rest[s], self.update[s]

    def held(self, s: int) -> float:
        """The least that the stage's micro-batches hold, times the seconds for which they do: their
        way up and back.
        """
        above = (
            sum(self.f[s + 1 :]) + sum(self.turn[s + 1 :]) + sum(self.up[s:]) + sum(self.down[s:])
        )
        return self.hold[s] * self.count * (self.f[s] + above + self.turn[s] + self.rest[s])

    def _machines(self) -> list[_Machine]:
        return [
            _Machine(4 * self.count * len(self.beside[s]) + len(self.beside[s]))
            for s in range(self.stages)
        ]

    def _fill_heads(self) -> None:
        before_f, before_i = self._machines(), self._machines()
        head_f, head_i = self.head_f, self.head_i
        came_f, came_i = [0.0] * self.stages, [0.0] * self.stages
        for n in range(self.count):
            for s in range(self.stages):
                self._before_f(before_f[s], s, n)
                head_f[s, n] = before_f[s].end()
                if s:
                    came_f[s] = max(came_f[s], head_f[s - 1, n] + self.f[s - 1]) + self.up[s - 1]
                    head_f[s, n] = max(head_f[s, n], came_f[s])
            for s in reversed(range(self.stages)):
                self._before_i(before_i[s], s, n)
                head_i[s, n] = max(before_i[s].end(), head_f[s, n] + self.f[s])
                if s + 1 < self.stages:
                    came_i[s] = max(came_i[s], head_i[s + 1, n] + self.turn[s + 1]) + self.down[s]
                    head_i[s, n] = max(head_i[s, n], came_i[s])

    def _before_f(self, machine: _Machine, s: int, n: int) -> None:
        """What F n of stage s waits for on its rank, more than F n - 1 did."""
        for q in self.beside[s]:
            if q < s:
                machine.add(self.head_f[q, n], self.f[q])
        if n:
            machine.add(self.head_f[s, n - 1], self.f[s])
        if n >= self.room[s]:
            self._add_backward(machine, s, n - self.room[s])

    def _before_i(self, machine: _Machine, s: int, n: int) -> None:
        """What I n of stage s waits for on its rank, more than I n - 1 did."""
        for q in self.beside[s]:
            machine.add(self.head_f[q, n], self.f[q])
            if q > s:
                machine.add(self.head_i[q, n], self.turn[q])
        if n:
            machine.add(self.head_i[s, n - 1], self.turn[s])
        if n >= self.room[s]:
            done = n - self.room[s]
            machine.add(self.head_i[s, done] + self.turn[s], self.rest[s])

    def _add_backward(self, machine: _Machine, s: int, n: int) -> None:
        machine.add(self.head_i[s, n], self.turn[s])
        machine.add(self.head_i[s, n] + self.turn[s], self.rest[s])

    def _fill_tails(self) -> None:
        after_f, after_i = self._machines(), self._machines()
        tail_f, tail_i = self.tail_f, self.tail_i
        sent_f, sent_i = [0.0] * self.stages, [0.0] * self.stages
        for s in range(self.stages):
            for q in self.beside[s]:
                after_f[s].add(0.0, self.update[q])
                if q <= s:
                    after_i[s].add(0.0, self.update[q])
        for n in reversed(range(self.count)):
            for s in range(self.stages):
                self._after_i(after_i[s], s, n)
                tail_i[s, n] = after_i[s].end()
                if s:
                    sent_i[s] = (
                        max(sent_i[s], self.turn[s - 1] + tail_i[s - 1, n]) + self.down[s - 1]
                    )
                    tail_i[s, n] = max(tail_i[s, n], sent_i[s])
            for s in reversed(range(self.stages)):
                self._after_f(after_f[s], s, n)
                tail_f[s, n] = max(after_f[s].end(), self.turn[s] + tail_i[s, n])
                if s + 1 < self.stages:
                    sent_f[s] = max(sent_f[s], self.f[s + 1] + tail_f[s + 1, n]) + self.up[s]
                    tail_f[s, n] = max(tail_f[s, n], sent_f[s])

    def _after_i(self, machine: _Machine, s: int, n: int) -> None:
        """What follows I n of stage s on its rank, more than I n + 1: time runs backwards, and
        tails are heads.
        """
        for q in self.beside[s]:
            if q < s:
                machine.add(self.tail_i[q, n], self.turn[q])
            if q <= s:
                machine.add(self.update[q], self.rest[q])
        if n + 1 < self.count:
            machine.add(self.tail_i[s, n + 1], self.turn[s])
        if n + self.room[s] < self.count:
            machine.add(self.tail_f[s, n + self.room[s]], self.f[s])

    def _after_f(self, machine: _Machine, s: int, n: int) -> None:
        """What follows F n of stage s on its rank, more than F n + 1."""
        for q in self.beside[s]:
            machine.add(self.tail_i[q, n], self.turn[q])
            machine.add(self.update[q], self.rest[q])
            if q > s:
                machine.add(self.tail_f[q, n], self.f[q])
        if n + 1 < self.count:
            machine.add(self.tail_f[s, n + 1], self.f[s])


def preemptive(jobs: Iterable[Job]) -> float:
    """The least seconds of one machine that may put ops aside, with heads and tails: Jackson's
    rule.

    >>> preemptive([(0, 3, 5), (1, 2, 9), (4, 1, 0)])
    12
    """
    waiting = sorted((job for job in jobs if job[1] > 0), reverse=True)
    ready: list[tuple[float, float]] = []
    now = most = 0.0
    while waiting or ready:
        if not ready:
            now = max(now, waiting[-1][0])
        while waiting and waiting[-1][0] <= now:
            _, seconds, tail = waiting.pop()
            heapq.heappush(ready, (-tail, seconds))
        tail, seconds = heapq.heappop(ready)
        pause = waiting[-1][0] if waiting else math.inf
        if now + seconds <= pause:
            now += seconds
            most = max(most, now - tail)
        else:
            heapq.heappush(ready, (tail, seconds - (pause - now)))
            now = pause
    return most
