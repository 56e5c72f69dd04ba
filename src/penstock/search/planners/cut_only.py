"""Helpers for planners that only cut the model, and leave the numbers of stages and micro-batches
to their users.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from penstock.search.planners.scope import SIMULATED_FORWARDS, check_scope
from penstock.search.request import PlanRequest


def stages_of(request: PlanRequest) -> int:
    """Return the requested number of stages, or one per device but not more than layers."""
    if request.stages is not None:
        return request.stages
    return min(request.cluster.ranks, len(request.profile))


def replicas_of(request: PlanRequest, stages: int) -> int:
    """Return the largest number of whole pipelines with `stages` stages that the devices, the
    samples and the request allow. A requested number of micro-batches must divide evenly among
    them.
    """
    most = max(1, min(request.cluster.ranks // stages, request.copies_allowed, request.batch))
    micro_batches = request.micro_batches
    if micro_batches is None:
        return most
    return max(count for count in range(1, most + 1) if micro_batches % count == 0)


def method_of(request: PlanRequest, planner: str, methods: tuple[str, ...], *schedules: str) -> str:
    """Return the partition method to use: the requested one if it is among a planner's `methods`,
    else the first of these.

    Raises:
        PlanError: another method is requested, or none of the planner's schedules.
    """
    requested = request.by if isinstance(request.by, str) else ""
    if requested.partition(":")[0] in methods:
        check_scope(replace(request, by="bottleneck"), planner, *schedules)
        return requested
    check_scope(request, planner, *schedules)
    return methods[0]


def counts_of(request: PlanRequest, stages: int, replicas: int = 1) -> Iterator[int]:
    """Yield the numbers of micro-batches to try, of all pipelines together: the requested number,
    or equally many per pipeline as long as they are quick to simulate.
    """
    forwards = 0
    for per_pipeline in request.micro_batch_counts():
        count = per_pipeline if request.micro_batches is not None else per_pipeline * replicas
        forwards += stages * count
        if count > request.batch or (forwards > SIMULATED_FORWARDS and per_pipeline > 1):
            return
        yield count


def allowed(request: PlanRequest, *schedules: str) -> list[str]:
    """Return those of a planner's schedules that are requested; all if none is named."""
    if request.schedules is None:
        return list(schedules)
    return [name for name in schedules if name in request.schedules]
