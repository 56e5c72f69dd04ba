"""DeepSpeed's planner: equal numbers of parameters, or of layers, and 1F1B."""

from __future__ import annotations

import re

from penstock.partition.catalogue import partition
from penstock.plan.plan import Plan
from penstock.search.best_plan import best_plan
from penstock.search.catalogue import register
from penstock.search.planners.cut_only import counts_of, method_of, replicas_of, stages_of
from penstock.search.planners.layer_costs import stage_totals
from penstock.search.proposal import Objective, Proposal, replica_options
from penstock.search.request import PlanRequest


@register(
    "deepspeed",
    source="DeepSpeed 2025, runtime/pipe/module.py, PipelineModule, partition_method='parameters'",
)
def deepspeed(request: PlanRequest) -> Plan:
    """Return the plan with PipelineModule's default cut: the least difference of the stages'
    numbers of parameters that `partition_balanced` finds.

    The number of stages is chosen by DeepSpeed's user: one per device unless requested otherwise.
    Further devices form more pipelines, as many as are whole, each with its share of the
    micro-batches (PipeDataParallelTopology). All numbers of micro-batches are simulated, and the
    best is the plan; the schedule is 1F1B. Recompute is off by default in DeepSpeed, and is used
    here where memory requires it.

    With `partition` "uniform" or "type:<regex>" it uses that partition method.

    Raises:
        PlanError: another cut or schedule is requested, or nothing fits.
    """
    return _planned(
        request, method_of(request, "deepspeed", ("parameters", "uniform", "type"), "1f1b")
    )


@register(
    "deepspeed-uniform",
    source="DeepSpeed 2025, runtime/pipe/module.py, PipelineModule, partition_method='uniform'",
)
def deepspeed_uniform(request: PlanRequest) -> Plan:
    """Return the plan of "deepspeed" with equal numbers of layers, one more in the first stages if
    they do not divide.

    Raises:
        PlanError: another cut or schedule is requested, or nothing fits.
    """
    return _planned(request, method_of(request, "deepspeed-uniform", ("uniform",), "1f1b"))


def _planned(request: PlanRequest, method: str) -> Plan:
    """Return the best plan with one partition method, over the numbers of micro-batches."""
    stages = stages_of(request)
    replicas = replicas_of(request, stages)
    lengths = tuple(partition(request.profile, stages, by=method))
    weights, unit = _weights(request, method)
    sums = stage_totals(weights, lengths)
    objective = Objective(f"most less fewest {unit} of a stage", float(max(sums) - min(sums)), "1")
    proposals = [
        Proposal(lengths, "1f1b", count, replica_options(replicas), objective=objective)
        for count in counts_of(request, stages, replicas)
    ]
    return best_plan(request, proposals)


def _weights(request: PlanRequest, method: str) -> tuple[list[int], str]:
    """Return the number per layer that a method balances, and its name."""
    name, _, pattern = method.partition(":")
    if name == "type":
        matches = [re.search(pattern, layer.kind, re.IGNORECASE) for layer in request.profile]
        return [1 if match else 0 for match in matches], f"{pattern} layers"
    if name == "parameters":
        return [layer.parameters for layer in request.profile], name
    return [1] * len(request.profile), "layers"
