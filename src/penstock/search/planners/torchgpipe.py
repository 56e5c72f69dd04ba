"""torchgpipe's planner: its block partition by layers' seconds or bytes, and GPipe."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.partition.catalogue import partition
from penstock.plan.plan import Plan
from penstock.search.best_plan import best_plan
from penstock.search.catalogue import register
from penstock.search.planners.cut_only import counts_of, method_of, stages_of
from penstock.search.planners.layer_costs import stage_totals
from penstock.search.proposal import Objective, Proposal
from penstock.search.request import PlanRequest


@register(
    "torchgpipe",
    aliases=("fairscale",),
    source="Kim et al. 2020, torchgpipe, balance/__init__.py and blockpartition.py",
)
def torchgpipe(request: PlanRequest) -> Plan:
    """Return the plan with the cut of `balance_by_time`: neighbours pass layers on until no
    partition exceeds the others by more than the most expensive layer.

    torchgpipe's user chooses the number of partitions, one per device unless requested otherwise,
    and of micro-batches: all numbers of these are simulated, and the best is the plan. Times are
    those of one micro-batch on the first device, as torchgpipe measures them on one. Its schedule
    is GPipe with backwards in reverse order; it recomputes all but the last micro-batch, so that
    recompute="auto" means "except_last", even if less would fit. With `partition="size"` it is the
    planner "torchgpipe-size".

    FairScale's Pipe is its fork, with the same balances.

    Raises:
        PlanError: another cut or schedule is requested, or nothing fits.
    """
    return _planned(request, method_of(request, "torchgpipe", ("time", "size"), "gpipe"))


@register(
    "torchgpipe-size",
    aliases=("fairscale-size",),
    source="Kim et al. 2020, torchgpipe, balance_by_size",
)
def torchgpipe_size(request: PlanRequest) -> Plan:
    """Return the plan of "torchgpipe" with the cut of `balance_by_size`: the bytes of a
    micro-batch's outputs, and twice those of the parameters.

    Raises:
        PlanError: another cut or schedule is requested, or nothing fits.
    """
    return _planned(request, method_of(request, "torchgpipe-size", ("size",), "gpipe"))


def _planned(request: PlanRequest, method: str) -> Plan:
    """Return the best plan with one partition method, over the numbers of micro-batches."""
    stages = stages_of(request)
    return best_plan(
        request, [_proposal(request, stages, count, method) for count in counts_of(request, stages)]
    )


def _proposal(request: PlanRequest, stages: int, count: int, method: str) -> Proposal:
    """Return the proposal with `count` micro-batches."""
    profile, samples = request.profile, request.batch / count
    if method == "time":
        lengths = partition(profile, stages, by="time", micro_batch=samples)
        costs = profile.step_seconds(samples)
    else:
        lengths = partition(profile, stages, by="size", batch=request.batch, micro_batches=count)
        costs = [
            layer.output_bytes_per_sample * samples + 2.0 * layer.parameter_bytes
            for layer in profile
        ]
    return Proposal(
        tuple(lengths),
        "gpipe",
        count,
        (("backward_order", "reverse"),),
        recompute="except_last",
        objective=Objective(
            "heaviest less lightest stage, in dearest layers", imbalance(costs, lengths), "1"
        ),
    )


def imbalance(costs: Sequence[float], lengths: Sequence[int]) -> float:
    """Return the difference of the heaviest and the lightest stage, in units in which the cheapest
    layer costs 0 and the most expensive 1; the block partition makes it 1 or less.

    >>> imbalance([1, 1, 1, 1, 1, 1, 1, 1, 20], [3, 3, 3])
    1.0
    """
    cheapest, dearest = min(costs), max(costs)
    if cheapest == dearest:
        return 0.0
    scaled = [(cost - cheapest) / (dearest - cheapest) for cost in costs]
    sums = stage_totals(scaled, lengths)
    return float(max(sums) - min(sums))
