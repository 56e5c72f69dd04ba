"""List scheduling against a slow reference that looks at everything again before each op."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from tests.synthesis.requests import random_counts, random_problem, rows_of

from penstock.synthesis.arrays import B, F, I, W, empty_encoding, make_workspace
from penstock.synthesis.evaluate import evaluate, is_valid
from penstock.synthesis.list_schedule import Rule, list_schedule
from penstock.synthesis.rules import Shape


class SlowList:
    """The programs that a rule makes.

    done: per copy and kind (F, I or B, W), the number of ops; a B counts as both halves.
    """

    def __init__(self, problem, spec, rule):
        self.problem, self.spec, self.rule = problem, spec, rule
        self.stages = problem.stages
        self.done = np.zeros((len(spec.copies), 3), int)
        self.rows = [[] for _ in range(problem.ranks)]
        self.free = [0.0] * problem.ranks
        self.link_free, self.arrived = {}, {}
        self.is_far = len(problem.routes) > 1 and any(
            sum(self.size(copy) for copy in copies) > rule.cap[rank]
            for rank, copies in enumerate(problem.copies_of_rank)
        )
        while self.step():
            pass

    def size(self, copy):
        return self.problem.costs.memory[copy % self.stages]

    def count(self, copy):
        return int(self.spec.counts[copy // self.stages])

    def starts(self, rank):
        """Per copy and kind that the rank could run next, the earliest start."""
        starts = {}
        for copy in self.problem.copies_of_rank[rank]:
            stage = copy % self.stages
            forwards, backwards, weights = self.done[copy]
            if forwards < self.count(copy) and self.fits(copy):
                arrival = self.arrived.get((F, copy, forwards), 0.0 if stage == 0 else None)
                if arrival is not None:
                    starts[copy, F] = max(arrival, self.free[rank])
            if backwards < forwards:
                is_last = stage == self.stages - 1
                arrival = self.arrived.get((I, copy, backwards), 0.0 if is_last else None)
                if arrival is not None:
                    starts[copy, I] = max(arrival, self.free[rank])
            if weights < backwards:
                starts[copy, W] = self.free[rank]
        return starts

    def code(self, copy, kind):
        return B if kind == I and self.rule.whole[copy, self.done[copy, I]] else kind

    def step(self):
        """Place the next op; return whether there is one."""
        decisions = []
        for rank in range(self.problem.ranks):
            starts = self.starts(rank)
            if starts:
                ends = [at + self.spec.cost[op[0], self.code(*op)] for op, at in starts.items()]
                decisions.append((min(ends), rank, min(starts.values()), starts))
        if not decisions:
            return False
        end, rank, start, starts = min(decisions, key=lambda decision: decision[:2])
        latest = start + self.rule.patience[0] * (end - start)
        candidates = [
            (self.rule.due[(*op, self.done[op])], op) for op, at in starts.items() if at <= latest
        ]
        copy, kind = min(candidates)[1]
        code = self.code(copy, kind)
        self.rows[rank].append(4 * copy + code)
        end = self.free[rank] = starts[copy, kind] + self.spec.cost[copy, code]
        number = self.done[copy, kind]
        self.done[copy, kind] += 1
        self.done[copy, W] += code == B
        self.send(rank, copy, kind, number, end)
        return True

    def send(self, rank, copy, kind, number, end):
        stage = copy % self.stages
        if kind == W or stage == (self.stages - 1 if kind == F else 0):
            return
        taker = copy + 1 if kind == F else copy - 1
        target = self.spec.copies[taker, 0]
        if target != rank:
            costs = self.problem.costs
            seconds = costs.up[stage] if kind == F else costs.down[stage - 1]
            end = max(end, self.link_free.get((rank, target), 0.0)) + seconds
            self.link_free[rank, target] = end
        self.arrived[kind, taker, number] = end

    def fits(self, copy):
        """Whether a further forward fits, and everything can still finish after it."""
        done, cap = self.done.copy(), self.rule.cap
        done[copy, F] += 1
        rank = self.spec.copies[copy, 0]
        copies = self.problem.copies_of_rank[rank]
        if sum(self.size(c) * (done[c, F] - done[c, W]) for c in copies) > cap[rank]:
            return False
        if len(self.problem.routes) > 1 and not self.is_far:
            # What its route has in flight, and one micro-batch of the other.
            others = sum(self.size(c) for c in copies if c != copy)
            in_flight = self.size(copy) * (done[copy, F] - done[copy, I])
            return in_flight + others <= cap[rank]
        done[:, W] = done[:, I]
        return self.can_drain(done)

    def can_drain(self, done):
        """Whether micro-batches in flight can finish one after the other, in any order."""
        routes = [range(first, first + self.stages) for first in range(0, len(done), self.stages)]
        in_flight = [route for route in routes if done[route[0], F] > done[route[0], I]]
        if not in_flight:
            return True
        for route in in_flight:
            after = self.drained(done, route)
            if after is not None and self.can_drain(after):
                return True
        return False

    def drained(self, done, route):
        """Counts after the oldest micro-batch of a route has run alone; None if it does not fit."""
        done = done.copy()
        number = done[route[0], I]
        for copy in route:
            if done[copy, F] <= number:
                done[copy, F] += 1
                rank = self.spec.copies[copy, 0]
                copies = self.problem.copies_of_rank[rank]
                held = sum(self.size(c) * (done[c, F] - done[c, I]) for c in copies)
                if held > self.rule.cap[rank]:
                    return None
        for copy in route:
            done[copy, I] = done[copy, W] = max(done[copy, I], number + 1)
        return done


def random_rule(problem, spec, rng):
    """Due times with ties, any patience, the limits as caps."""
    most = int(spec.counts.max())
    due = np.sort(rng.integers(0, 12, (len(spec.copies), 3, most)).astype(float), axis=2)
    whole = (rng.random((len(spec.copies), most)) < rng.choice([0.0, 0.5, 1.0])).astype(int)
    patience = float(rng.choice([0.0, 0.25, 0.5, 1.0]))
    return Rule(due, np.array([patience]), np.array(problem.limits), whole)


@pytest.mark.parametrize("placement", ["linear", "interleaved", "v", "bidirectional"])
def test_programs_are_those_of_a_slow_reference(placement):
    """Ties go to the lower rank, copy and kind; limits are tight, and no program gets stuck."""
    limited = far = 0
    for seed in range(25):
        rng = np.random.default_rng(seed)
        problem = random_problem(seed, placement, limited=seed % 5 > 0)
        spec = problem.spec(random_counts(problem, rng))
        encoding, work, rule = (
            empty_encoding(spec),
            make_workspace(spec),
            random_rule(problem, spec, rng),
        )
        for _ in range(2):  # the second time on arrays that have been used
            seconds = list_schedule(spec, rule, encoding, work)
        slow = SlowList(problem, spec, rule)
        assert rows_of(encoding) == slow.rows
        far += slow.is_far
        free = SlowList(problem, spec, rule._replace(cap=np.full(problem.ranks, math.inf)))
        limited += free.rows != slow.rows
        assert seconds >= 0
        # It runs all updates at the end, and `evaluate` some of them before.
        assert evaluate(spec, encoding, work) <= seconds
        if placement in ("linear", "bidirectional"):
            assert evaluate(spec, encoding, work) == seconds
        assert all(is_valid(spec, encoding, work, rank) for rank in range(problem.ranks))
    assert limited > 5
    assert (far > 2) == (placement == "bidirectional")


@pytest.mark.parametrize("seed", [31, 43, 62, 66])
def test_of_five_micro_batches_on_two_routes_each_must_be_able_to_finish(seed):
    """One after the other: whether the second can finish must not be taken from the first."""
    rng = np.random.default_rng(seed)
    problem = random_problem(seed, "bidirectional", 5)
    spec = problem.spec(random_counts(problem, rng))
    encoding, rule = empty_encoding(spec), random_rule(problem, spec, rng)
    list_schedule(spec, rule, encoding, make_workspace(spec))
    slow = SlowList(problem, spec, rule)
    assert slow.is_far
    assert rows_of(encoding) == slow.rows


def test_caps_below_one_micro_batch_make_no_program():
    """The rank that lacks memory for one starts nothing, and the seconds are -1."""
    for placement, rank in itertools.product(["linear", "v", "bidirectional"], range(2)):
        problem = random_problem(4, placement, 3, limited=False)
        spec = problem.spec(random_counts(problem, np.random.default_rng(1)))
        cap = np.full(problem.ranks, 100.0)
        cap[rank] = Shape.of(spec).need[rank] - 0.5
        rule = random_rule(problem, spec, np.random.default_rng(2))._replace(cap=cap)
        assert list_schedule(spec, rule, empty_encoding(spec), make_workspace(spec)) == -1.0
