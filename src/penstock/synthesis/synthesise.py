"""Synthesise the shortest program for given costs: bounds, the zoo, the search, and on request a
proof.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice

from penstock.errors import ScheduleError
from penstock.schedule.op import Kind, Schedule
from penstock.simulate.costs import Costs
from penstock.simulate.simulate import simulate_schedule
from penstock.synthesis.bound import lower_bound
from penstock.synthesis.deadline import Deadline
from penstock.synthesis.problem import (
    PLACEMENTS,
    Constraints,
    Limit,
    Problem,
    StageCosts,
    problem_for,
)
from penstock.synthesis.updates import with_early_updates
from penstock.synthesis.zoo import candidates

#: A schedule within this relative distance of its lower bound counts as optimal: seconds that are
#: no whole ticks, and the rounding of sums, leave this much open.
PROVED = 1e-6

#: Budgets in seconds are counted up to this one: a month.
MOST_S = 2.6e6

#: Share of the budget for the search if the rest is for the proof.
BEFORE_PROOF = 0.3

#: Rounds of search for every second of the budget, and ops of the list scheduling before them. One
#: core does 40 rounds and 3 to 5 million ops in a second, so that the work of a budget takes about
#: half of it, and the clock seldom ends a search.
ROUNDS_PER_S, RULE_OPS_PER_S = 20, 1_000_000

#: The kinds of ops that the search makes programs of.
_SEARCHED_KINDS = frozenset({Kind.F, Kind.B, Kind.I, Kind.W, Kind.U})


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of the search; `synthesised` documents them."""

    memory_limit: Limit = None
    placement: str = "linear"
    ranks: int | None = None
    split: bool = True
    exact: bool = False
    budget_s: float = 5.0
    max_rounds: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if (
            isinstance(self.budget_s, bool)
            or not isinstance(self.budget_s, (int, float))
            or not self.budget_s >= 0
        ):
            raise ScheduleError(
                f"synthesised takes a budget_s of 0 seconds or more, not {self.budget_s!r}"
            )
        for name in ("max_rounds", "seed"):
            number = getattr(self, name)
            if number is not None and (
                isinstance(number, bool) or not isinstance(number, int) or number < 0
            ):
                raise ScheduleError(f"synthesised takes a {name} of 0 or more, not {number!r}")
        if self.placement not in (*PLACEMENTS, "any"):
            raise ScheduleError(
                f"synthesised knows no placement {self.placement!r}: take one of "
                f"{', '.join(PLACEMENTS)}, any"
            )

    @property
    def rounds(self) -> int:
        """Rounds of search: the requested maximum, or those that the budget gives."""
        if self.max_rounds is not None:
            return self.max_rounds
        searched_s = self.budget_s * (BEFORE_PROOF if self.exact else 1.0)
        return round(min(searched_s, MOST_S) * ROUNDS_PER_S)

    @property
    def rule_ops(self) -> float:
        """Maximum number of ops of the list scheduling before the rounds."""
        return math.inf if self.max_rounds is not None else self.budget_s * RULE_OPS_PER_S

    def constraints(self, placement: str) -> Constraints:
        """Return the constraints of the search with one placement."""
        return Constraints(placement, self.memory_limit, self.ranks, self.split)


@dataclass(frozen=True)
class Synthesis:
    """Result of the search.

    Attributes:
        schedule: the shortest schedule.
        makespan: its simulated seconds.
        lower_bound: lower bound in seconds of all schedules with this placement and limit.
        gap: makespan / lower_bound - 1.
        proved: whether the schedule is optimal, to a part in a million.
        placement: its placement, which tells the best one if "any" was requested.
        zoo: name of the best schedule of the zoo that fits; None if none does.
        zoo_makespan: its simulated seconds; None if there is none.
        rounds: rounds of search.
        cut_short: whether the clock ended the search before its work was done.
    """

    schedule: Schedule
    makespan: float
    lower_bound: float
    gap: float
    proved: bool
    placement: str
    zoo: str | None
    zoo_makespan: float | None
    rounds: int
    cut_short: bool = False

    def facts(self) -> tuple[tuple[str, object], ...]:
        """Return what the schedule carries in its `options`."""
        names = ("placement", "makespan", "lower_bound", "gap", "proved", "zoo", "zoo_makespan")
        facts = tuple((name, getattr(self, name)) for name in names)
        return (*facts, ("cut_short", True)) if self.cut_short else facts


