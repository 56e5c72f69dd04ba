"""The shortest program for given costs: bounds, the zoo, the search, and if asked for the proof."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace
from itertools import islice

from penstock.errors import ScheduleError
from penstock.schedule.op import Kind, Schedule
from penstock.search.synthesis.bound import lower_bound
from penstock.search.synthesis.problem import (
    PLACEMENTS,
    Limit,
    Problem,
    Room,
    StageCosts,
    problem_for,
)
from penstock.search.synthesis.updates import with_early_updates
from penstock.search.synthesis.zoo import candidates
from penstock.simulate.costs import Costs
from penstock.simulate.simulate import simulate_schedule

#: A schedule that is longer than the bound by no more than this part of it is proved: seconds that
#: are no whole ticks, and sums
#: of floats, leave so much open.
PROVED = 1e-6
#: The part of the budget for the search when the rest is for the proof.
BEFORE_PROOF = 0.3

#: What the search makes programs of.
_WORDS = frozenset({Kind.F, Kind.B, Kind.I, Kind.W, Kind.U})


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How to search; see `synthesised` for what each means."""

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
                f"synthesised knows no placement {self.placement!r}: take one of {', '.join(PLACEMENTS)}, any"
            )

    def room(self, placement: str) -> Room:
        """Where the programs may stand."""
        return Room(placement, self.memory_limit, self.ranks, self.split)


