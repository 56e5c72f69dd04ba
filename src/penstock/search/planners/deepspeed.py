"""DeepSpeed's planner: equal numbers of parameters, or of layers, and 1F1B."""

from __future__ import annotations

import re

from penstock.partition.catalogue import partition
from penstock.plan.plan import Plan
from penstock.search.catalogue import register
from penstock.search.planners.straight import copies_of, counts_of, method_of, stages_of
from penstock.search.proposal import Objective, Proposal
from penstock.search.request import PlanRequest
from penstock.search.score import best_of


@register(
    "deepspeed",
    source="DeepSpeed 2025, runtime/pipe/module.py, PipelineModule, partition_method='parameters'",
)
def deepspeed(request: PlanRequest) -> Plan:
    """PipelineModule's default cut: the least difference of the stages' numbers of parameters that
    `partition_balanced` finds.

    The number of stages is its user's: one on each device unless asked otherwise. Devices that are
    left then are more pipelines, as many as are whole, each with its share of the micro-batches
    (PipeDataParallelTopology). All numbers of micro-batches are simulated, and the best is taken;
    the schedule is 1F1B. Recomputation is off by default there and is taken here where memory asks
    for it.

    With `partition` "uniform" or "type:<regex>" it is that partition method.

    Raises:
        PlanError: another cut or schedule is asked for, or nothing fits.
    """
    return _planned(
        request, method_of(request, "deepspeed", ("parameters", "uniform", "type"), "1f1b")
    )


@register(
    "deepspeed-uniform",
    source="DeepSpeed 2025, runtime/pipe/module.py, PipelineModule, partition_method='uniform'",
)
def deepspeed_uniform(request: PlanRequest) -> Plan:
    """As "deepspeed", with equal numbers of layers, one more in the first stages where they do not
    divide.

    Raises:
        PlanError: another cut or schedule is asked for, or nothing fits.
    """
    return _planned(request, method_of(request, "deepspeed-uniform", ("uniform",), "1f1b"))


def _planned(request: PlanRequest, method: str) -> Plan:
    stages = stages_of(request)
    copies = copies_of(request, stages)
    lengths = tuple(partition(request.profile, stages, by=method))
    weights, what = _weights(request, method)
    sums = [
        sum(weights[end - length : end])
        for length, end in zip(lengths, _ends(lengths), strict=True)
    ]
    objective = Objective(f"most less fewest {what} of a stage", float(max(sums) - min(sums)), "1")
    options = () if copies == 1 else (("replicas", copies),)
    return best_of(
        request,
        [
            Proposal(lengths, "1f1b", count, options, objective=objective)
            for count in counts_of(request, stages, copies)
        ],
    )


def _weights(request: PlanRequest, method: str) -> tuple[list[int], str]:
    """What is balanced: one number for every layer, and its name."""
    name, _, pattern = method.partition(":")
    if name == "type":
        return [
            1 if re.search(pattern, layer.kind, re.IGNORECASE) else 0 for layer in request.profile
        ], f"{pattern} layers"
    if name == "parameters":
        return [layer.parameters for layer in request.profile], name
    return [1] * len(request.profile), "layers"


def _ends(lengths: tuple[int, ...]) -> list[int]:
    return [sum(lengths[: stage + 1]) for stage in range(len(lengths))]
