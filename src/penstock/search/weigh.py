"""What a way that was laid out needs and takes, with as little recomputing as will do."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from penstock.plan.plan import Recompute
from penstock.search.laid import Laid, Scored
from penstock.search.lightest import COARSE, FINE, Precision
from penstock.search.request import PlanRequest
from penstock.search.selection import Hopeless, selected
from penstock.simulate.simulate import peak_memory
from penstock.units import format_bytes


def weigh(laid: Laid, reach: float = math.inf) -> list[Scored]:
    """What does not fit, and last what fits and is simulated, if anything does. What certainly
    takes more than `reach` seconds may be left out.

    Where recompute is the planner's choice: nothing recomputed, if that fits; else the faster of
    all but the last micro-batch, and of those layers that have to be; else everything.
    """
    asked = laid.proposal.recompute if laid.request.recompute == "auto" else laid.request.recompute
    if asked != "auto":
        return _tried(laid, asked)
    found = _tried(laid, "never")
    if found[-1].lack:
        try:
            found += _tried(laid, "selective", COARSE, reach)
        except Hopeless:
            return found
        found += _tried(laid, "except_last")
        if all(each.lack for each in found):
            found += _tried(laid, "always")
    misfits, fits = [each for each in found if each.lack], [each for each in found if not each.lack]
    return misfits + sorted(fits, key=lambda each: (each.step_s, each.preference))[:1]


def finer(chosen: Scored) -> Scored:
    """The same with a closer look at the layers that run again, if it is one of such and that makes
    it faster.
    """
    if chosen.recompute != "selective":
        return chosen
    (found,) = _tried(replace(chosen.laid, selection=None), "selective")
    return found if not found.lack and found.step_s < chosen.step_s else chosen


def _tried(
    laid: Laid, recompute: Recompute, precision: Precision = FINE, reach: float = math.inf
) -> list[Scored]:
    """That way, if there is such a one; simulated if it fits."""
    way = selected(laid, precision, reach) if recompute == "selective" else laid
    if way is None:
        return []
    memory = peak_memory(way.made, way.costs, recompute) or ()
    found = Scored(way, recompute, memory, *_lack(laid.request, memory))
    return [found if found.lack else found.simulated()]


def _lack(request: PlanRequest, memory: Sequence[int]) -> tuple[float, str]:
    """What the fullest rank needs / has, and in words what it lacks, if it does."""
    has = [request.memory_bytes(rank) for rank in range(len(memory))]
    rank = max(range(len(memory)), key=lambda r: memory[r] / has[r])
    excess = memory[rank] / has[rank]
    words = f"needs {format_bytes(memory[rank])}, has {format_bytes(has[rank])} on rank {rank}"
    return excess, words if excess > 1 else ""
