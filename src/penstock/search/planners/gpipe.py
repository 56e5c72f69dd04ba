"""GPipe's planner: stages of nearly equal cost."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from penstock.partition.chain_dp import SUM, best_cut, stage_sums
from penstock.plan.plan import Plan
from penstock.schedule.recompute import Recompute
from penstock.search.best_plan import best_plan
from penstock.search.catalogue import register
from penstock.search.planners.cut_only import counts_of, stages_of
from penstock.search.planners.layer_costs import before, stage_totals
from penstock.search.planners.scope import check_scope
from penstock.search.proposal import Objective, Proposal
from penstock.search.request import PlanRequest


@register(
    "gpipe",
    source="Huang et al. 2019, GPipe, section 2.2: minimise the variance in the estimated costs of all cells",
)
def gpipe(request: PlanRequest) -> Plan:
    """Return the plan with the least variance of the stages' costs, which for a fixed number of
    stages is the least sum of squares: found exactly.

    The cost of a layer is its seconds of forward and backward for a micro-batch on the first
    device; the paper's is a function that its user may give, by default the number of operations.
    The number of stages is chosen by the user, too: one per device unless requested otherwise. All
    numbers of micro-batches are simulated, and the best is the plan. GPipe recomputes every stage,
    so that recompute="auto" means "always", even if less would fit.

    Raises:
        PlanError: another cut or schedule is requested, or nothing fits.
    """
    check_scope(request, "gpipe", "gpipe")
    stages = stages_of(request)
    proposals = []
    for count in counts_of(request, stages):
        costs = request.profile.step_seconds(request.batch / count)
        lengths = least_variance(costs, stages)
        deviation = float(np.std(stage_totals(costs, lengths)))
        objective = Objective("standard deviation of the stages' costs", deviation, "s")
        proposals.append(
            Proposal(
                tuple(lengths), "gpipe", count, recompute=Recompute.ALWAYS, objective=objective
            )
        )
    return best_plan(request, proposals)


def least_variance(costs: Sequence[float], stages: int) -> list[int]:
    """Return the stage lengths with the least variance of the stages' sums; of equal ones those
    with the longest last stage.

    >>> least_variance([1, 1, 1, 1, 4], 3)
    [2, 2, 1]
    """
    # As shares of the mean: another unit has the same best cut. If all costs are 0, any will do.
    mean = sum(costs) / stages or 1.0
    sums = before(tuple(costs))
    squares = np.square(stage_sums(sums, len(costs) - stages + 1) / mean)
    return best_cut(lambda _: squares, stages, len(costs), SUM).lengths
