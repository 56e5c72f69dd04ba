"""The search: rules known to be good, rules near the best of them, and annealing of what they make,
in turn.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from penstock.schedule.op import Schedule
from penstock.search.synthesis.anneal import Knobs, anneal
from penstock.search.synthesis.arrays import Spec, Words, Work, words_for, work_for
from penstock.search.synthesis.build import Rule, build
from penstock.search.synthesis.play import play, sound
from penstock.search.synthesis.problem import Problem
from penstock.search.synthesis.rules import Shape, as_played, known, near, wholes
from penstock.search.synthesis.words import counts_of, joined, schedule_of, words_of

#: Ops that a round of annealing plays, in about a twentieth of a second; and rules of a round of
#: list scheduling, times what each
#: costs, in ops. On random costs with tight limits annealing finds what is ten times nearer to the
#: best than rules do.
OPS_A_ROUND = 3_000_000
BUILT_A_ROUND = 80_000
ROUNDS_A_CLIMB = 6
#: The best programs that annealing starts from.
POOL = 6


@dataclass
class Case:
    """One number of micro-batches on each route, with room to work in."""

    spec: Spec
    split: bool
    work: Work = field(init=False)
    shape: Shape = field(init=False)
    ops: int = field(init=False)

    def __post_init__(self) -> None:
        self.work, self.shape = work_for(self.spec), Shape.of(self.spec)
        stages = len(self.spec.copies) // len(self.spec.counts)
        self.ops = int(3 * self.spec.counts.sum() * stages)

    def try_rule(self, rule: Rule) -> Found | None:
        """What list scheduling makes of a rule, if it comes to an end."""
        words = words_for(self.spec)
        seconds = build(self.spec, rule, words, self.work)
        return Found(seconds, self, words, rule) if seconds >= 0 else None


@dataclass
class Found:
    """Words with their makespan, and the rule that they came from, if any did."""

    seconds: float
    case: Case
    words: Words
    rule: Rule | None = None


@dataclass
class Search:
    """The best programs of one problem so far. `goal` is a makespan that nothing undercuts."""

    problem: Problem
    goal: float
    seed: int = 0
    pool: list[Found] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.luck = np.random.default_rng(self.seed)
        self.cases: dict[tuple[int, ...], Case] = {}
        self.best_of: dict[int, Found] = {}
        self.rounds = 0

    def case(self, counts: tuple[int, ...]) -> Case:
        """Room for so many micro-batches on each route; the same for the same."""
        if counts not in self.cases:
            self.cases[counts] = Case(self.problem.spec(counts), self.problem.split)
        return self.cases[counts]

    @property
    def best(self) -> Found | None:
        """The shortest so far."""
        return self.pool[0] if self.pool else None

    @property
    def done(self) -> bool:
        """Whether nothing shorter can exist."""
        return bool(self.pool) and self.pool[0].seconds <= self.goal * (1 + 1e-12)

    def keep(self, found: Found | None) -> None:
        """Add to the pool, unless it holds the like; the pool stays small."""
        if found is None or any(
            each.seconds == found.seconds and np.array_equal(each.words.codes, found.words.codes)
            for each in self.pool
        ):
            return
        split = int(found.case.spec.counts[0])
        if split not in self.best_of or found.seconds < self.best_of[split].seconds:
            self.best_of[split] = found
        self.pool = sorted([*self.pool, found], key=lambda each: each.seconds)[:POOL]

    def start(self, schedule: Schedule) -> None:
        """A schedule to start from, if it is of ops that words have."""
        counts = counts_of(self.problem, schedule)
        if counts is None:
            return
        case = self.case(counts)
        words = words_of(self.problem, case.spec, schedule)
        if words is not None and all(
            sound(case.spec, words, case.work, rank) for rank in range(len(words.lengths))
        ):
            seconds = play(case.spec, words, case.work)
            if seconds >= 0:
                self.keep(Found(seconds, case, words))

    def schedules(self) -> Iterator[Schedule]:
        """The pool, shortest first, with halves of a backward that stand together joined where that
        costs nothing.
        """
        for found in self.pool:
            words = Words(found.words.codes.copy(), found.words.lengths.copy())
            joined(found.case.spec, words, found.case.work)
            yield schedule_of(self.problem, found.case.spec, words, found.case.work)

    def splits(self) -> list[tuple[int, ...]]:
        """Numbers of micro-batches on the routes that are tried: about half each way."""
        m = self.problem.micro_batches
        if len(self.problem.routes) == 1:
            return [(m,)]
        halves = {(m + 1) // 2 + off for off in (0, -1, 1, -2, 2, -4, 4)}
        ordered = sorted((n for n in halves if 0 < n < m), key=lambda n: abs(2 * n - m))
        return [(n, m - n) for n in ordered]

    def run(self, until_s: float, max_rounds: int | None) -> None:
        """Search until the clock (`time.monotonic`) says so, so many rounds are over, or nothing
        shorter can exist.
        """
        for counts in self.splits():
            case = self.case(counts)
            rules = [*known(case.spec, case.shape, wholes(case.spec, case.split))]
            order = (
                self.luck.permutation(len(rules))
                if len(rules) * case.ops > 20 * OPS_A_ROUND
                else range(len(rules))
            )
            for i in order:
                if self.done or (self.pool and time.monotonic() > until_s):
                    return
                self.keep(case.try_rule(rules[i]))
        while (
            not self.done
            and time.monotonic() < until_s
            and (max_rounds is None or self.rounds < max_rounds)
        ):
            self.rounds += 1
            if self.rounds % ROUNDS_A_CLIMB == 1:
                self._climb()
            else:
                self._anneal()

    def _climb(self) -> None:
        """List scheduling by rules near the best one; each that is no worse is the next to start
        from.
        """
        now = self.pool[min(int(self.luck.exponential(1.0)), len(self.pool) - 1)]
        case, rule, least = now.case, now.rule, now.seconds
        if rule is None or self.luck.random() < 0.5:
            play(case.spec, now.words, case.work)
            rule, least = as_played(case.spec, now.words, case.work), np.inf
        for _ in range(BUILT_A_ROUND // (200 + case.ops)):
            tried = case.try_rule(near(rule, case.spec, case.shape, self.luck))
            if tried is not None and tried.rule is not None and tried.seconds <= least:
                if tried.seconds < least:
                    self.keep(tried)
                least, rule = tried.seconds, tried.rule

    def _anneal(self) -> None:
        """Annealing of one of the pool, or of the best of some split of the micro-batches, from a
        heat that luck decides.
        """
        start = self.pool[min(int(self.luck.exponential(1.5)), len(self.pool) - 1)]
        if len(self.best_of) > 1 and self.luck.random() < 0.4:
            start = list(self.best_of.values())[self.luck.integers(len(self.best_of))]
        case = start.case
        words = Words(start.words.codes.copy(), start.words.lengths.copy())
        mean = float(case.spec.cost[:, :3].mean()) or 1.0
        heat = mean * 10 ** self.luck.uniform(-1.0, 0.8)
        joins = case.split and bool(
            (case.spec.cost[:, 3] < case.spec.cost[:, 1] + case.spec.cost[:, 2]).any()
        )
        knobs = Knobs(
            np.array([max(200, OPS_A_ROUND // case.ops)]),
            np.array([heat, heat * 0.02]),
            np.array([self.goal * (1 + 1e-12)]),
            self.luck.integers(1, 2**40, 1),
            np.array([int(joins)]),
        )
        seconds = anneal(case.spec, words, case.work, knobs)
        self.keep(Found(seconds, case, words, start.rule if seconds == start.seconds else None))
