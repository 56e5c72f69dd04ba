"""Programs made to measure for what a search has found."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from penstock.plan import Option
from penstock.search.laid import Scored
from penstock.search.proposal import Proposal
from penstock.search.request import PlanRequest

#: Pipelines of more ops than this (stages x micro-batches) are left as they are: a search over orders would take the whole budget.
MOST_OPS = 160

#: Seconds and rounds of one search; where rounds end it, it makes the same program each time.
SECONDS, ROUNDS = 2.0, 200


def made_to_measure(request: PlanRequest, found: Sequence[Scored]) -> Iterator[Proposal]:
    """For each way that was found, where it has one stage on every rank and one copy of each: a program of the same cut, ordered for
    its own costs and within the memory that activations may take there. None where schedules were named.
    """
    if request.schedules is not None or not all(facts.synchronous for facts in request.families()):
        return
    for each in found:
        made, proposal = each.laid.made, each.laid.proposal
        plain = all(stages == (rank,) for rank, stages in enumerate(made.stages_of_rank)) and made.slicing is None
        if not plain or made.stages == 1 or made.stages * made.micro_batches > MOST_OPS:
            continue
        room = _room(each)
        if room is None:
            continue
        limits: tuple[tuple[str, Option], ...] = (("memory_limit", room), ("budget_s", SECONDS), ("max_rounds", ROUNDS))
        yield Proposal(proposal.lengths, "synthesised", proposal.micro_batches, limits, each.recompute, None, proposal.devices)


def _room(found: Scored) -> tuple[float, ...] | None:
    """Per rank, the bytes that activations may take beside the weights; None where something is recomputed, or nothing is left."""
    laid = found.laid
    held = laid.costs.spread("weight_bytes", laid.made.stages) or ()
    room = tuple(laid.request.memory_bytes(rank) - weights for rank, weights in enumerate(held))
    return room if found.recompute == "never" and all(each > 0 for each in room) else None
