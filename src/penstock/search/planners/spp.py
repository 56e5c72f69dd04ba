"""SPP's planner: an order of the devices, stages on neighbours in it, and a list schedule that says
what they take.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from penstock.errors import PlanError
from penstock.plan.plan import Plan
from penstock.search.catalogue import register
from penstock.search.planners.layer_costs import LayerCosts
from penstock.search.planners.scope import check_alike, check_scope, quickest
from penstock.search.planners.shared_stages import check_size, likely_counts, ranges_of
from penstock.search.planners.spp_cut import Loads, Stages, least_load
from penstock.search.planners.spp_execution import makespan
from penstock.search.planners.spp_order import device_order
from penstock.search.proposal import Objective, Proposal
from penstock.search.request import PlanRequest
from penstock.search.score import best_of

#: Steps of PRM, stages x devices^2 x layers^2, that are searched together; and devices beyond which
#: one search takes too long.
STEPS_IN_ALL, MOST_DEVICES = 2e8, 32

#: Layers beyond which it does.
MOST_LAYERS = 256


@register("spp", source="Luo et al. 2022, SPP, INFOCOM (arXiv 2204.10562)")
def spp(request: PlanRequest) -> Plan:
    """The stages, copies and devices with the least makespan of the list schedule.

    1. RDO orders the devices by recursive minimum cuts (`device_order`).
    2. PRM puts stages on neighbours in that order, each on as many as it likes and all devices
       used, as far as there are layers and micro-batches for them, for the least load of the
       busiest stage or channel; for every number of stages (`least_load`).
    3. PE schedules the micro-batches on stages and channels (`makespan`), and the number of stages
       with the least makespan is taken.

    That makespan is the objective. PE shares each micro-batch among a stage's copies, and lets
    forwards run ahead without a limit; the plan runs the same stages, copies and devices under
    "1f1b", each copy with whole micro-batches in turn, which takes a little longer and far less
    memory. All numbers of micro-batches are searched, and the best few are simulated.

    Raises:
        PlanError: another cut or schedule is asked for, devices are of several kinds, the search is
        too large, or nothing fits.
    """
    check_scope(request, "spp", "1f1b")
    check_alike(request, "spp")
    devices, layers = request.cluster.ranks, len(request.profile)
    check_size("spp", devices, MOST_DEVICES, "devices")
    check_size("spp", layers, MOST_LAYERS, "layers")
    steps = float(min(devices, layers) * devices**2 * layers**2)
    found = sorted(_proposals(request, steps), key=lambda each: each[0])
    if not found:
        raise PlanError(
            f"spp finds no stages of {layers} layers for all {devices} devices, each copy with a micro-batch: give more "
            "micro-batches, or other devices"
        )
    return best_of(request, quickest([proposal for _, proposal in found]))


def _proposals(request: PlanRequest, steps: float) -> Iterator[tuple[float, Proposal]]:
    """The best number of stages for each number of micro-batches, with its makespan."""
    every = device_order(request.cluster)
    for count in likely_counts(request, steps, STEPS_IN_ALL):
        costs = LayerCosts.of(request.profile, request.batch / count)
        copies_allowed = min(request.copies_allowed, count)
        # More devices than this no cut can use: the first of the order are taken.
        order = every[: copies_allowed * (request.stages or len(costs))]
        loads = Loads(costs, request.cluster, order, count, min(copies_allowed, len(order)))
        found = least_load(loads, min(len(order), request.stages or len(costs)))
        if request.stages is not None:
            found = {number: way for number, way in found.items() if number == request.stages}
        chosen: tuple[float, Stages] | None = None
        for load, stages in sorted(found.values(), key=lambda way: (way[0], len(way[1]))):
            # No schedule is faster than its busiest resource: the load has the sync's share of each
            # micro-batch.
            if chosen is None or count * load < chosen[0]:
                seconds = execution_s(loads, stages)
                chosen = (seconds, stages) if chosen is None or seconds < chosen[0] else chosen
        if chosen is not None:
            lengths, copies = (tuple(numbers) for numbers in zip(*chosen[1], strict=True))
            yield (
                chosen[0],
                Proposal(
                    lengths,
                    "1f1b",
                    count,
                    () if set(copies) == {1} else (("replicas", copies),),
                    devices=order,
                    objective=Objective("makespan of the list schedule", chosen[0], "s"),
                ),
            )


def execution_s(loads: Loads, stages: Sequence[tuple[int, int]]) -> float:
    """PE's makespan of these stages."""
    bounds = list(ranges_of([length for length, _ in stages]))
    copies = [number for _, number in stages]
    places = [sum(copies[: stage + 1]) for stage in range(len(stages))]
    ranges = loads.ranges
    backward = ranges.seconds - ranges.forward_s
    return makespan(
        [
            float(ranges.forward_s[bound]) / number
            for bound, number in zip(bounds, copies, strict=True)
        ],
        [float(backward[bound]) / number for bound, number in zip(bounds, copies, strict=True)],
        [
            float(loads.channel(places[k], copies[k], copies[k + 1])[bounds[k][1]])
            for k in range(len(stages) - 1)
        ],
        [
            float(loads.sync(*place)[bound])
            for place, bound in zip(zip(places, copies, strict=True), bounds, strict=True)
        ],
        loads.micro_batches,
    )
