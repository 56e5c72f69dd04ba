"""What a way to run would take: its schedule made, placed on its devices, and simulated; so that
"best" is one number.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, final

from penstock.errors import PlanError
from penstock.plan.plan import Candidate, Option, Recompute
from penstock.plan.segments import Selection
from penstock.schedule.op import Schedule
from penstock.search.proposal import Proposal
from penstock.search.request import PlanRequest
from penstock.search.schedules import MADE_TO_MEASURE, schedule
from penstock.search.why import bound_by
from penstock.simulate.costs import Costs
from penstock.simulate.plan_costs import meeting_seconds, schedule_costs, stage_costs
from penstock.simulate.selective import with_selection
from penstock.simulate.stage_seconds import parts_of
from penstock.simulate.steady import Steady, steady
from penstock.weights.catalogue import WeightRule
from penstock.weights.choice import rule_of

#: Times this close, relatively, count as equal: then memory decides, then the number of
#: micro-batches.
CLOSE = 1e-3

#: Peaks whose logarithms round to one multiple of this count as equal: a plan that is simpler is
#: worth that little memory.
LEAN = 0.02

#: Ways that are told when nothing fits.
MISFITS = 4


@final
@dataclass(frozen=True)
class Laid:
    """A proposal with its schedule, weight rule and costs. `request` is about the devices it stands
    on, in its order.

    `pipelines` is above 1 where `made` is one of so many pipelines, which stands for all.
    `selection` has the layers that run again if recompute is selective; the costs are then with
    them.
    """

    request: PlanRequest
    proposal: Proposal
    made: Schedule
    rule: WeightRule
    costs: Costs
    pipelines: int = 1
    selection: Selection | None = None

    def with_selection(self, selection: Selection | None) -> Laid:
        """The same with these layers run again; None changes nothing."""
        if selection is None:
            return self
        profiles = [self.request.profile_of(rank) for rank in range(self.made.ranks)]
        micro_batch = self.request.batch / self.proposal.micro_batches
        costs = with_selection(
            self.costs, self.made, profiles, self.proposal.lengths, micro_batch, selection
        )
        return replace(self, costs=costs, selection=selection)


@final
@dataclass(frozen=True)
class Scored:
    """A way with its memory and time. `lack` is empty if it fits; `excess` is needs / has on its
    fullest rank.
    """

    laid: Laid
    recompute: Recompute
    memory: tuple[int, ...]
    excess: float
    lack: str
    found: Steady | None = None

    @cached_property
    def why(self) -> str:
        """What bounds its time."""
        return (
            ""
            if self.found is None
            else bound_by(self.found.timeline, self.found.batches * self.found.seconds_per_batch)
        )

    @property
    def step_s(self) -> float:
        """Seconds of a step; 0 if it was not simulated."""
        return self.found.seconds_per_batch if self.found else 0.0

    @property
    def preference(self) -> tuple[bool, int, int, int, float, str, str]:
        """Smallest first, among those whose times count as equal."""
        made = self.laid.made
        lean = round(math.log(max(1, *self.memory)) / LEAN)
        return (
            not made.synchronous,
            lean,
            made.micro_batches,
            made.stages,
            self.step_s,
            made.name,
            self.recompute,
        )

    @property
    def kind(self) -> tuple[str, int, int | tuple[int, ...]]:
        """What a table has one row of. In one stage all schedules are the same."""
        return (
            self.laid.made.name if self.laid.made.stages > 1 else "",
            self.laid.made.stages,
            self.copies,
        )

    @property
    def copies(self) -> int | tuple[int, ...]:
        """Ranks that hold each stage: one number where it is the same for all."""
        counts = tuple(self.laid.pipelines * len(ranks) for ranks in self.laid.made.ranks_of_stage)
        return counts[0] if len(set(counts)) == 1 else counts

    @property
    def candidate(self) -> Candidate:
        """What the plan tells of it."""
        made, proposal = self.laid.made, self.laid.proposal
        return Candidate(
            made.name,
            made.stages,
            proposal.micro_batches,
            self.recompute,
            proposal.lengths,
            self.step_s,
            max(self.memory),
            self.lack or self.why,
            self.laid.rule.name,
            self.copies,
        )

    def simulated(self) -> Scored:
        """The same with its time."""
        return replace(self, found=steady(self.laid.made, self.laid.costs, self.recompute))


def lay_out(request: PlanRequest, proposal: Proposal) -> Laid:
    """The schedule that is proposed, and what its ops cost where they stand.

    Raises:
        ScheduleError: no such schedule can be made, or a weight rule does not go with it.
        PlanError: it has more ranks or micro-batches than there are, or puts all its stages on one
        rank.
    """
    if proposal.micro_batches > request.batch:
        raise PlanError(
            f"{proposal.micro_batches} micro-batches are more than the {request.batch} samples of the batch"
        )
    made = _made(request, proposal)
    if made.ranks == 1 < made.stages:
        raise PlanError(
            f"{made.name} puts all {made.stages} stages on one rank, where one stage would do the same"
        )
    if made.ranks > request.cluster.ranks:
        raise PlanError(
            f"{made.name} in {made.stages} stages needs {made.ranks} ranks, {request.cluster.name} has "
            f"{request.cluster.ranks}"
        )
    placed = request.on(proposal.devices) if proposal.devices else request
    if made.ranks > placed.cluster.ranks:
        raise PlanError(
            f"{made.name} needs {made.ranks} ranks, and {placed.cluster.ranks} devices are proposed for it"
        )
    check_single_copies(request, made, proposal.lengths)
    rule = rule_of(made, proposal.weights or request.weights, dict(request.weights_options))
    profiles = [placed.profile_of(rank) for rank in range(made.ranks)]
    costs = schedule_costs(made, profiles, proposal.lengths, placed.cluster, request.batch, rule)
    return Laid(placed, proposal, made, rule, costs)


def check_single_copies(request: PlanRequest, made: Schedule, lengths: Sequence[int]) -> None:
    """Refuse a schedule with copies of a stage that has a layer which cannot have copies.

    Raises:
        PlanError: it is so; the message names the layer and why.
    """
    if not request.single_copies:
        return
    for part, ranks in zip(parts_of(lengths), made.ranks_of_stage, strict=True):
        for layer in range(part.start, part.stop):
            if len(ranks) > 1 and layer in request.single_copies:
                raise PlanError(
                    f"{made.name} holds {len(ranks)} copies of the stage with layer {request.profile.layers[layer].name}, and copies of "
                    f"that layer would train to other numbers than one: {request.single_copies[layer]}. Ask for schedules with one copy "
                    "of each stage, such as schedules='1f1b' with max_replicas=1"
                )


def relaid(laid: Laid, request: PlanRequest) -> Laid:
    """The same schedule, cut and devices where the cluster or the profiles are others."""
    devices = laid.proposal.devices
    placed = request.on(devices) if devices else request
    profiles = [placed.profile_of(rank) for rank in range(laid.made.ranks)]
    costs = schedule_costs(
        laid.made, profiles, laid.proposal.lengths, placed.cluster, request.batch, laid.rule
    )
    return replace(laid, request=placed, costs=costs).with_selection(laid.selection)


@lru_cache(maxsize=8)
def made_of(
    name: str, stages: int, micro_batches: int, options: tuple[tuple[str, Option], ...]
) -> Schedule:
    """A schedule of the zoo; the last few are kept, for a search asks for one several times in a
    row.
    """
    own: dict[str, Any] = dict(options)
    return schedule(name, stages, micro_batches, **own)


def pilot(request: PlanRequest, proposal: Proposal) -> Laid | None:
    """The first of several pipelines, which all do the same: with what its stages take to meet
    their copies, it takes as long as all of them where all have such devices and links as it has,
    and never longer. None where the proposal has no such.

    Where the last micro-batch is not recomputed, it is taken for that of each pipeline, and is
    really that of one.

    Raises:
        ScheduleError, PlanError: as `lay_out`.
    """
    pipelines = proposal.replicas
    if (
        not isinstance(pipelines, int)
        or not 1 < pipelines <= proposal.micro_batches <= request.batch
    ):
        return None
    options = tuple((name, value) for name, value in proposal.options if name != "replicas")
    each = -(-proposal.micro_batches // pipelines)
    made = made_of(proposal.schedule, proposal.stages, each, options)
    if made.stream is not None or max(map(len, made.ranks_of_stage)) > 1:
        return None
    devices = proposal.devices or tuple(range(request.cluster.ranks))
    if pipelines * made.ranks > len(devices):
        raise PlanError(
            f"{made.name} needs {pipelines * made.ranks} ranks, and there are {len(devices)}"
        )
    placed = request.on(devices[: made.ranks])
    rule = rule_of(made, proposal.weights or request.weights, dict(request.weights_options))
    profiles = [placed.profile_of(rank) for rank in range(made.ranks)]
    batch = request.batch * each / proposal.micro_batches
    costs = schedule_costs(made, profiles, proposal.lengths, placed.cluster, batch, rule)
    gradients, update = (
        costs.spread(name, made.stages) or () for name in ("gradient_bytes", "update")
    )
    met = [
        own
        + meeting_seconds(
            devices[ranks[0] : pipelines * made.ranks : made.ranks], held, request.cluster
        )
        for own, held, ranks in zip(update, gradients, made.ranks_of_stage, strict=True)
    ]
    return Laid(placed, proposal, made, rule, replace(costs, update=met), pipelines)


def _made(request: PlanRequest, proposal: Proposal) -> Schedule:
    """The schedule; one that is made to measure gets the costs of the stages, stage s on rank s."""
    options: dict[str, Any] = dict(proposal.options)
    if not is_measured(proposal.schedule):
        return made_of(proposal.schedule, proposal.stages, proposal.micro_batches, proposal.options)
    placed = request.on(proposal.devices) if proposal.devices else request
    micro_batch = request.batch / proposal.micro_batches
    costs = stage_costs(
        placed.profile,
        proposal.lengths,
        micro_batch,
        placed.cluster,
        micro_batches=proposal.micro_batches,
    )
    return schedule(
        proposal.schedule, proposal.stages, proposal.micro_batches, costs=costs, **options
    )


def is_measured(name: str) -> bool:
    """Whether a schedule is made for given costs."""
    return name in MADE_TO_MEASURE.entries()


def best(fits: Iterable[Scored], most_s: float = math.inf) -> Scored:
    """The fastest; of those within 0.1 % of it a synchronous one, then the leanest (to about 2 %),
    then the one with the fewest micro-batches. None slower than `most_s` is taken for another's
    sake.
    """
    every = list(fits)
    fastest = min(each.step_s for each in every)
    reach = min(fastest * (1 + CLOSE), max(fastest, most_s))
    return min((each for each in every if each.step_s <= reach), key=lambda each: each.preference)


def first_of_kind(found: Iterable[Scored]) -> list[Scored]:
    """The first for every schedule, number of stages and of copies: ten more numbers of
    micro-batches would explain nothing.
    """
    kinds: dict[object, Scored] = {}
    for each in found:
        kinds.setdefault(each.kind, each)
    return list(kinds.values())


def nothing(request: PlanRequest, misfits: list[Scored], refusals: list[str]) -> PlanError:
    """What to say when nothing fits."""
    if not misfits:
        return PlanError("\n  ".join(["no schedule can be made for these numbers", *refusals[:12]]))
    nearest = first_of_kind(sorted(misfits, key=lambda found: (found.excess, found.preference)))
    lines = [
        f"nothing fits the memory of {request.cluster.name} at batch {request.batch}; nearest first"
    ]
    lines += [
        f"{row.schedule}, {row.stages} stages of {', '.join(map(str, row.lengths))} layers, "
        f"{row.micro_batches} micro-batches, recompute {row.recompute}: {row.why}"
        for row in (found.candidate for found in nearest[:MISFITS])
    ]
    free = request.recompute == "auto" and request.stages is None and request.micro_batches is None
    advice = "Use more ranks, or ranks with more memory, or a smaller batch"
    lines.append(
        advice + ("" if free else ", or leave recompute, stages and micro_batches to the planner")
    )
    return PlanError("\n  ".join(lines))
