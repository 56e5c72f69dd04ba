"""The search: list scheduling by known rules and by rules near the best of them, in turn with
annealing of the programs that they make.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np

from penstock.schedule.op import Schedule
from penstock.synthesis.anneal import AnnealSettings, anneal
from penstock.synthesis.arrays import (
    Encoding,
    Spec,
    Workspace,
    empty_encoding,
    make_workspace,
)
from penstock.synthesis.deadline import Deadline
from penstock.synthesis.encoding import decode, encode, join_halves, route_counts
from penstock.synthesis.evaluate import evaluate, is_valid
from penstock.synthesis.list_schedule import Rule, list_schedule
from penstock.synthesis.problem import Problem
from penstock.synthesis.rules import (
    Shape,
    neighbour,
    rule_of_times,
    standard_rules,
    unsplit_masks,
)

#: Ops that a round of annealing evaluates, in about a twentieth of a second.
OPS_PER_ROUND = 3_000_000

#: Ops of a round of list scheduling, the fixed cost of each rule included. On random costs with
#: tight limits annealing comes ten times nearer to the best than rules do.
RULE_OPS_PER_ROUND = 80_000

#: One round of this number is list scheduling, the others annealing.
ROUNDS_PER_CLIMB = 6

#: Number of the best programs that annealing starts from.
POOL = 6


@dataclass
class Case:
    """One number of micro-batches on each route, with a workspace."""

    spec: Spec
    split: bool
    work: Workspace = field(init=False)
    shape: Shape = field(init=False)
    ops: int = field(init=False)

    def __post_init__(self) -> None:
        self.work, self.shape = make_workspace(self.spec), Shape.of(self.spec)
        stages = len(self.spec.copies) // len(self.spec.counts)
        self.ops = int(3 * self.spec.counts.sum() * stages)

    def try_rule(self, rule: Rule) -> Candidate | None:
        """Return the programs that list scheduling makes by a rule, or None if it gets stuck."""
        encoding = empty_encoding(self.spec)
        seconds = list_schedule(self.spec, rule, encoding, self.work)
        return Candidate(seconds, self, encoding, rule) if seconds >= 0 else None


@dataclass
class Candidate:
    """Programs with their makespan, and the rule that made them, if one did."""

    seconds: float
    case: Case
    encoding: Encoding
    rule: Rule | None = None

    def copy_of_encoding(self) -> Encoding:
        """Return a copy of the programs, to be changed."""
        return Encoding(self.encoding.codes.copy(), self.encoding.lengths.copy())


@dataclass
class Search:
    """The best programs of one problem so far.

    Attributes:
        problem: the problem.
        goal: a lower bound of the makespan.
        seed: seed of the random numbers.
        pool: the best programs, shortest first.
    """

    problem: Problem
    goal: float
    seed: int = 0
    pool: list[Candidate] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(self.seed)
        self.cases: dict[tuple[int, ...], Case] = {}
        self.best_of_split: dict[int, Candidate] = {}
        self.rounds = 0

    def case(self, counts: tuple[int, ...]) -> Case:
        """Return the case of these numbers of micro-batches on the routes, cached."""
        if counts not in self.cases:
            self.cases[counts] = Case(self.problem.spec(counts), self.problem.split)
        return self.cases[counts]

    @property
    def best(self) -> Candidate | None:
        """The shortest programs so far."""
        return self.pool[0] if self.pool else None

    @property
    def done(self) -> bool:
        """Whether no shorter program can exist."""
        return bool(self.pool) and self.pool[0].seconds <= self.goal * (1 + 1e-12)

    def add(self, candidate: Candidate | None) -> None:
        """Add a candidate to the pool, unless it has an equal one; the pool stays small."""
        if candidate is None or any(_is_equal(candidate, other) for other in self.pool):
            return
        split = int(candidate.case.spec.counts[0])
        if split not in self.best_of_split or candidate.seconds < self.best_of_split[split].seconds:
            self.best_of_split[split] = candidate
        ordered = sorted([*self.pool, candidate], key=lambda member: member.seconds)
        self.pool = ordered[:POOL]

    def start(self, schedule: Schedule) -> None:
        """Add a schedule to start from, if it consists of ops that can be encoded."""
        counts = route_counts(self.problem, schedule)
        if counts is None:
            return
        case = self.case(counts)
        encoding = encode(self.problem, case.spec, schedule)
        if encoding is not None and all(
            is_valid(case.spec, encoding, case.work, rank) for rank in range(len(encoding.lengths))
        ):
            seconds = evaluate(case.spec, encoding, case.work)
            if seconds >= 0:
                self.add(Candidate(seconds, case, encoding))

    def schedules(self) -> Iterator[Schedule]:
        """Yield the pool, shortest first, with adjacent halves of a backward joined where that
        costs nothing.
        """
        for candidate in self.pool:
            case, encoding = candidate.case, candidate.copy_of_encoding()
            join_halves(case.spec, encoding, case.work)
            yield decode(self.problem, case.spec, encoding, case.work)

    def splits(self) -> list[tuple[int, ...]]:
        """Return the numbers of micro-batches on the routes that are tried: about half each way."""
        m = self.problem.micro_batches
        if len(self.problem.routes) == 1:
            return [(m,)]
        halves = {(m + 1) // 2 + off for off in (0, -1, 1, -2, 2, -4, 4)}
        ordered = sorted((n for n in halves if 0 < n < m), key=lambda n: abs(2 * n - m))
        return [(n, m - n) for n in ordered]

    def run(self, deadline: Deadline, max_rounds: int, rule_ops: float) -> None:
        """Search until all rounds are done, or no shorter program can exist.

        Args:
            deadline: the hard stop.
            max_rounds: number of rounds.
            rule_ops: number of ops that list scheduling by the standard rules may place before the
                first round.
        """
        for counts in self.splits():
            if not self._try_standard_rules(self.case(counts), deadline, rule_ops):
                return
        while self.rounds < max_rounds and not self.done:
            if deadline.is_over():
                return
            self.rounds += 1
            if self.rounds % ROUNDS_PER_CLIMB == 1:
                self._climb()
            else:
                self._anneal()

    def _try_standard_rules(self, case: Case, deadline: Deadline, most_ops: float) -> bool:
        """Try all standard rules, or a random choice of them that places `most_ops` ops. Return
        whether to go on: False if the pool is optimal, or if the time is up and it has a program.
        """
        masks = unsplit_masks(case.spec, case.split)
        rules = [*standard_rules(case.spec, case.shape, masks)]
        order: Iterable[int] = range(len(rules))
        if len(rules) * case.ops > most_ops:
            order = self.rng.permutation(len(rules))
        for count, i in enumerate(order):
            if self.pool and count * case.ops > most_ops:
                break
            if self.done or (self.pool and deadline.is_over()):
                return False
            self.add(case.try_rule(rules[i]))
        return True

    def _climb(self) -> None:
        """List scheduling by rules near a good one; each that is no worse is the next to start
        from.
        """
        start = self.pool[min(int(self.rng.exponential(1.0)), len(self.pool) - 1)]
        case, rule, least = start.case, start.rule, start.seconds
        if rule is None or self.rng.random() < 0.5:
            # It leaves the times of the ops in the workspace, where `rule_of_times` reads them.
            evaluate(case.spec, start.encoding, case.work)
            rule, least = rule_of_times(case.spec, start.encoding, case.work), np.inf
        for _ in range(RULE_OPS_PER_ROUND // (200 + case.ops)):
            candidate = case.try_rule(neighbour(rule, case.spec, case.shape, self.rng))
            if candidate is None or candidate.rule is None or candidate.seconds > least:
                continue
            if candidate.seconds < least:
                self.add(candidate)
            least, rule = candidate.seconds, candidate.rule

    def _anneal(self) -> None:
        """Anneal one of the pool, or the best of some split of the micro-batches, from a random
        temperature.
        """
        start = self.pool[min(int(self.rng.exponential(1.5)), len(self.pool) - 1)]
        if len(self.best_of_split) > 1 and self.rng.random() < 0.4:
            start = list(self.best_of_split.values())[self.rng.integers(len(self.best_of_split))]
        case = start.case
        encoding = start.copy_of_encoding()
        mean = float(case.spec.cost[:, :3].mean()) or 1.0
        temperature = mean * 10 ** self.rng.uniform(-1.0, 0.8)
        whole, halves = case.spec.cost[:, 3], case.spec.cost[:, 1] + case.spec.cost[:, 2]
        joins = case.split and bool((whole < halves).any())
        settings = AnnealSettings(
            np.array([max(200, OPS_PER_ROUND // case.ops)]),
            np.array([temperature, temperature * 0.02]),
            np.array([self.goal * (1 + 1e-12)]),
            self.rng.integers(1, 2**40, 1),
            np.array([int(joins)]),
        )
        seconds = anneal(case.spec, encoding, case.work, settings)
        rule = start.rule if seconds == start.seconds else None
        self.add(Candidate(seconds, case, encoding, rule))


def _is_equal(one: Candidate, other: Candidate) -> bool:
    """Return whether two candidates have the same programs."""
    return one.seconds == other.seconds and np.array_equal(one.encoding.codes, other.encoding.codes)
