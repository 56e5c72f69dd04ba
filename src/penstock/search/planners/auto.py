"""The default planner: pipelines on all shapes of the cluster, every schedule asked for, exact
cuts, simulated in full.

In this order, each stage of the search with so much work at most, and all of it with so much time:

    shapes and numbers of micro-batches with one schedule  |  what the other planners propose  |
                                                           stages with copies of their own  |
    what can win of all other schedules, most promising first  |  programs made to measure  |  the
                                                               best cut again by what simulation
                                                               says

Most ways are never simulated: one whose lower bound is above the best time found cannot win.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import product

from penstock.errors import PenstockError
from penstock.partition.uniform import partition_uniform
from penstock.plan.plan import Plan
from penstock.search.catalogue import PLANNERS, register
from penstock.search.cuts import Balance
from penstock.search.explain import ROWS, plan_of
from penstock.search.hunt import Hunt, spread_of
from penstock.search.laid import Scored, best, first_of_kind, nothing
from penstock.search.measured import made_to_measure
from penstock.search.proposal import Proposal
from penstock.search.refine import refined
from penstock.search.remedies import remedies
from penstock.search.request import PlanRequest
from penstock.search.shapes import Shape, shapes
from penstock.search.uneven import uneven
from penstock.search.ways import Space, Way
from penstock.search.weigh import finer

NAME = "auto"

#: Ops simulated at most in the usual budget: with one schedule, and with all others.
SCAN, SEARCH = 400_000, 1_300_000

#: Of a schedule with so many stages and copies no more ways are looked at once so many came to
#: nothing, or where the best is this many
#: times slower than the best of all.
MISSES, FAR = 4, 1.2

#: How many ways of different kinds are cut again, and measured for.
POLISHED = 3

#: Rows of the table that may be ways that do not fit.
MISFITS = 4


@register(
    NAME,
    source="Penstock: enumeration with lower bounds, exact cuts, full simulation, local search",
)
def auto(request: PlanRequest) -> Plan:
    """The fastest plan that fits; of those within 0.1 % of it a synchronous one, then the leanest
    (to about 2 %), then the one with the fewest micro-batches. Never slower than what any other
    planner proposes for the same request, if its budget lets it ask them all.

    Every way is cut exactly for its devices and links at its micro-batch size. Where it does not
    fit so, it is cut within the limits of memory; if nothing fits at all, everything is tried again
    cut for memory alone.

    Raises:
        PlanError: nothing fits, and the message says what the nearest ways need; or no schedule
        takes these numbers.
    """
    hunt = Hunt(request)
    space = Space(request, shapes(request))
    scanned = _scan(hunt, space)
    asked = bool(
        hunt.fits
    )  # what little fits, if anything, is found sooner by the search than by them
    others_s = _ask_others(hunt) if asked else math.inf
    hunt.allow(SEARCH, 0.75)
    _weigh_all(hunt, uneven(request))
    hunt.allow(SEARCH, 0.9)
    _search(hunt, space, scanned, "time")
    if not hunt.fits:
        _search(hunt, space, {}, "memory")
    if not asked:
        others_s = _ask_others(hunt)
    hunt.allow(SEARCH / 4)
    _weigh_all(hunt, made_to_measure(request, spread_of(hunt.fits, POLISHED)))
    for each in spread_of(hunt.fits, POLISHED):
        refined(hunt, each)
    hunt.fits += [finer(each) for each in spread_of(hunt.fits, POLISHED)]
    if not hunt.fits:
        _say_why_none(hunt, space)
        raise nothing(request, hunt.misfits, list(hunt.refusals))
    _see_off(hunt, space)
    chosen = best(hunt.fits, others_s)
    bound = min([way.bound_s for way in space.ways] + [space.least_s, chosen.step_s])
    return plan_of(request, chosen, _table(hunt, chosen), bound, remedies(request, chosen))


def _scan(hunt: Hunt, space: Space) -> dict[tuple[Shape, int], float]:
    """A first look, at ways with one schedule: what they really take says where the others are
    worth one. Returns what they take over what was estimated, by shape and number of micro-batches.
    """
    hunt.allow(SCAN, 0.4)
    found: dict[tuple[Shape, int], float] = {}
    for way in space.ways:
        if hunt.over:
            break
        if way.schedule in space.leading or way.stages == 1:
            weighed = hunt.weigh_way(way, "time")
            if weighed is not None and way.estimate_s:
                found[way.shape, way.micro_batches] = weighed.step_s / way.estimate_s
    return found


def _search(
    hunt: Hunt, space: Space, scanned: Mapping[tuple[Shape, int], float], balance: Balance
) -> None:
    """All ways that were not looked at: of every schedule, number of stages and of copies the most
    promising, then the next of those that came near, and so on.
    """

    def promise(way: Way) -> float:
        return way.estimate_s * scanned.get((way.shape, way.micro_batches), 1.0)

    kinds: dict[tuple[str, int, int], list[Way]] = {}
    for way in sorted((way for way in space.ways if (way, balance) not in hunt.tried), key=promise):
        kinds.setdefault((way.schedule, way.stages, way.shape.pipelines), []).append(way)
    nearest = dict.fromkeys(kinds, math.inf)
    misses = dict.fromkeys(kinds, 0)
    for turn in range(max(map(len, kinds.values()), default=0)):
        for kind, ways in kinds.items():
            far = (
                misses[kind] >= MISSES
                if nearest[kind] == math.inf
                else nearest[kind] > FAR * hunt.best_s
            )
            if turn >= len(ways) or (far and hunt.fits):
                continue
            if hunt.over:
                return
            if ways[turn].bound_s > hunt.reach:
                continue
            found = hunt.weigh_way(ways[turn], balance)
            misses[kind] += found is None
            nearest[kind] = min(nearest[kind], math.inf if found is None else found.step_s)


def _weigh_all(hunt: Hunt, proposals: Iterable[Proposal]) -> None:
    for proposal in proposals:
        if hunt.over:
            break
        hunt.weigh(proposal)


def _ask_others(hunt: Hunt) -> float:
    """Weigh what the planners of the literature propose, within what is asked; where it may be
    asynchronous, also what they do with a flush. Returns the seconds of the fastest.
    """
    fastest = math.inf
    kinds = (
        [hunt.request, replace(hunt.request, asynchronous=False)]
        if hunt.request.asynchronous
        else [hunt.request]
    )
    for request, entry in product(kinds, PLANNERS.entries().values()):
        if entry.name == NAME or hunt.left_s() <= 0:
            continue
        try:
            plan = entry.make(request)
        except PenstockError as error:
            hunt.refuse(f"{entry.name}: {error}")
            continue
        if not _allowed(hunt.request, plan):
            continue
        fastest = min(fastest, plan.predicted.step_s)
        if plan.predicted.step_s <= hunt.reach:
            hunt.weigh(
                Proposal(
                    plan.lengths,
                    plan.schedule_name,
                    plan.micro_batches,
                    plan.schedule_options,
                    plan.recompute,
                    plan.weights,
                    plan.devices,
                )
            )
    return fastest


def _allowed(request: PlanRequest, plan: Plan) -> bool:
    """Whether another planner kept to what the request says."""
    named = request.schedules is not None and plan.schedule_name in {
        facts.name for facts in request.families()
    }
    free = request.schedules is None and (plan.synchronous or request.asynchronous)
    numbers = request.stages in (None, plan.stages) and request.micro_batches in (
        None,
        plan.micro_batches,
    )
    copies = max(map(len, plan.schedule.ranks_of_stage)) <= request.copies_allowed
    cut = request.by in ("bottleneck", plan.lengths)
    return (
        (named or free) and numbers and copies and cut and request.weights in (None, plan.weights)
    )


def _say_why_none(hunt: Hunt, space: Space) -> None:
    """Where no shape takes the number of stages that is asked for, each schedule's own reason."""
    if space.ways or hunt.request.stages is None:
        return
    for facts in hunt.request.families():
        hunt.weigh(
            Proposal(
                tuple(partition_uniform(len(hunt.request.profile), hunt.request.stages)),
                facts.name,
                hunt.request.micro_batch_counts()[-1],
            )
        )


