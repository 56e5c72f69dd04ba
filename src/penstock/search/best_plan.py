"""From what a planner proposes to its plan."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

from penstock.errors import PlanError, ScheduleError
from penstock.plan.plan import Plan
from penstock.search.build_plan import build_plan
from penstock.search.evaluate import evaluate, infeasible_error, refine_recompute
from penstock.search.instantiate import (
    CLOSE,
    Evaluated,
    best,
    by_time,
    first_of_kind,
    instantiate,
)
from penstock.search.proposal import Proposal
from penstock.search.request import PlanRequest


def best_plan(request: PlanRequest, proposals: Iterable[Proposal]) -> Plan:
    """Return the plan of the fastest proposal that fits, with all others in its table.

    Raises:
        PlanError: nothing fits, and the message says what the nearest candidates need; or no
            proposal can be made, and it says why.
    """
    feasible: list[Evaluated] = []
    infeasible: list[Evaluated] = []
    rejected: dict[str, None] = {}
    cutoff_s = math.inf
    cut_short = False
    for proposal in proposals:
        if feasible and request.deadline is not None and request.deadline.is_over():
            cut_short = True
            break
        try:
            variants = evaluate(instantiate(request, proposal), cutoff_s)
        except (ScheduleError, PlanError) as error:
            # An impossible proposal is not an error of the search: the reasons are shown if nothing
            # fits.
            rejected[str(error)] = None
            continue
        for variant in variants:
            (infeasible if variant.memory_shortfall else feasible).append(variant)
        fastest = min((candidate.step_s for candidate in feasible), default=math.inf)
        # Those that are as fast up to rounding stay in: `best` chooses among them by memory.
        cutoff_s = fastest * (1 + CLOSE)
    if not feasible:
        raise infeasible_error(request, infeasible, list(rejected))
    coarse = best(feasible)
    chosen = refine_recompute(coarse)
    others = sorted((candidate for candidate in feasible if candidate is not coarse), key=by_time)
    note = ""
    if cut_short:
        note = "search cut short by the clock, at time_limit_s: another run may find another plan"
    plan = build_plan(request, chosen, first_of_kind([chosen, *others]))
    return replace(plan, search_note=note) if note else plan


def plan_proposal(request: PlanRequest, proposal: Proposal) -> Plan:
    """Return the plan of one proposal.

    Raises:
        PlanError: it does not fit, or cannot be made.
    """
    return best_plan(request, [proposal])
