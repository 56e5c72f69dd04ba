"""The default planner: every schedule asked for, number of stages and number of micro-batches, cut exactly, simulated in full.

Most are never simulated: a way whose lower bound is above the best time found cannot win. Those with the best estimates come
first, so that the bound is sharp from the start, and a search that is stopped has seen the promising ones.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import cast

from penstock.errors import PlanError, ScheduleError
from penstock.plan import Candidate, Option, Plan, Prediction, Recompute
from penstock.schedule.catalogue import schedule
from penstock.schedule.op import Schedule
from penstock.search.catalogue import register
from penstock.search.request import PlanRequest
from penstock.search.ways import Balance, Way, cut, least_s, ways
from penstock.search.why import bound_by
from penstock.simulate.costs import Costs
from penstock.simulate.plan_costs import place_costs, slice_costs
from penstock.simulate.simulate import RECOMPUTE, peak_memory
from penstock.simulate.steady import steady
from penstock.units import format_bytes
from penstock.weights.catalogue import WeightRule
from penstock.weights.choice import rule_of

#: Times this close, relatively, count as equal: then memory decides, then the number of micro-batches.
CLOSE = 1e-3

#: Rows of the table that explains the plan, and how many of them may be ways that do not fit.
ROWS, MISFITS = 12, 4


@register("auto", source="Penstock: enumeration with lower bounds, exact cuts, full simulation")
def auto(request: PlanRequest) -> Plan:
    """The fastest plan that fits; of those within 0.1 % of it a synchronous one, then the leanest, then the one with the fewest
    micro-batches.

    Every way is cut by `bottleneck` at its micro-batch size, over the slowest link that it uses. Only if nothing fits that is
    cut for time, everything is tried again cut for memory.

    Raises:
        PlanError: nothing fits, and the message says what the nearest ways need; or no schedule takes these numbers.
    """
    deadline = time.monotonic() + request.budget_s
    balances: tuple[Balance, ...] = ("time", "memory")
    misfits: list[_Found] = []
    refusals: dict[str, None] = {}
    for balance in balances:
        search = _Search(request, balance)
        for way in ways(request):
            if search.fits and time.monotonic() >= deadline:
                break
            search.weigh(way)
        if search.fits:
            search.see_off()
            return search.plan()
        misfits += search.misfits
        refusals |= search.refusals
    raise _nothing(request, misfits, list(refusals))


def _kind(name: str, stages: int) -> tuple[str, int]:
    """What the table has one row of. In one stage all schedules are the same."""
    return name if stages > 1 else "", stages


@dataclass(frozen=True)
class _Laid:
    """A way with its schedule, weight rule and cut. No step of it is shorter than `bound_s`."""

    made: Schedule
    rule: WeightRule
    lengths: tuple[int, ...]
    costs: Costs
    bound_s: float


@dataclass(frozen=True)
class _Found:
    """A way with its memory and time. `lack` is empty if it fits; `excess` is needs / has on its fullest rank."""

    laid: _Laid
    recompute: Recompute
    memory: tuple[int, ...]
    excess: float
    lack: str
    step_s: float = 0.0
    bubble_ratio: float = 0.0
    why: str = ""

    @property
    def candidate(self) -> Candidate:
        """What the plan tells of it."""
        made = self.laid.made
        return Candidate(made.name, made.stages, made.micro_batches, self.recompute, self.laid.lengths, self.step_s,
                         max(self.memory), self.lack or self.why, self.laid.rule.name)  # fmt: skip

    @property
    def kind(self) -> tuple[str, int]:
        """What the table has one row of."""
        return _kind(self.laid.made.name, self.laid.made.stages)

    @property
    def preference(self) -> tuple[bool, int, int, int, float, str, str]:
        """Smallest first, among those whose times count as equal."""
        made = self.laid.made
        return not made.synchronous, max(self.memory), made.micro_batches, made.stages, self.step_s, made.name, self.recompute

    def simulated(self) -> _Found:
        """The same with its time."""
        found = steady(self.laid.made, self.laid.costs, self.recompute)
        why = bound_by(found.timeline, found.batches * found.seconds_per_batch)
        return replace(self, step_s=found.seconds_per_batch, bubble_ratio=found.bubble_ratio, why=why)


class _Search:
    """One enumeration: what it has found, and what it need not work out twice."""

    def __init__(self, request: PlanRequest, balance: Balance) -> None:
        self.request, self.balance = request, balance
        self.fits: list[_Found] = []
        self.misfits: list[_Found] = []
        self.refusals: dict[str, None] = {}
        self._skipped: dict[tuple[str, int], list[Way]] = {}
        self._cuts: dict[tuple[int, int], tuple[tuple[int, ...], Costs]] = {}
        self._best_s = float("inf")

    @property
    def _reach(self) -> float:
        """Seconds above which a way cannot win any more, not even by its memory."""
        return self._best_s * (1 + CLOSE)

    def weigh(self, way: Way) -> None:
        """Simulate `way` if it can be made, may win, and fits."""
        if way.bound_s > self._reach:
            self._skipped.setdefault(_kind(way.schedule, way.stages), []).append(way)
            return
        laid = self._lay_out(way)
        if laid is None:
            return
        if laid.bound_s > self._reach:
            self._skipped.setdefault(_kind(way.schedule, way.stages), []).append(way)
            return
        self._run(laid)

    def see_off(self) -> None:
        """Simulate, of the kinds that were skipped, the way that came nearest, so that the table says by how much it loses.

        Only of the kinds with the best estimates, as many as the table has rows: it is one more simulation for each.
        """
        for kind, skipped in sorted(self._skipped.items(), key=lambda item: min(way.estimate_s for way in item[1]))[:ROWS]:
            laid = [each for each in map(self._lay_out, skipped) if each is not None]
            nearest = min(laid, key=lambda each: each.bound_s, default=None)
            best = min((found.step_s for found in self.fits if found.kind == kind), default=float("inf"))
            if nearest is not None and nearest.bound_s < best:
                self._run(nearest)

    def _lay_out(self, way: Way) -> _Laid | None:
        """The schedule and its cut, if this cluster has the ranks for it."""
        cluster, numbers = self.request.cluster, (way.stages, way.micro_batches)
        try:
            made = schedule(way.schedule, *numbers)
            rule = rule_of(made, self.request.weights, dict(self.request.weights_options))
        except ScheduleError as error:
            self.refusals[str(error)] = None
            return None
        if made.ranks == 1 < made.stages:
            self.refusals[f"{made.name} puts all {made.stages} stages on one rank, where one stage would do the same"] = None
            return None
        if self.request.schedules is None and max(map(len, made.ranks_of_stage)) > 1:
            # What copies take to add up their gradients is known from the link alone: on hosts that move such messages through
            # fresh memory it came out several times too small (U of 100 MB of gradients: 40 ms predicted, 150 ms measured).
            self.refusals[f"{made.name} has copies of stages: it is weighed when it is asked for by name"] = None
            return None
        if made.ranks > cluster.ranks:
            self.refusals[
                f"{made.name} in {made.stages} stages needs {made.ranks} ranks, {cluster.name} has {cluster.ranks}"
            ] = None
            return None
        if numbers not in self._cuts:
            self._cuts[numbers] = cut(self.request, *numbers, self.balance)
        lengths, costs = self._cuts[numbers]
        return _Laid(made, rule, lengths, costs, least_s(made, costs))

    def _run(self, laid: _Laid) -> None:
        """Find out whether it fits, with as little recomputing as will do, and how long it takes."""
        try:
            costs = place_costs(laid.costs, laid.made, self.request.cluster, laid.rule)
        except ScheduleError as error:  # a weight rule that cannot say what some micro-batch reads
            self.refusals[str(error)] = None
            return
        if laid.made.slicing is not None:
            micro_batch = self.request.batch / laid.made.micro_batches
            costs = slice_costs(costs, self.request.profile, laid.lengths, micro_batch, laid.made.slicing)
        laid = replace(laid, costs=costs)
        tried = RECOMPUTE if self.request.recompute == "auto" else (self.request.recompute,)
        for recompute in cast("tuple[Recompute, ...]", tried):
            memory = peak_memory(laid.made, laid.costs, recompute) or ()
            found = _Found(laid, recompute, memory, *self._lack(memory))
            if not found.lack:
                self.fits.append(found.simulated())
                self._best_s = min(self._best_s, self.fits[-1].step_s)
                return
            self.misfits.append(found)

    def _lack(self, memory: tuple[int, ...]) -> tuple[float, str]:
        """What the fullest rank needs / has, and in words what it lacks, if it does."""
        has = [self.request.memory_bytes(rank) for rank in range(len(memory))]
        rank = max(range(len(memory)), key=lambda r: memory[r] / has[r])
        excess = memory[rank] / has[rank]
        words = f"needs {format_bytes(memory[rank])}, has {format_bytes(has[rank])} on rank {rank}"
        return excess, words if excess > 1 else ""

    def plan(self) -> Plan:
        """The best that was found, with what it was weighed against."""
        request = self.request
        chosen = min((found for found in self.fits if found.step_s <= self._reach), key=lambda found: found.preference)
        nearest = _first_of_kind(sorted(self.misfits, key=lambda found: (found.laid.bound_s, found.preference)))[:MISFITS]
        # What does not fit is told where it would have been faster: that is what more memory would buy.
        faster = [found for found in (found.simulated() for found in nearest) if found.step_s < chosen.step_s]
        others = _first_of_kind([chosen, *sorted(self.fits, key=lambda found: (found.step_s, found.preference))])
        rows = [*others[: ROWS - len(faster)], *sorted(faster, key=lambda found: found.step_s)]
        made = chosen.laid.made
        return Plan(
            fingerprint=request.profile.fingerprint,
            layer_names=tuple(layer.name for layer in request.profile),
            lengths=chosen.laid.lengths,
            schedule_name=made.name,
            schedule_options=cast("tuple[tuple[str, Option], ...]", made.options),
            synchronous=made.synchronous,
            programs=made.lines,
            slicing=made.slicing,
            stream=made.stream,
            micro_batches=made.micro_batches,
            batch=request.batch,
            recompute=chosen.recompute,
            weights=chosen.laid.rule.name,
            weights_options=request.weights_options,
            cluster=request.cluster.name,
            cluster_ranks=request.cluster.ranks,
            predicted=Prediction(chosen.step_s, chosen.bubble_ratio, chosen.memory,
                                 request.batch / chosen.step_s if chosen.step_s else 0.0,
                                 _one_device_s(request)),
            candidates=tuple(found.candidate for found in rows),
        )  # fmt: skip


def _one_device_s(request: PlanRequest) -> float:
    """A step of plain training on one device: the whole batch at once, and an update."""
    parameter_bytes = sum(layer.parameter_bytes for layer in request.profile)
    return sum(request.profile.step_seconds(request.batch)) + parameter_bytes * request.profile.update_s_per_byte


def _first_of_kind(found: Iterable[_Found]) -> list[_Found]:
    """The first for every schedule and number of stages: ten more numbers of micro-batches would explain nothing."""
    kinds: dict[tuple[str, int], _Found] = {}
    for each in found:
        kinds.setdefault(each.kind, each)
    return list(kinds.values())


def _nothing(request: PlanRequest, misfits: list[_Found], refusals: list[str]) -> PlanError:
    if not misfits:
        return PlanError("\n  ".join(["no schedule can be made for these numbers", *refusals[:ROWS]]))
    nearest = _first_of_kind(sorted(misfits, key=lambda found: (found.excess, found.preference)))
    lines = [f"nothing fits the memory of {request.cluster.name} at batch {request.batch}; nearest first"]
    lines += [
        f"{row.schedule}, {row.stages} stages of {', '.join(map(str, row.lengths))} layers, "
        f"{row.micro_batches} micro-batches, recompute {row.recompute}: {row.why}"
        for row in (found.candidate for found in nearest[:MISFITS])
    ]
    free = request.recompute == "auto" and request.stages is None and request.micro_batches is None
    advice = "Use more ranks, or ranks with more memory, or a smaller batch"
    lines.append(advice + ("" if free else ", or leave recompute, stages and micro_batches to the planner"))
    return PlanError("\n  ".join(lines))