def _see_off(hunt: Hunt, space: Space) -> None:
    """Simulate, of the kinds that were skipped, the way that came nearest, so that the table says
    by how much it loses.
    """
    known = {each.kind for each in hunt.fits + hunt.near}
    nearest: dict[object, Way] = {}
    for way in space.ways:
        kind = way.schedule if way.stages > 1 else "", way.stages, way.shape.pipelines
        if kind not in known:
            nearest.setdefault(kind, way)
    for way in list(nearest.values())[: max(0, ROWS - len(known))]:
        if hunt.left_s() > 0:
            hunt.weigh_way(way, force=way.shape.pipelines == 1)


def _table(hunt: Hunt, chosen: Scored) -> list[Scored]:
    """What to tell besides the plan: the best of each kind, and what would be faster if it fitted."""
    nearest = first_of_kind(
        sorted(hunt.misfits, key=lambda found: (found.excess, found.preference))
    )[:MISFITS]
    faster = [
        each
        for each in (replace(found.simulated(), lack=found.lack) for found in nearest)
        if each.step_s < chosen.step_s
    ]
    others = first_of_kind([chosen, *_by_time(hunt.fits + hunt.near)])
    return [*others[: ROWS - len(faster)], *_by_time(faster)]


def _by_time(found: Iterable[Scored]) -> list[Scored]:
    return sorted(found, key=lambda each: (each.step_s, each.preference))
