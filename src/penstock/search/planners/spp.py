"""SPP's planner: ordered devices, stages on neighbours, evaluated by a list schedule."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate

from penstock.plan.plan import Plan
from penstock.search.catalogue import register
from penstock.search.planners.layer_costs import LayerCosts, ranges_of
from penstock.search.planners.replicated_stages import (
    check_size,
    likely_counts,
    plan_of_least,
    replicated_proposal,
)
from penstock.search.planners.scope import check_alike, check_scope
from penstock.search.planners.spp_cut import Loads, Stages, least_load
from penstock.search.planners.spp_execution import makespan
from penstock.search.planners.spp_order import device_order
from penstock.search.proposal import Objective, Proposal
from penstock.search.request import PlanRequest

#: Maximum number of steps of PRM, stages x devices^2 x layers^2, that are searched together; and of
#: devices, since one search takes too long beyond them.
STEPS_IN_ALL, MOST_DEVICES = 2e8, 32

#: Maximum number of layers, for the same reason.
MOST_LAYERS = 256


@register("spp", source="Luo et al. 2022, SPP, INFOCOM (arXiv 2204.10562)")
def spp(request: PlanRequest) -> Plan:
    """Return the plan with the stages, replicas and devices of the least makespan of the list
    schedule.

    1. RDO orders the devices by recursive minimum cuts (`device_order`).
    2. PRM puts stages on neighbours in that order, each on any number of devices and all devices
       used, as far as there are layers and micro-batches for them, for the least load of the
       busiest stage or channel; for every number of stages (`least_load`).
    3. PE schedules the micro-batches on stages and channels (`makespan`), and the number of stages
       with the least makespan is the result.

    That makespan is the objective. PE divides each micro-batch among a stage's replicas, and lets
    forwards run ahead without a limit; the plan runs the same stages, replicas and devices under
    "1f1b", each replica with whole micro-batches in turn, which takes a little longer and far less
    memory. All numbers of micro-batches are searched, and the best few are simulated.

    Raises:
        PlanError: another cut or schedule is requested, devices are of several kinds, the search is
            too large, or nothing fits.
    """
    check_scope(request, "spp", "1f1b")
    check_alike(request, "spp")
    devices, layers = request.cluster.ranks, len(request.profile)
    check_size("spp", devices, MOST_DEVICES, "devices")
    check_size("spp", layers, MOST_LAYERS, "layers")
    steps = float(min(devices, layers) * devices**2 * layers**2)
    return plan_of_least(
        request,
        _proposals(request, steps),
        f"spp finds no stages of {layers} layers for all {devices} devices, each copy with a "
        "micro-batch: give more micro-batches, or other devices",
    )


def _proposals(request: PlanRequest, steps: float) -> Iterator[tuple[float, Proposal]]:
    """Yield the best number of stages for each number of micro-batches, with its makespan."""
    all_devices = device_order(request.cluster)
    for count in likely_counts(request, steps, STEPS_IN_ALL):
        costs = LayerCosts.of(request.profile, request.batch / count)
        most_replicas = min(request.copies_allowed, count)
        most_stages = request.stages or len(costs)
        # No cut can use more devices than this: the first of the order are used.
        order = all_devices[: most_replicas * most_stages]
        loads = Loads(costs, request.cluster, order, count, min(most_replicas, len(order)))
        best = _least_makespan(loads, min(len(order), most_stages), request.stages)
        if best is None:
            continue
        seconds, stages = best
        objective = Objective("makespan of the list schedule", seconds, "s")
        yield seconds, replicated_proposal(stages, count, order, objective)


def _least_makespan(
    loads: Loads, most_stages: int, stage_count: int | None
) -> tuple[float, Stages] | None:
    """Return the makespan and the stages with the least makespan over all numbers of stages, or of
    `stage_count` stages; None if there are none.
    """
    by_count = least_load(loads, most_stages)
    if stage_count is None:
        cuts = list(by_count.values())
    else:
        cuts = [by_count[stage_count]] if stage_count in by_count else []
    best: tuple[float, Stages] | None = None
    for load, stages in sorted(cuts, key=lambda cut: (cut[0], len(cut[1]))):
        # No schedule is faster than its busiest resource; the load includes the share of the sync
        # per micro-batch.
        if best is None or loads.micro_batches * load < best[0]:
            seconds = execution_s(loads, stages)
            if best is None or seconds < best[0]:
                best = seconds, stages
    return best


def execution_s(loads: Loads, stages: Sequence[tuple[int, int]]) -> float:
    """Return PE's makespan of these stages."""
    ranges = loads.ranges
    backward = ranges.seconds - ranges.forward_s
    bounds = list(ranges_of([length for length, _ in stages]))
    replicas = [count for _, count in stages]
    places = list(accumulate(replicas))
    forward_s, backward_s, sync_s = [], [], []
    for bound, count, place in zip(bounds, replicas, places, strict=True):
        forward_s.append(float(ranges.forward_s[bound]) / count)
        backward_s.append(float(backward[bound]) / count)
        sync_s.append(float(loads.sync(place, count)[bound]))
    channel_s = []
    for stage in range(len(stages) - 1):
        channel = loads.channel(places[stage], replicas[stage], replicas[stage + 1])
        channel_s.append(float(channel[bounds[stage][1]]))
    return makespan(forward_s, backward_s, channel_s, sync_s, loads.micro_batches)
