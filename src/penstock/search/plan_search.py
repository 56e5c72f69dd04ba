"""The state of a plan search: the candidates so far, the cutoff, and the budget."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from penstock.errors import PlanError, ScheduleError, SettingError
from penstock.schedule.op import ACTIVATION_MOVES, Schedule
from penstock.schedule.rules import ACTIVATION_CHANGE
from penstock.search.cuts import Balance, cut
from penstock.search.evaluate import evaluate
from penstock.search.instantiate import (
    CLOSE,
    Evaluated,
    PlacedSchedule,
    by_time,
    cached_schedule,
    first_of_kind,
    instantiate,
    representative_pipeline,
)
from penstock.search.proposal import Proposal
from penstock.search.request import PlanRequest
from penstock.search.schedule_bound import schedule_bound_s
from penstock.search.search_space import Configuration
from penstock.search.shapes import Shape
from penstock.synthesis.deadline import Deadline

#: The budget, in seconds, for which limits on work are stated. They are chosen such that one core
#: does that work in about half the time, so that the clock seldom ends a search.
USUAL_BUDGET_S = 10.0

#: Share of the time limit after which the clock stops the search; the rest is for the plan's table
#: and its suggestions.
SEARCH_SHARE = 0.85

#: While nothing fits, a step of the search may take this many times its work, and no budget is
#: smaller than the usual one: a plan that fits matters more than the fastest one.
UNFIT = 4

#: Layers times ranks from which a request is large: cuts and bounds, which are no simulated ops,
#: then take most of the time, and the work allowed shrinks in proportion, down to the share
#: LEAST_SHARE.
LARGE, LEAST_SHARE = 500, 0.05

#: Fixed cost of evaluating one configuration, expressed in ops.
OVERHEAD = 8000

#: A configuration with several stages per rank is cut again, to balance ranks, if it is within this
#: factor of the best and has at most this number of ranks.
NEAR, FEW_RANKS = 1.1, 32


class PlanSearch:
    """The candidates evaluated for one request, until the budget of work or time is spent.

    Work is counted in simulated ops instead of seconds, and follows from the request's budget, so
    that a search which ends by it gives the same result on every machine. The clock is a hard stop
    behind that.

    Attributes:
        request: the request.
        feasible: candidates that fit, simulated in full.
        representatives: single pipelines that fit and represent several.
        infeasible: candidates that do not fit.
        rejected: why proposals could not be made; a set in order.
        tried: configurations that were looked at, with the balance of their cut.
        best_s: seconds per step of the fastest candidate; infinite before the first.
        work: simulated ops so far.
        evaluated: number of evaluations so far.
        deadline: the hard stop.
        stopped_by: "", or "work" or "time" if that ended a step of the search before its end.
    """

    def __init__(self, request: PlanRequest, most_work: float = math.inf) -> None:
        self.request = request
        self.feasible: list[Evaluated] = []
        self.representatives: list[Evaluated] = []
        self.infeasible: list[Evaluated] = []
        self.rejected: dict[str, None] = {}
        self.tried: set[tuple[Configuration, Balance]] = set()
        self.best_s = math.inf
        self.work = 0.0
        self.evaluated = 0
        limit = request.deadline or Deadline()
        self.deadline = limit.part(SEARCH_SHARE * limit.budget_s)
        self.stopped_by = ""
        self._most_work = most_work
        self._most_work_unfit = math.inf
        self._local_requests: dict[tuple[tuple[int, ...], tuple[int, ...]], PlanRequest] = {}
        self._cuts: dict[object, tuple[int, ...] | None] = {}

    @property
    def cutoff_s(self) -> float:
        """Pruning cutoff in seconds: a candidate whose lower bound exceeds it cannot beat the best,
        not even by needing less memory.
        """
        return self.best_s * (1 + CLOSE)

    @property
    def is_over(self) -> bool:
        """Whether to stop: the budget of work or time is spent. While nothing fits, it is larger,
        see `UNFIT`.
        """
        if self.deadline.is_over():
            self.stopped_by = "time"
            return True
        if self.work >= (self._most_work if self.feasible else self._most_work_unfit):
            self.stopped_by = self.stopped_by or "work"
            return True
        return False

    @property
    def may_explain(self) -> bool:
        """Whether to simulate what only explains the plan: rows of its table, and suggestions."""
        return self.request.budget_s > 0 and not self.deadline.is_over()

    def allow(self, work: float) -> None:
        """Set the budget of work to `work` ops from now, in proportion to the request's budget, and
        less for large requests.
        """
        share = self.request.budget_s / USUAL_BUDGET_S
        size = len(self.request.profile) * self.request.cluster.ranks
        work *= min(1.0, max(LEAST_SHARE, LARGE / size))
        self._most_work = self.work + work * share
        self._most_work_unfit = self.work + UNFIT * work * max(1.0, share)

    @property
    def note(self) -> str:
        """What the plan says about a search that was cut short; empty if it was not."""
        budget = f"{self.request.budget_s:g} s"
        if self.stopped_by == "time":
            return (
                f"search cut short by the clock after {self.deadline.spent_s:.1f} s and "
                f"{self.evaluated:,} evaluations: another run may find another plan; allow more "
                "than this time_limit_s"
            )
        if self.stopped_by == "work":
            return (
                f"search cut short after {self.evaluated:,} evaluations, which is the work of "
                f"budget_s={budget}: a larger budget may find a faster plan"
            )
        return ""

    def reject(self, reason: str) -> None:
        """Record why a proposal cannot be made."""
        self.rejected[reason] = None

    def evaluate_configuration(
        self, configuration: Configuration, balance: Balance = "time", force: bool = False
    ) -> Evaluated | None:
        """Cut and evaluate a configuration if it can be made, may win, and fits.

        A cut for time that does not fit is replaced by one within the limits of memory. A
        configuration with several stages per rank that is near the best is cut again to balance
        ranks. `force` evaluates it even if it cannot win.
        """
        self.tried.add((configuration, balance))
        if configuration.bound_s > self.cutoff_s and not force:
            return None
        schedule = self.schedule_of(configuration)
        if schedule is None:
            return None
        lengths = self.lengths_of(configuration, schedule, balance)
        if lengths is None:
            return None
        proposal = self.proposal_of(configuration, schedule, lengths)
        candidate = self.evaluate(proposal, force)
        # True even if another variant fits: for example with recompute.
        exceeded = bool(self.infeasible) and self.infeasible[-1].placed.proposal == proposal
        if balance == "time" and exceeded:
            lengths = self.lengths_of(configuration, schedule, "limits")
            if lengths is not None and lengths != proposal.lengths:
                candidate = self.evaluate(replace(proposal, lengths=lengths), force)
        if balance == "time" and candidate is not None and self._is_near(configuration, candidate):
            lengths = self.lengths_of(configuration, schedule, "ranks")
            if lengths is not None and lengths != candidate.placed.proposal.lengths:
                candidate = self.evaluate(replace(proposal, lengths=lengths), force) or candidate
        return candidate

    def proposal_of(
        self, configuration: Configuration, schedule: Schedule, lengths: tuple[int, ...]
    ) -> Proposal:
        """Return the proposal of a configuration with one cut.

        Args:
            configuration: the configuration.
            schedule: the schedule of one of its pipelines.
            lengths: number of layers in every stage.
        """
        return Proposal(
            lengths,
            configuration.schedule,
            configuration.micro_batches,
            configuration.all_options,
            devices=_devices_of(configuration, schedule),
        )

    def _is_near(self, configuration: Configuration, candidate: Evaluated) -> bool:
        """Return whether a candidate has several stages per rank on few ranks and is near the best
        time.
        """
        ranks = configuration.shape.ranks
        several = ranks < configuration.stages and ranks <= FEW_RANKS
        return several and candidate.step_s <= self.best_s * NEAR

    def schedule_of(self, configuration: Configuration) -> Schedule | None:
        """Return the schedule of one pipeline of a configuration; None, and in part a recorded
        reason, if it cannot be made or does not match the shape.
        """
        shape = configuration.shape
        micro_batches = -(-configuration.micro_batches // shape.pipelines)
        try:
            schedule = cached_schedule(
                configuration.schedule, configuration.stages, micro_batches, configuration.options
            )
        except ScheduleError as error:
            self.reject(str(error))
            return None
        # HetPipe has several workers: an asynchronous schedule may have more ranks than its shape.
        if schedule.ranks > self.request.cluster.ranks:
            self.reject(
                f"{schedule.name} in {schedule.stages} stages needs {schedule.ranks} ranks, "
                f"{self.request.cluster.name} has {self.request.cluster.ranks}"
            )
            return None
        if schedule.synchronous and schedule.ranks != shape.ranks:
            return None
        # The two directions of Chimera are replicas as well.
        replicas = shape.pipelines * schedule.copies
        if replicas > self.request.copies_allowed and self.request.schedules is None:
            return None
        return schedule

    def evaluate(self, proposal: Proposal, force: bool = False) -> Evaluated | None:
        """Evaluate a proposal if it can be made, may win, and fits.

        Of several equal pipelines first one is simulated, and all only if that may win. `force`
        simulates it even if it cannot win.
        """
        try:
            representative = representative_pipeline(self.request, proposal)
            if representative is not None:
                candidate = self._simulate(representative, force)
                # All pipelines together take at least as long as the first one alone.
                if candidate is None or (candidate.step_s > self.cutoff_s and not force):
                    return None
            candidate = self._simulate(instantiate(self.request, proposal), force)
        except (ScheduleError, PlanError, SettingError) as error:
            # What cannot be placed or simulated is left out of the candidates, and its reason is
            # reported.
            self.reject(str(error))
            return None
        if candidate is not None:
            self.feasible.append(candidate)
            self.best_s = min(self.best_s, candidate.step_s)
        return candidate

    def _simulate(self, placed: PlacedSchedule, force: bool) -> Evaluated | None:
        """Return the variant of a placed schedule that fits, unless its lower bound exceeds the
        cutoff; record the variants that do not fit.
        """
        self.work += OVERHEAD + sum(map(len, placed.schedule.programs))
        if not force and schedule_bound_s(placed.schedule, placed.costs) > self.cutoff_s:
            return None
        self.evaluated += 1
        variants = evaluate(placed, math.inf if force or not self.feasible else self.cutoff_s)
        self.infeasible += [variant for variant in variants if variant.memory_shortfall]
        # The last variant is the one that fits, if any does: see `evaluate`.
        candidate = variants[-1]
        if candidate.memory_shortfall:
            return None
        if placed.pipelines > 1:
            self.representatives.append(candidate)
        return candidate

    def lengths_of(
        self, configuration: Configuration, schedule: Schedule, balance: Balance
    ) -> tuple[int, ...] | None:
        """Return the lengths of the stages, or None if no cut fits; cached for all configurations
        with the same numbers on such devices.
        """
        shape, micro_batches = configuration.shape, configuration.micro_batches
        first_ranks = [ranks[0] for ranks in schedule.ranks_of_stage]
        places = tuple(
            rank if rank < shape.ranks else stage % shape.ranks
            for stage, rank in enumerate(first_ranks)
        )
        in_flight = max_in_flight(schedule) if balance == "limits" else ()
        key = self._devices_key(shape), places, micro_batches, balance, in_flight
        if key not in self._cuts:
            local = shape.first, shape.devices
            if local not in self._local_requests:
                self._local_requests[local] = self.request.busy_on(*local)
            request = self._local_requests[local]
            self._cuts[key] = cut(request, places, micro_batches, balance, in_flight)
        return self._cuts[key]

    def _devices_key(self, shape: Shape) -> object:
        """Return a key that is equal for shapes whose pipelines are cut alike: the profiles, their
        slowdowns and the links along the first.
        """
        cluster = self.request.cluster
        # By identity, which is fast; the request keeps all of them alive during the search.
        profiles = tuple(id(self.request.profile_of(rank)) for rank in shape.first)
        slowdowns = tuple(cluster.slowdown(rank, shape.devices) for rank in shape.first)
        links = tuple(id(cluster.link(a, b)) for a, b in pairwise(shape.first))
        return profiles, slowdowns, links


def _devices_of(configuration: Configuration, schedule: Schedule) -> tuple[int, ...]:
    """Return the devices for a proposal; empty if rank r is on device r."""
    devices = configuration.shape.devices
    if schedule.ranks > len(devices):
        return ()
    return () if devices == tuple(range(len(devices))) else devices


def max_in_flight(schedule: Schedule) -> tuple[float, ...]:
    """Return per stage the maximum number of micro-batches in flight on one of its ranks.

    Evicted ones count as well, since another rank's memory holds them.
    """
    peak = [0.0] * schedule.stages
    for program in schedule.programs:
        in_flight = [0.0] * schedule.stages
        for op in program:
            change = ACTIVATION_CHANGE[op.kind]
            if change and op.kind not in ACTIVATION_MOVES:
                in_flight[op.stage] += change * schedule.shares[op.micro_batch]
                peak[op.stage] = max(peak[op.stage], in_flight[op.stage])
    return tuple(peak)


def fastest_of_kinds(candidates: Sequence[Evaluated], count: int) -> list[Evaluated]:
    """Return the fastest `count` candidates that all differ in their schedule, number of stages or
    of replicas.
    """
    return first_of_kind(sorted(candidates, key=by_time))[:count]
