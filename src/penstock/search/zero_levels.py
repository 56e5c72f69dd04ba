"""Plans of single devices at every level of ZeRO."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from penstock.errors import PlanError
from penstock.plan.plan import Plan
from penstock.search.request import PlanRequest
from penstock.simulate.zero import LEVELS


def best_zero_level(request: PlanRequest, planner: Callable[[PlanRequest], Plan]) -> Plan:
    """Return the fastest plan over all levels of ZeRO; of equally fast ones the lowest level.

    Args:
        request: that leaves the level open, of a profile without widths. Every level has an equal
            part of its budget.
        planner: plans a request with a fixed level.

    Raises:
        PlanError: nothing fits at any level; the message is that of the highest.
    """
    budget_s = request.budget_s / len(LEVELS)
    plans = []
    for level in LEVELS:
        sharding = replace(request.sharding, zero=level)
        options = replace(request.sharding_options, zero=level)
        fixed = replace(request, sharding=sharding, sharding_options=options, budget_s=budget_s)
        try:
            plans.append(planner(fixed))
        except PlanError as error:
            refusal = error
    if not plans:
        raise refusal
    return min(plans, key=lambda plan: (plan.predicted.step_s, plan.zero))
