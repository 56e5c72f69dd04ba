"""What a search has found, what it may still look at, and what it need not."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from penstock.errors import PlanError, ScheduleError, SettingError
from penstock.schedule.op import Kind, Schedule
from penstock.search.cuts import Balance, cut
from penstock.search.laid import CLOSE, Laid, Scored, lay_out, made_of, pilot
from penstock.search.proposal import Proposal
from penstock.search.request import PlanRequest
from penstock.search.shapes import Shape
from penstock.search.ways import Way, least_s
from penstock.search.weigh import weigh

#: The budget that numbers of ops are for.
USUAL_BUDGET_S = 10.0

#: What one more way takes besides its ops, in ops.
OVERHEAD = 8000

#: A way this near to the best is cut again for its ranks, where they have several stages each and
#: are not more than these.
NEAR, FEW_RANKS = 1.1, 32


class Hunt:
    """Ways that were weighed for one request, until the time or the work allowed is spent.

    Work is counted in ops, not in seconds, so that a search which ends by it finds the same on
    every machine.
    """

    def __init__(self, request: PlanRequest, most_work: float = math.inf) -> None:
        self.request = request
        self.fits: list[Scored] = []
        self.near: list[Scored] = []  # pilots: one pipeline that stands for several
        self.misfits: list[Scored] = []
        self.refusals: dict[str, None] = {}
        self.tried: set[tuple[Way, Balance]] = set()
        self.best_s = math.inf
        self.work = 0.0
        self.weighed = 0
        self._most_work = most_work
        self._start = time.monotonic()
        self._until = self._start + request.budget_s
        self._placed: dict[tuple[int, ...], PlanRequest] = {}
        self._cuts: dict[object, tuple[int, ...] | None] = {}

    @property
    def reach(self) -> float:
        """Seconds above which a way cannot win any more, not even by its memory."""
        return self.best_s * (1 + CLOSE)

    @property
    def over(self) -> bool:
        """Whether to stop: something fits, and the time or the work allowed is spent."""
        return bool(self.fits) and (self.work >= self._most_work or time.monotonic() >= self._until)

    def allow(self, more: float, share: float = 1.0) -> None:
        """So many ops more from here on, and with a longer budget than usual more of them; until
        this share of the time is spent.
        """
        self._most_work = self.work + more * max(1.0, self.request.budget_s / USUAL_BUDGET_S)
        self._until = self._start + share * self.request.budget_s

    def left_s(self) -> float:
        """Seconds until the budget is spent."""
        return max(0.0, self._start + self.request.budget_s - time.monotonic())

    def weigh_way(self, way: Way, balance: Balance = "time", force: bool = False) -> Scored | None:
        """Simulate `way` if it can be made, may win, and fits; `force`: also if it cannot win."""
        self.tried.add((way, balance))
        if way.bound_s > self.reach and not force:
            return None
        each = -(-way.micro_batches // way.shape.pipelines)
        try:
            made = made_of(way.schedule, way.stages, each, way.options)
        except ScheduleError as error:
            self.refuse(str(error))
            return None
        if made.synchronous and made.ranks != way.shape.ranks:
            if made.ranks > self.request.cluster.ranks:
                self.refuse(
                    f"{made.name} in {made.stages} stages needs {made.ranks} ranks, {self.request.cluster.name} has "
                    f"{self.request.cluster.ranks}"
                )
            return None
        copies = way.shape.pipelines * max(
            map(len, made.ranks_of_stage)
        )  # Chimera's two directions are copies as well
        if copies > self.request.copies_allowed and self.request.schedules is None:
            return None
        devices = (
            way.shape.devices if made.ranks <= len(way.shape.devices) else tuple(range(made.ranks))
        )
        if devices == tuple(range(len(devices))):
            devices = ()
        lengths = self._cut(way, made, balance)
        if lengths is None:
            return None
        proposal = Proposal(
            lengths, way.schedule, way.micro_batches, way.all_options, devices=devices
        )
        found = self.weigh(proposal, force)
        lacks = (
            bool(self.misfits) and self.misfits[-1].laid.proposal == proposal
        )  # even so, or without recomputing
        if balance == "time" and lacks:
            lengths = self._cut(way, made, "limits")
            if lengths is not None and lengths != proposal.lengths:
                found = self.weigh(replace(proposal, lengths=lengths), force)
        several = (
            way.stages > way.shape.ranks and balance == "time" and way.shape.ranks <= FEW_RANKS
        )
        if several and found is not None and found.step_s <= self.best_s * NEAR:
            lengths = self._cut(way, made, "ranks")
            if lengths is not None and lengths != found.laid.proposal.lengths:
                found = self.weigh(replace(proposal, lengths=lengths), force) or found
        return found

    def weigh(self, proposal: Proposal, force: bool = False) -> Scored | None:
        """Simulate a proposal if it can be made, may win, and fits; of several pipelines one first,
        and all if that may win.
        """
        try:
            first = pilot(self.request, proposal)
            if first is not None:
                found = self._simulated(first, force)
                if found is None or (found.step_s > self.reach and not force):
                    return None
            found = self._simulated(lay_out(self.request, proposal), force)
        except (ScheduleError, PlanError, SettingError) as error:
            self.refuse(str(error))
            return None
        if found is not None:
            self.fits.append(found)
            self.best_s = min(self.best_s, found.step_s)
        return found

    def _simulated(self, laid: Laid, force: bool) -> Scored | None:
        self.work += OVERHEAD + sum(map(len, laid.made.programs))
        if not force and least_s(laid.made, laid.costs) > self.reach:
            return None
        self.weighed += 1
        every = weigh(laid, math.inf if force or not self.fits else self.reach)
        self.misfits += [each for each in every if each.lack]
        if every[-1].lack:
            return None
        self.near += [every[-1]] if laid.pipelines > 1 else []
        return every[-1]

    def refuse(self, why: str) -> None:
        """Remember why something cannot be made."""
        self.refusals[why] = None

    def _cut(self, way: Way, made: Schedule, balance: Balance) -> tuple[int, ...] | None:
        """The cut, worked out once for all ways that stand on such devices with such numbers."""
        shape = way.shape
        places = tuple(ranks[0] for ranks in made.ranks_of_stage)
        places = tuple(
            place if place < shape.ranks else stage % shape.ranks
            for stage, place in enumerate(places)
        )
        in_flight = in_flight_of(made) if balance == "limits" else ()
        key = self._kind_of(shape), places, way.micro_batches, balance, in_flight
        if key not in self._cuts:
            own = self._placed.setdefault(shape.first, self.request.on(shape.first))
            self._cuts[key] = cut(own, places, way.micro_batches, balance, in_flight)
        return self._cuts[key]

    def _kind_of(self, shape: Shape) -> object:
        """Equal for shapes whose pipelines are cut alike."""
        cluster = self.request.cluster
        profiles = tuple(id(self.request.profile_of(rank)) for rank in shape.first)
        links = tuple(id(cluster.link(a, b)) for a, b in pairwise(shape.first))
        return profiles, links


def in_flight_of(made: Schedule) -> tuple[float, ...]:
    """Per stage, the most micro-batches that a rank has run forward and not yet backward."""
    most = [0.0] * made.stages
    for program in made.programs:
        held = dict.fromkeys(range(made.stages), 0.0)
        for op in program:
            if op.kind is Kind.F:
                held[op.stage] += made.shares[op.micro_batch]
                most[op.stage] = max(most[op.stage], held[op.stage])
            elif op.kind in (Kind.B, Kind.W):
                held[op.stage] -= made.shares[op.micro_batch]
    return tuple(most)


def spread_of(found: Sequence[Scored], count: int) -> list[Scored]:
    """The fastest `count`, each of another schedule, number of stages or of copies."""
    kinds: dict[object, Scored] = {}
    for each in sorted(found, key=lambda each: (each.step_s, each.preference)):
        kinds.setdefault(each.kind, each)
    return list(kinds.values())[:count]