def synthesise(costs: Costs, micro_batches: int, settings: Settings | None = None) -> Synthesis:
    """Search for the shortest schedule; `synthesised` documents the method and the settings.

    Args:
        costs: costs with an entry for every stage in `forward`.
        micro_batches: at least 1.
        settings: settings of the search.

    Raises:
        ScheduleError: nothing fits, or the placement does not allow these numbers of stages, ranks
            and micro-batches.
        SettingError: the costs do not fit together, or a limit is a text that is no amount of
            bytes.
        MissingExtra: `exact` without OR-Tools.
    """
    settings = settings or Settings()
    deadline = Deadline(settings.budget_s)
    if settings.exact:
        # Fail before the search, not after it.
        from penstock.synthesis.exact import load

        load()
    if not isinstance(costs.forward, tuple):
        raise ScheduleError(
            "the costs do not tell the number of stages: give forward as one number per stage"
        )
    table = StageCosts.of(costs, len(costs.forward))
    if settings.budget_s and settings.max_rounds != 0:
        _compile()
    problems = _problems(table, micro_batches, settings)
    tasks = [_Task(problem, costs, settings) for problem in problems]
    _run_all(tasks, settings, deadline)
    return _result(tasks, cut_short=deadline.reached)


def _run_all(tasks: Sequence[_Task], settings: Settings, deadline: Deadline) -> None:
    """Run the tasks of all placements, the most promising first. Rounds that follow from the budget
    are shared equally by the tasks that are left; tasks that cannot win any more get none.

    Only proofs share the remaining time, since CP-SAT ends by the clock.
    """
    rounds = settings.rounds
    for i, task in enumerate(sorted(tasks, key=lambda task: task.least)):
        if i and task.least >= min(other.makespan for other in tasks):
            continue
        tasks_left = len(tasks) - i
        proof_s = (1 - BEFORE_PROOF) * deadline.remaining_s / tasks_left
        if settings.max_rounds is None:
            task.run(deadline, rounds // tasks_left)
            rounds -= task.rounds
        else:
            task.run(deadline, rounds)
        if settings.exact and not task.proved:
            task.prove(proof_s)


def _result(tasks: Sequence[_Task], *, cut_short: bool) -> Synthesis:
    """Return the best schedule of all placements, which carries its facts in its options."""
    best = min(tasks, key=lambda task: task.makespan)
    # The rounding of sums may put a bound above the makespan.
    least = min(best.makespan, *(task.least for task in tasks))
    result = Synthesis(
        schedule=best.schedule,
        makespan=best.makespan,
        lower_bound=least,
        gap=best.makespan / least - 1 if least else 0.0,
        proved=best.makespan <= least * (1 + PROVED),
        placement=best.problem.placement,
        zoo=best.zoo,
        zoo_makespan=best.zoo_makespan if best.zoo else None,
        rounds=sum(task.rounds for task in tasks),
        cut_short=cut_short,
    )
    schedule = replace(result.schedule, name="synthesised", options=result.facts())
    return replace(result, schedule=schedule)


def _compile() -> None:
    """Compile the kernels, which takes some seconds once on a machine, by a small search that runs
    all of them.
    """
    costs = Costs(
        forward=[1, 1.2, 1, 0.8],
        input_grad=[1, 1.3, 1, 0.9],
        weight_grad=[0.8, 1, 0.7, 0.6],
        transfer=0.5,
    )
    settings = Settings(memory_limit=4, max_rounds=2)
    problem = problem_for(StageCosts.of(costs, 4), 8, settings.constraints("linear"))
    _Task(problem, costs, settings).run(Deadline(), settings.rounds)


def _problems(costs: StageCosts, micro_batches: int, settings: Settings) -> list[Problem]:
    """Return the problem of the requested placement, or of all placements that are possible.

    Raises:
        ScheduleError: none is possible.
    """
    if settings.placement != "any":
        constraints = settings.constraints(settings.placement)
        return [problem_for(costs, micro_batches, constraints)]
    problems, reasons = [], []
    for placement in PLACEMENTS:
        try:
            problems.append(problem_for(costs, micro_batches, settings.constraints(placement)))
        except ScheduleError as error:
            reasons.append(str(error))
    if not problems:
        raise ScheduleError("\n  ".join(["no placement is possible:", *reasons]))
    return problems


class _Task:
    """The search of one placement.

    Attributes:
        problem: the problem.
        costs: the costs that schedules are simulated with.
        settings: settings of the search.
        least: lower bound of the makespan.
        schedule: the best schedule so far.
        makespan: its simulated seconds.
        zoo: name of the best schedule of the zoo, if one fits.
        zoo_makespan: its simulated seconds.
        rounds: rounds of search.
        starts: schedules of the zoo to start from.
    """

    def __init__(self, problem: Problem, costs: Costs, settings: Settings) -> None:
        self.problem, self.costs, self.settings = problem, costs, settings
        self.least = lower_bound(problem)
        self.schedule, self.makespan = Schedule(()), math.inf
        self.zoo: str | None = None
        self.zoo_makespan = math.inf
        self.rounds = 0
        self.starts = [*candidates(problem)]
        for candidate in self.starts:
            seconds = self.offer(candidate)
            if seconds < self.zoo_makespan:
                self.zoo, self.zoo_makespan = candidate.name, seconds
        self._relax_bound()

    @property
    def proved(self) -> bool:
        """Whether no shorter schedule is possible."""
        return self.makespan <= self.least * (1 + PROVED)

    def seconds(self, schedule: Schedule) -> float:
        """Return the simulated makespan of a schedule."""
        return simulate_schedule(schedule, self.costs).makespan

    def offer(self, schedule: Schedule) -> float:
        """Store the schedule if it is the shortest so far. Return its makespan."""
        seconds = self.seconds(schedule)
        if seconds < self.makespan or (
            seconds == self.makespan and len(schedule.ops) < len(self.schedule.ops)
        ):
            self.schedule, self.makespan = schedule, seconds
        return seconds

    def run(self, deadline: Deadline, rounds: int) -> None:
        """Search for a number of rounds, starting from the zoo's schedules."""
        from penstock.synthesis.local import POOL, Search

        search = Search(self.problem, self.least, self.settings.seed)
        for candidate in self.starts:
            search.start(candidate)
        search.run(deadline, rounds, self.settings.rule_ops)
        self.rounds = search.rounds
        has_updates = any(self.problem.costs.update)
        # With one copy on every rank its update is the last op anyway.
        may_move_updates = has_updates and max(map(len, self.problem.copies_of_rank)) > 1
        for schedule in islice(search.schedules(), POOL if may_move_updates else 1):
            self.offer(with_early_updates(schedule, self.seconds) if may_move_updates else schedule)
        self._relax_bound()

    def _is_searchable(self) -> bool:
        """Return whether the best schedule consists of ops that the search makes programs of: no op
        is part of a cheaper pair, and every activation stays on its rank.
        """
        paired = bool(self.schedule.pairs) and self.costs.forward_backward is not None
        return not paired and all(op.kind in _SEARCHED_KINDS for op in self.schedule.ops)

    def _relax_bound(self) -> None:
        """Lower the bound until it is valid for the best schedule, which may move activations to
        other ranks, or have pairs that are cheaper than their ops.
        """
        if not self._is_searchable():
            pair = self.costs.spread("forward_backward", self.problem.stages)
            costs = self.problem.costs if pair is None else self.problem.costs.with_pairs(pair)
            free = replace(self.problem, costs=costs, limits=(math.inf,) * self.problem.ranks)
            self.least = min(self.least, lower_bound(free))

    def prove(self, limit_s: float) -> None:
        """Prove the optimum by CP-SAT within `limit_s` seconds, starting from the best schedule."""
        from penstock.synthesis.exact import prove

        if not self._is_searchable():
            return
        proof = prove(
            self.problem,
            replace(self.schedule, pairs=frozenset()),
            self.makespan,
            time.monotonic() + limit_s,
            self.settings.seed,
        )
        if proof.schedule is not None:
            self.offer(proof.schedule)
        self.least = max(self.least, min(proof.lower_bound, self.makespan))
