"""From what a planner proposes to its plan."""

from __future__ import annotations

import math
from collections.abc import Iterable

from penstock.errors import PlanError, ScheduleError
from penstock.plan.plan import Plan
from penstock.search.explain import plan_of
from penstock.search.laid import CLOSE, Scored, best, first_of_kind, lay_out, nothing
from penstock.search.proposal import Proposal
from penstock.search.request import PlanRequest
from penstock.search.weigh import finer, weigh


def best_of(request: PlanRequest, proposals: Iterable[Proposal]) -> Plan:
    """The plan of the fastest proposal that fits, all others in its table.

    Raises:
        PlanError: nothing fits, and the message says what the nearest need; or nothing can be made,
        and it says why.
    """
    fits: list[Scored] = []
    misfits: list[Scored] = []
    refusals: dict[str, None] = {}
    reach = math.inf
    for proposal in proposals:
        try:
            found = weigh(lay_out(request, proposal), reach)
        except (ScheduleError, PlanError) as error:
            refusals[str(error)] = None
            continue
        fits += [each for each in found if not each.lack]
        reach = min((each.step_s for each in fits), default=math.inf) * (1 + CLOSE)
        misfits += [each for each in found if each.lack]
    if not fits:
        raise nothing(request, misfits, list(refusals))
    coarse = best(fits)
    chosen = finer(coarse)
    others = sorted(fits, key=lambda each: (each is not coarse, each.step_s, each.preference))[1:]
    return plan_of(request, chosen, first_of_kind([chosen, *others]))


def scored(request: PlanRequest, proposal: Proposal) -> Plan:
    """The plan of one proposal.

    Raises:
        PlanError: it does not fit, or cannot be made.
    """
    return best_of(request, [proposal])
