"""Megatron-LM's way: equal numbers of layers, tried on a grid of pipelines, stages and virtual
stages.
"""

from __future__ import annotations

from collections.abc import Iterator

from penstock.errors import PlanError
from penstock.partition.uniform import partition_uniform
from penstock.plan.plan import Option, Plan
from penstock.search.catalogue import register
from penstock.search.planners.layer_costs import LayerCosts
from penstock.search.planners.scope import SIMULATED_FORWARDS, check_alike, check_scope
from penstock.search.planners.straight import allowed, copies_of, counts_of
from penstock.search.proposal import Objective, Proposal
from penstock.search.request import PlanRequest
from penstock.search.score import best_of

#: Stages on a rank that are tried, and proposals that are simulated: those with the least
#: estimates.
VIRTUAL, SIMULATED = (1, 2, 4), 12


@register(
    "megatron",
    source="Narayanan et al. 2021, SC, section 3, with equal numbers of layers and no tensor parallelism",
)
def megatron(request: PlanRequest) -> Plan:
    """The best of a grid: p ranks in a pipeline, d pipelines, as many as there are devices for, v
    stages on a rank, every stage as many layers.

    Megatron has no planner; the paper's section 3 says how to choose by hand, from the bubble (p -
    1) / v m of m micro-batches of one pipeline. The objective is its estimate, (v m + p - 1) / v
    times a micro-batch's seconds on the slowest rank; the dozen with the least are simulated. One
    stage per rank runs 1F1B, several run it interleaved. Layers that do not divide go to the first
    stages.

    Raises:
        PlanError: another cut or schedule is asked for, devices are of several kinds, or nothing
        fits.
    """
    check_scope(request, "megatron", "1f1b", "interleaved")
    check_alike(request, "megatron")
    found = sorted(
        _proposals(request), key=lambda each: (_value(each), each.micro_batches, each.stages)
    )
    if not found:
        raise PlanError(
            f"megatron finds no way to cut {len(request.profile)} layers for {request.cluster.ranks} devices with these "
            "numbers: leave stages and micro_batches out"
        )
    return best_of(request, found[:SIMULATED])


def _proposals(request: PlanRequest) -> Iterator[Proposal]:
    ranks, layers = request.cluster.ranks, len(request.profile)
    schedules = allowed(request, "1f1b", "interleaved")
    costs: dict[int, tuple[float, ...]] = {}
    for width in range(1, min(ranks, layers) + 1):
        copies = copies_of(request, width)
        for count in counts_of(request, width, copies):
            each = count // copies
            if count not in costs:
                costs[count] = LayerCosts.of(request.profile, request.batch / count).seconds
            for virtual in VIRTUAL if width > 1 else (1,):
                stages, schedule = width * virtual, "1f1b" if virtual == 1 else "interleaved"
                if (
                    stages > layers
                    or request.stages not in (None, stages)
                    or schedule not in schedules
                ):
                    continue
                if stages * count > SIMULATED_FORWARDS or (virtual > 1 and each % width):
                    continue
                lengths = tuple(partition_uniform(layers, stages))
                value = (
                    (virtual * each + width - 1) / virtual * _slowest(costs[count], lengths, width)
                )
                options: tuple[tuple[str, Option], ...] = (
                    () if virtual == 1 else (("chunks", virtual),)
                )
                options += () if copies == 1 else (("replicas", copies),)
                yield Proposal(
                    lengths,
                    schedule,
                    count,
                    options,
                    objective=Objective("estimated step", value, "s"),
                )


def _value(proposal: Proposal) -> float:
    assert proposal.objective is not None
    return proposal.objective.value


def _slowest(seconds: tuple[float, ...], lengths: tuple[int, ...], width: int) -> float:
    """Seconds of a micro-batch on the slowest rank, which has every stage s with s mod width its
    number.
    """
    busy, start = [0.0] * width, 0
    for stage, length in enumerate(lengths):
        busy[stage % width] += sum(seconds[start : start + length])
        start += length
    return max(busy)
