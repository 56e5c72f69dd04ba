"""Lower bounds: below every schedule that fits, and what they take into account."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from tests.synthesis.requests import (
    best_of_zoo,
    problem_of,
    problems,
    random_counts,
    random_problem,
)

from penstock.schedule.catalogue import schedule
from penstock.simulate.costs import Costs
from penstock.simulate.simulate import simulate_schedule
from penstock.synthesis.bound import RouteBounds, lower_bound, preemptive, seconds_of
from penstock.synthesis.problem import Constraints
from penstock.synthesis.synthesise import Settings, synthesise


@settings(max_examples=30, suppress_health_check=list(HealthCheck))
@given(problems(stages=(2, 4), micro_batches=6, whole=False))
def test_no_schedule_of_the_zoo_that_fits_is_below_it(request_):
    """Where messages stay on a rank, they take no time in either."""
    costs, micro_batches, constraints = request_
    problem = problem_of(costs, micro_batches, constraints)
    zoo = best_of_zoo(costs, micro_batches, problem.routes, constraints.memory_limit)
    for name, makespan in zoo.items():
        if name != "bpipe":  # it holds activations on other ranks
            assert lower_bound(problem) <= makespan * (1 + 1e-9), name


@pytest.mark.parametrize(
    ("placement", "inside"),
    [("v", [1]), ("interleaved", []), ("linear", []), ("bidirectional", [])],
)
@pytest.mark.parametrize("direction", ["up", "down"])
def test_messages_between_ranks_count_and_those_inside_do_not(placement, inside, direction):
    """Stages 1 and 2 of a V are on one rank."""
    costs = Costs(forward=(1.0,) * 4, backward=(2.0,) * 4, transfer=0.5)
    problem = problem_of(costs, 4, Constraints(placement))
    alone = lower_bound(problem)
    for boundary in range(3):
        seconds = list(getattr(problem.costs, direction))
        seconds[boundary] = 100.0
        slower = replace(problem.costs, **{direction: tuple(seconds)})
        bound = lower_bound(replace(problem, costs=slower))
        assert (bound == alone) == (boundary in inside)
        assert bound == alone or bound >= 100


@pytest.mark.parametrize(
    ("micro_batches", "expected"), [(1, 4 * 3 + 0.5), (4, 4 * 3 + 3 * 3 + 0.5), (8, 12 + 21 + 0.5)]
)
def test_equal_stages_have_the_bound_of_one_forward_one_backward(micro_batches, expected):
    """The last stage cannot start before three forwards, nor the first end before its W and U."""
    costs = Costs(forward=(1.0,) * 4, backward=(2.0,) * 4, update=(0.5,) * 4)
    problem = problem_of(costs, micro_batches, Constraints("linear", split=False))
    assert lower_bound(problem) == pytest.approx(expected)


def test_tight_memory_raises_the_bound_of_the_rank_that_is_tight():
    """With one micro-batch at a time on rank 0, each takes its whole path up and back."""
    costs = Costs(forward=(1.0,) * 3, backward=(2.0,) * 3)
    free = lower_bound(problem_of(costs, 6, Constraints("linear", split=False)))
    tight = lower_bound(problem_of(costs, 6, Constraints("linear", (1, 6, 6), split=False)))
    assert free == pytest.approx(9 + 5 * 3)
    assert tight == pytest.approx(6 * 9)


def test_a_preemptive_machine_takes_the_longest_tail_first():
    """An op is interrupted by one with a longer tail, and ops of no seconds do not count."""
    assert preemptive([]) == 0
    assert preemptive([(9.0, 0.0, 9.0)]) == 0
    assert preemptive([(0.0, 4.0, 1.0), (1.0, 2.0, 6.0)]) == 9
    assert preemptive([(2.0, 1.0, 0.0), (5.0, 1.0, 3.0)]) == 9


def test_the_bound_of_any_placement_is_the_least_of_all():
    """A placement that is not the best so far may have the lower bound: its programs may yet be
    shorter.
    """
    # Without a search the best schedule is a V of 45.5 s; bounds are 39.5 s for a V, 36 s in turn.
    costs = Costs(
        forward=(0.5, 1.0, 2.0, 0.5), backward=(1.0, 2.0, 4.0, 1.0), transfer=(3.0, 0.5, 3.0)
    )
    settings_any = Settings(placement="any", ranks=2, budget_s=0.0)
    result = synthesise(costs, 4, settings_any)
    bounds = {
        placement: lower_bound(problem_of(costs, 4, Constraints(placement, ranks=2)))
        for placement in ("interleaved", "v")
    }
    least = min(bounds.values())
    assert bounds[result.placement] > least
    assert result.lower_bound == least
    assert result.gap == pytest.approx(result.makespan / least - 1)


def end_of(ops):
    """The earliest moment by which ops of one rank end, each given as release and seconds: the
    largest release with the seconds of all ops that are not released before it.
    """
    ends = [at + sum(other for begin, other in ops if begin >= at) for at, _ in ops]
    return max(ends, default=0.0)


class SlowBounds:
    """Heads and tails of one route by the table of the module: all ops before or after an op,
    listed anew for each op.
    """

    def __init__(self, problem, counts, route):
        costs, self.ranks = problem.costs, problem.routes[route]
        self.m, self.p = counts[route], problem.stages
        self.f, self.i, self.u = costs.forward, costs.until_gradient, costs.update
        self.w = [least - i for least, i in zip(costs.least_backward, self.i, strict=True)]
        far = [a != b for a, b in zip(self.ranks, self.ranks[1:], strict=False)]
        self.up = [seconds * is_far for seconds, is_far in zip(costs.up, far, strict=True)]
        self.down = [seconds * is_far for seconds, is_far in zip(costs.down, far, strict=True)]
        self.capacity = []
        for rank, size in zip(self.ranks, costs.memory, strict=True):
            fitting = [n for n in range(1, self.m + 1) if n * size <= problem.limits[rank]]
            self.capacity.append(max(fitting))
        self.head_f, self.head_i, self.tail_f, self.tail_i = (
            np.zeros((self.p, self.m)) for _ in range(4)
        )
        for n in range(self.m):
            for s in range(self.p):
                self.head_f[s, n] = max(end_of(self.before_f(s, n)), self.arrival_up(s, n))
            for s in reversed(range(self.p)):
                self.head_i[s, n] = max(
                    end_of(self.before_i(s, n)),
                    self.head_f[s, n] + self.f[s],
                    self.arrival_down(s, n),
                )
        for n in reversed(range(self.m)):
            for s in range(self.p):
                self.tail_i[s, n] = max(end_of(self.after_i(s, n)), self.way_down(s, n))
            for s in reversed(range(self.p)):
                self.tail_f[s, n] = max(
                    end_of(self.after_f(s, n)), self.i[s] + self.tail_i[s, n], self.way_up(s, n)
                )

    def same_rank(self, s):
        """All stages on the rank of a stage."""
        return [q for q in range(self.p) if self.ranks[q] == self.ranks[s]]

    def before_f(self, s, n):
        """Forwards before, and what must have freed memory."""
        ops = [
            (self.head_f[q, k], self.f[q]) for q in self.same_rank(s) if q < s for k in range(n + 1)
        ]
        ops += [(self.head_f[s, k], self.f[s]) for k in range(n)]
        for k in range(n - self.capacity[s] + 1):
            ops.append((self.head_i[s, k], self.i[s]))
            ops.append((self.head_i[s, k] + self.i[s], self.w[s]))
        return ops

    def before_i(self, s, n):
        """All forwards of the micro-batches so far, and backwards."""
        ops = [(self.head_f[q, k], self.f[q]) for q in self.same_rank(s) for k in range(n + 1)]
        ops += [
            (self.head_i[q, k], self.i[q]) for q in self.same_rank(s) if q > s for k in range(n + 1)
        ]
        ops += [(self.head_i[s, k], self.i[s]) for k in range(n)]
        freed = range(n - self.capacity[s] + 1)
        return ops + [(self.head_i[s, k] + self.i[s], self.w[s]) for k in freed]

    def after_i(self, s, n):
        """In reversed time: later backwards, what needs the freed memory, W and U."""
        earlier = [q for q in self.same_rank(s) if q <= s]
        ops = [(0.0, self.u[q]) for q in earlier]
        for k in range(n, self.m):
            ops += [(self.tail_i[q, k], self.i[q]) for q in earlier if q < s or k > n]
            ops += [(self.u[q], self.w[q]) for q in earlier]
        return ops + [(self.tail_f[s, k], self.f[s]) for k in range(n + self.capacity[s], self.m)]

    def after_f(self, s, n):
        """In reversed time: the backwards of all later micro-batches, forwards, W and U."""
        ops = [(0.0, self.u[q]) for q in self.same_rank(s)]
        for k in range(n, self.m):
            for q in self.same_rank(s):
                ops.append((self.tail_i[q, k], self.i[q]))
                ops.append((self.u[q], self.w[q]))
                if q > s or (q == s and k > n):
                    ops.append((self.tail_f[q, k], self.f[q]))
        return ops

    def arrival_up(self, s, n):
        """When the activation arrives: messages of one boundary follow each other."""
        at = 0.0
        for k in range(n + 1 if s else 0):
            at = max(at, self.head_f[s - 1, k] + self.f[s - 1]) + self.up[s - 1]
        return at

    def arrival_down(self, s, n):
        """When the gradient arrives."""
        at = 0.0
        for k in range(n + 1 if s + 1 < self.p else 0):
            at = max(at, self.head_i[s + 1, k] + self.i[s + 1]) + self.down[s]
        return at

    def way_down(self, s, n):
        """Seconds from the end of an I until the batch can end, by its gradient."""
        after = 0.0
        for k in reversed(range(n, self.m) if s else range(0)):
            after = max(after, self.i[s - 1] + self.tail_i[s - 1, k]) + self.down[s - 1]
        return after

    def way_up(self, s, n):
        """Seconds from the end of an F until the batch can end, by its activation."""
        after = 0.0
        for k in reversed(range(n, self.m) if s + 1 < self.p else range(0)):
            after = max(after, self.f[s + 1] + self.tail_f[s + 1, k]) + self.up[s]
        return after

    def jobs(self, s):
        """The ops of a stage."""
        jobs = []
        for n in range(self.m):
            jobs.append((self.head_f[s, n], self.f[s], self.tail_f[s, n]))
            jobs.append((self.head_i[s, n], self.i[s], self.tail_i[s, n]))
            jobs.append((self.head_i[s, n] + self.i[s], self.w[s], self.u[s]))
        return jobs

    def seconds_held(self, s):
        """Seconds that a micro-batch of a stage holds its memory at least."""
        above = range(s + 1, self.p)
        path = sum(self.f[q] + self.i[q] for q in above) + sum(self.up[s:]) + sum(self.down[s:])
        return self.f[s] + path + self.i[s] + self.w[s]


def slow_seconds(problem, counts):
    """The lower bound with these numbers of micro-batches on the routes."""
    routes = [SlowBounds(problem, counts, route) for route in range(len(counts))]
    p, update = problem.stages, problem.costs.update
    least = 0.0
    for rank, copies in enumerate(problem.copies_of_rank):
        jobs, held, firsts = [], 0.0, []
        for copy in copies:
            route, s = routes[copy // p], copy % p
            jobs += route.jobs(s)
            held += problem.costs.memory[s] * route.m * route.seconds_held(s)
            firsts.append(route.head_f[s, 0])
        stages = {copy % p for copy in copies}
        by_memory = min(firsts) + held / problem.limits[rank] + min(update[s] for s in stages)
        work = sum(seconds for _, seconds, _ in jobs) + sum(update[s] for s in stages)
        least = max(least, work, preemptive(jobs), by_memory)
    return least


@pytest.mark.parametrize("placement", ["linear", "interleaved", "v", "bidirectional"])
def test_heads_and_tails_are_those_of_the_ops_before_and_after(placement):
    """A head that is too early, or a tail that is too short, still bounds; only the proofs take
    longer then. With memory for as many as there are, and for fewer.
    """
    tight = 0
    for seed in range(8):
        problem = random_problem(seed, placement, limited=seed % 4 > 0)
        counts = random_counts(problem, np.random.default_rng(seed))
        for route in range(len(counts)):
            bounds, slow = (cls(problem, counts, route) for cls in (RouteBounds, SlowBounds))
            assert bounds.capacity == slow.capacity
            assert bounds.head_f == pytest.approx(slow.head_f)
            assert bounds.head_i == pytest.approx(slow.head_i)
            assert bounds.tail_f == pytest.approx(slow.tail_f)
            assert bounds.tail_i == pytest.approx(slow.tail_i)
            for s in range(problem.stages):
                assert np.array([*bounds.jobs(s)]) == pytest.approx(np.array(slow.jobs(s)))
            tight += min(slow.capacity) < slow.m
        assert seconds_of(problem, counts) == pytest.approx(slow_seconds(problem, counts))
    assert tight > 2


def test_of_two_routes_the_bound_is_the_least_of_all_numbers_of_micro_batches():
    """Numbers that cannot be the least are left out of the search."""
    least_at = set()
    for seed in range(10):
        problem = random_problem(seed, "bidirectional", 2 + seed % 4)
        m = problem.micro_batches
        bounds = {n: seconds_of(problem, (n, m - n)) for n in range(1, m)}
        assert lower_bound(problem) == min(bounds.values())
        least_at.add(2 * min(bounds, key=bounds.get) == m)
    assert len(least_at) == 2


def test_two_copies_of_a_stage_on_one_rank_have_one_update():
    """Rank 1 of three has stage 1 of both routes; counted twice, the bound would not be one."""
    costs = Costs(forward=(1.0,) * 3, backward=(2.0,) * 3, update=(0.0, 50.0, 0.0))
    problem = problem_of(costs, 2, Constraints("bidirectional", split=False))
    gems = simulate_schedule(schedule("gems", 3, 2), costs).makespan
    assert 50 < lower_bound(problem) <= gems < 100


def test_memory_of_several_stages_together_bounds_the_batch():
    """A V in the memory of one micro-batch on both its stages: either stage alone fits two.
    Rank 1 starts after 1 s, and holds each micro-batch for 8 s on stage 1 and 6 s on stage 2, of
    which two fit at once.
    """
    costs = Costs(forward=(1.0, 1.0, 1.0, 2.0), backward=(1.0, 1.0, 1.0, 2.0), update=(0.5,) * 4)
    problem = problem_of(costs, 8, Constraints("v", 2, split=False))
    assert lower_bound(problem) == pytest.approx(1 + 8 * (8 + 6) / 2 + 0.5)


def test_a_limit_that_is_a_whole_number_of_micro_batches_up_to_rounding_counts_in_full():
    """0.3 / 0.1 is 2.9999999999999996; stages that hold nothing fit all."""
    costs = Costs(forward=(1.0,) * 3, activation_bytes=(0.1, 0.1, 0.0))
    problem = problem_of(costs, 5, Constraints("linear", (0.3, 0.29, 0.1)))
    assert RouteBounds(problem, (5,), 0).capacity == [3, 2, 5]
