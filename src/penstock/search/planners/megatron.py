"""Megatron-LM's planner: equal numbers of layers, on a grid of pipelines, stages and virtual
stages.
"""

from __future__ import annotations

from collections.abc import Iterator

from penstock.errors import PlanError
from penstock.partition.uniform import partition_uniform
from penstock.plan.plan import Option, Plan
from penstock.search.best_plan import best_plan
from penstock.search.catalogue import register
from penstock.search.planners.cut_only import allowed, counts_of, replicas_of
from penstock.search.planners.layer_costs import LayerCosts, stage_totals
from penstock.search.planners.scope import SIMULATED_FORWARDS, check_alike, check_scope
from penstock.search.proposal import Objective, Proposal, replica_options
from penstock.search.request import PlanRequest

#: Numbers of stages per rank that are tried, and number of proposals that are simulated: those with
#: the least estimates.
VIRTUAL, SIMULATED = (1, 2, 4), 12


@register(
    "megatron",
    source="Narayanan et al. 2021, SC, section 3, with equal numbers of layers and no tensor parallelism",
)
def megatron(request: PlanRequest) -> Plan:
    """Return the best plan of a grid: p ranks in a pipeline, d pipelines, as many as there are
    devices for, v stages per rank, equal numbers of layers in all stages.

    Megatron has no planner; the paper's section 3 says how to choose by hand, from the bubble
    (p - 1) / v m of m micro-batches of one pipeline. The objective is its estimate, (v m + p - 1) /
    v times a micro-batch's seconds on the slowest rank; the dozen with the least are simulated.
    With one stage per rank the schedule is 1F1B, with several it is interleaved. If layers do not
    divide, the first stages have one more.

    Raises:
        PlanError: another cut or schedule is requested, devices are of several kinds, or nothing
            fits.
    """
    check_scope(request, "megatron", "1f1b", "interleaved")
    check_alike(request, "megatron")
    proposals = sorted(_proposals(request), key=_estimate)
    if not proposals:
        raise PlanError(
            f"megatron finds no way to cut {len(request.profile)} layers for "
            f"{request.cluster.ranks} devices with these numbers: leave stages and micro_batches "
            "out"
        )
    return best_plan(request, proposals[:SIMULATED])


def _proposals(request: PlanRequest) -> Iterator[Proposal]:
    """Yield all proposals of the grid."""
    costs: dict[int, tuple[float, ...]] = {}
    for width in range(1, min(request.cluster.ranks, len(request.profile)) + 1):
        replicas = replicas_of(request, width)
        for count in counts_of(request, width, replicas):
            if count not in costs:
                costs[count] = LayerCosts.of(request.profile, request.batch / count).seconds
            # On one rank several stages would do the same as one.
            for virtual in VIRTUAL if width > 1 else (1,):
                if _is_possible(request, width, virtual, count, count // replicas):
                    yield _proposal(request, width, virtual, replicas, count, costs[count])


def _is_possible(
    request: PlanRequest, width: int, virtual: int, count: int, per_pipeline: int
) -> bool:
    """Return whether the request allows this schedule and number of stages, the model has layers
    for them, the schedule takes this number of micro-batches per pipeline, and simulation is quick
    enough.
    """
    stages = width * virtual
    if stages > len(request.profile) or request.stages not in (None, stages):
        return False
    schedule = "1f1b" if virtual == 1 else "interleaved"
    if schedule not in allowed(request, "1f1b", "interleaved"):
        return False
    # The paper (section 2.2) requires a multiple of the ranks.
    if virtual > 1 and per_pipeline % width:
        return False
    return stages * count <= SIMULATED_FORWARDS


def _proposal(
    request: PlanRequest,
    width: int,
    virtual: int,
    replicas: int,
    count: int,
    seconds: tuple[float, ...],
) -> Proposal:
    """Return the proposal of one point of the grid.

    Args:
        request: the request.
        width: ranks per pipeline.
        virtual: stages per rank.
        replicas: number of pipelines.
        count: number of micro-batches, of all pipelines together.
        seconds: seconds of every layer for a micro-batch.
    """
    lengths = tuple(partition_uniform(len(request.profile), width * virtual))
    slots = (virtual * (count // replicas) + width - 1) / virtual
    estimate = slots * _slowest(seconds, lengths, width)
    options: tuple[tuple[str, Option], ...] = () if virtual == 1 else (("chunks", virtual),)
    options += replica_options(replicas)
    return Proposal(
        lengths,
        "1f1b" if virtual == 1 else "interleaved",
        count,
        options,
        objective=Objective("estimated step", estimate, "s"),
    )


def _estimate(proposal: Proposal) -> tuple[float, int, int]:
    """Return the sort key of a proposal: its estimate, then its numbers."""
    assert proposal.objective is not None
    return proposal.objective.value, proposal.micro_batches, proposal.stages


def _slowest(seconds: tuple[float, ...], lengths: tuple[int, ...], width: int) -> float:
    """Return the seconds of a micro-batch on the slowest rank; stage s is on rank s mod width."""
    busy = [0.0] * width
    for stage, stage_s in enumerate(stage_totals(seconds, lengths)):
        busy[stage % width] += stage_s
    return max(busy)