@dataclass(frozen=True)
class Synthesis:
    """What the search found.

    Attributes:
        schedule: the shortest schedule found.
        makespan: its simulated seconds.
        lower_bound: seconds that no schedule with this placement and limit undercuts.
        gap: makespan / lower_bound - 1.
        proved: whether the schedule is as short as any, to a part in a million.
        placement: where its stages stand; tells which, where any was asked for.
        zoo: the best schedule of the zoo that fits, by name; None if none does.
        zoo_makespan: its simulated seconds; None if there is none.
        rounds: rounds of search.
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

    def facts(self) -> tuple[tuple[str, object], ...]:
        """What the schedule carries in its `options`."""
        names = ("placement", "makespan", "lower_bound", "gap", "proved", "zoo", "zoo_makespan")
        return tuple((name, getattr(self, name)) for name in names)


def synthesise(costs: Costs, micro_batches: int, settings: Settings | None = None) -> Synthesis:
    """Search for the shortest schedule; `synthesised` says how, and what the settings mean.

    Args:
        costs: with an entry for every stage in `forward`.
        micro_batches: at least 1.
        settings: how to search.

    Raises:
        ScheduleError: nothing fits, or the placement cannot have so many stages, ranks and
        micro-batches. SettingError: the costs do not fit together, or a limit is a text that is no
        amount of bytes. MissingExtra: `exact` without OR-Tools.
    """
    wish = settings or Settings()
    begun = time.monotonic()
    if wish.exact:
        from penstock.search.synthesis.exact import load

        load()
    if not isinstance(costs.forward, tuple):
        raise ScheduleError(
            "the costs do not tell the number of stages: give forward as one number per stage"
        )
    table = StageCosts.of(costs, len(costs.forward))
    if wish.budget_s and wish.max_rounds != 0:
        _compile()
    end_s = max(begun + wish.budget_s, time.monotonic() + wish.budget_s / 4)
    tasks = [_Task(problem, costs, wish) for problem in _problems(table, micro_batches, wish)]
    # Placements share what is left of the budget, the most promising first; what cannot win any
    # more gets nothing.
    for i, task in enumerate(sorted(tasks, key=lambda task: task.least)):
        if i and task.least >= min(other.makespan for other in tasks):
            continue
        left = max(0.0, end_s - time.monotonic()) / (len(tasks) - i)
        end = time.monotonic() + left
        task.run(end - (1 - BEFORE_PROOF) * left * wish.exact)
        if wish.exact and not task.proved:
            task.prove(end)
    best = min(tasks, key=lambda task: task.makespan)
    least = min(
        best.makespan, *(task.least for task in tasks)
    )  # sums of floats may pass each other
    gap = best.makespan / least - 1 if least else 0.0
    found = Synthesis(
        best.schedule,
        best.makespan,
        least,
        gap,
        best.makespan <= least * (1 + PROVED),
        best.problem.placement,
        best.zoo,
        best.zoo_makespan if best.zoo else None,
        sum(task.rounds for task in tasks),
    )
    return replace(
        found, schedule=replace(found.schedule, name="synthesised", options=found.facts())
    )


def _compile() -> None:
    """Let the search's loops be compiled, which takes some seconds once on a machine, by a small
    search that has to try them all.
    """
    costs = Costs(
        forward=[1, 1.2, 1, 0.8],
        input_grad=[1, 1.3, 1, 0.9],
        weight_grad=[0.8, 1, 0.7, 0.6],
        transfer=0.5,
    )
    wish = Settings(memory_limit=4, max_rounds=2)
    _Task(problem_for(StageCosts.of(costs, 4), 8, wish.room("linear")), costs, wish).run(math.inf)


def _problems(costs: StageCosts, micro_batches: int, wish: Settings) -> list[Problem]:
    """The problem of the placement, or of all that can have so many stages and that the limit
    allows.
    """
    if wish.placement != "any":
        return [problem_for(costs, micro_batches, wish.room(wish.placement))]
    problems, reasons = [], []
    for placement in PLACEMENTS:
        try:
            problems.append(problem_for(costs, micro_batches, wish.room(placement)))
        except ScheduleError as error:
            reasons.append(error)
    if not problems:
        raise ScheduleError("no placement will do:\n  " + "\n  ".join(map(str, reasons)))
    return problems


class _Task:
    """One placement: the best of its zoo, and the search from there."""

    def __init__(self, problem: Problem, costs: Costs, wish: Settings) -> None:
        self.problem, self.costs, self.wish = problem, costs, wish
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
        self._bound_it()

    @property
    def proved(self) -> bool:
        """Whether nothing shorter is left to find."""
        return self.makespan <= self.least * (1 + PROVED)

    def seconds(self, schedule: Schedule) -> float:
        """Its simulated makespan."""
        return simulate_schedule(schedule, self.costs).makespan

    def offer(self, schedule: Schedule) -> float:
        """Keep the schedule if it is the shortest so far. Returns its makespan."""
        seconds = self.seconds(schedule)
        if seconds < self.makespan or (
            seconds == self.makespan and len(schedule.ops) < len(self.schedule.ops)
        ):
            self.schedule, self.makespan = schedule, seconds
        return seconds

    def run(self, until_s: float) -> None:
        """From the zoo's."""
        from penstock.search.synthesis.local import POOL, Search

        search = Search(self.problem, self.least, self.wish.seed)
        for candidate in self.starts:
            search.start(candidate)
        search.run(until_s, self.wish.max_rounds)
        self.rounds = search.rounds
        several = any(self.problem.costs.update) and max(map(len, self.problem.held_on)) > 1
        for made in islice(search.schedules(), POOL if several else 1):
            self.offer(with_early_updates(made, self.seconds) if several else made)
        self._bound_it()

    def _plain(self) -> bool:
        """Whether the best is of what the search makes: each op on its own, every activation on its
        rank.
        """
        paired = bool(self.schedule.pairs) and self.costs.pair is not None
        return not paired and all(op.kind in _WORDS for op in self.schedule.ops)

    def _bound_it(self) -> None:
        """Make the bound one for the best, which may hand activations to other ranks, or have pairs
        that are cheap.
        """
        if not self._plain():
            pair = self.costs.spread("pair", self.problem.stages)
            costs = self.problem.costs if pair is None else self.problem.costs.with_pairs(pair)
            free = replace(self.problem, costs=costs, limits=(math.inf,) * self.problem.ranks)
            self.least = min(self.least, lower_bound(free))

    def prove(self, until_s: float) -> None:
        """By CP-SAT, from what the search found."""
        from penstock.search.synthesis.exact import prove

        if not self._plain():
            return
        proof = prove(
            self.problem,
            replace(self.schedule, pairs=frozenset()),
            self.makespan,
            until_s,
            self.wish.seed,
        )
        if proof.schedule is not None:
            self.offer(proof.schedule)
        self.least = max(self.least, min(proof.lower_bound, self.makespan))
