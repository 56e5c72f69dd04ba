"""What planners share that only cut: how many stages, and into how many micro-batches, is left to
their users.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from penstock.schedule.catalogue import FAMILIES
from penstock.search.planners.scope import SIMULATED_FORWARDS, check_scope
from penstock.search.request import PlanRequest


def stages_of(request: PlanRequest) -> int:
    """The number of stages that is asked for, or one for every device, as far as there are layers."""
    return (
        min(request.cluster.ranks, len(request.profile))
        if request.stages is None
        else request.stages
    )


def copies_of(request: PlanRequest, stages: int) -> int:
    """How many whole pipelines of so many stages there are devices, samples and leave for; of a
    number of micro-batches that is asked for, each gets equally many.
    """
    most = max(1, min(request.cluster.ranks // stages, request.copies_allowed, request.batch))
    asked = request.micro_batches
    return (
        most
        if asked is None
        else max(copies for copies in range(1, most + 1) if asked % copies == 0)
    )


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
    """The numbers of micro-batches to try, of all the pipelines together: equally many for each,
    larger numbers only while they are quick to simulate; or the one that is asked for.
    """
    forwards = 0
    for each in request.micro_batch_counts():
        count = each if request.micro_batches is not None else each * copies
        forwards += stages * count
        if count > request.batch or (forwards > SIMULATED_FORWARDS and each > 1):
            return
        yield count


def allowed(request: PlanRequest, *schedules: str) -> list[str]:
    """Those of a planner's schedules that are asked for, or all."""
    if request.schedules is None:
        return list(schedules)
    asked = {FAMILIES.find(name).name for name in request.schedules}
    return [name for name in schedules if name in asked]
