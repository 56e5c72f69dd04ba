"""What planners share that only cut: how many stages, and into how many micro-batches, is left to their users."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from penstock.search.planners.scope import SIMULATED_FORWARDS, check_scope
from penstock.search.request import PlanRequest


def stages_of(request: PlanRequest) -> int:
    """The number of stages that is asked for, or one for every device, as far as there are layers."""
    return min(request.cluster.ranks, len(request.profile)) if request.stages is None else request.stages


def copies_of(request: PlanRequest, stages: int) -> int:
    """How many whole pipelines of so many stages there are devices, samples and leave for."""
    return max(1, min(request.cluster.ranks // stages, request.copies_allowed, request.batch))


def method_of(request: PlanRequest, planner: str, methods: tuple[str, ...], *schedules: str) -> str:
    """The first of its own methods to cut, or that of them which is asked for.

    Raises:
        PlanError: another one is asked for, or none of its schedules.
    """
    asked = request.by if isinstance(request.by, str) else ""
    if asked.partition(":")[0] in methods:
        check_scope(replace(request, by="bottleneck"), planner, *schedules)
        return asked
    check_scope(request, planner, *schedules)
    return methods[0]


def counts_of(request: PlanRequest, stages: int, copies: int = 1) -> Iterator[int]:
    """The numbers of micro-batches to try: as many for each of the pipelines, the larger ones only while they are quick to simulate."""
    forwards = 0
    for count in request.micro_batch_counts(copies):
        if count < copies or (request.micro_batches is None and count % copies):
            continue
        forwards += stages * count
        if forwards > SIMULATED_FORWARDS and count > copies:
            return
        yield count
