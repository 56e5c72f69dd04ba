"""Programs made to measure for what a search has found."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from penstock.plan.plan import Option
from penstock.search.laid import Scored
from penstock.search.proposal import Proposal
from penstock.search.request import PlanRequest

#: A search over orders of ops is worth its time where the budget has at least so many seconds: on a
#: new machine it first compiles its
#: loops, which takes most of ten.
SEARCHED_FROM_S = 20.0

#: Seconds and rounds of one such search; where rounds end it, it makes the same program each time.
#: Of pipelines of more ops than this
#: (stages x micro-batches) it would see too little.
SECONDS, ROUNDS, MOST_OPS = 3.0, 300, 400


def made_to_measure(request: PlanRequest, found: Sequence[Scored]) -> Iterator[Proposal]:
    """For each way that was found, where it has one stage on every rank and one copy of each:
    programs of the same cut, ordered for its own costs. Those of the zero-bubble heuristic; with a
    budget of 20 s or more, for the first, also that of a search within the memory that activations
    may take there. None where schedules were named.
    """
    if request.schedules is not None or (request.weights or "flush") != "flush":
        return
    plain = [each for each in found if _is_plain(each)]
    for each in plain:
        proposal = each.laid.proposal
        for name in ("zb-auto", "zb-1p"):
            yield Proposal(
                proposal.lengths,
                name,
                proposal.micro_batches,
                (),
                each.recompute,
                None,
                proposal.devices,
            )
    if request.budget_s < SEARCHED_FROM_S:
        return
    for each in plain[:1]:
        proposal, room = each.laid.proposal, _room(each)
        if room is not None and proposal.stages * proposal.micro_batches <= MOST_OPS:
            limits: tuple[tuple[str, Option], ...] = (
                ("memory_limit", room),
                ("budget_s", SECONDS),
                ("max_rounds", ROUNDS),
            )
            yield Proposal(
                proposal.lengths,
                "synthesised",
                proposal.micro_batches,
                limits,
                each.recompute,
                None,
                proposal.devices,
            )


def _is_plain(each: Scored) -> bool:
    made = each.laid.made
    alone = (
        all(stages == (rank,) for rank, stages in enumerate(made.stages_of_rank))
        and made.stages > 1
    )
    return alone and made.slicing is None and made.stream is None


def _room(found: Scored) -> tuple[int, ...] | None:
    """Per rank, the bytes that activations may take beside the weights; None where something is
    recomputed, or nothing is left.
    """
    laid = found.laid
    held = laid.costs.spread("weight_bytes", laid.made.stages) or ()
    room = tuple(
        int(laid.request.memory_bytes(rank) - weights) for rank, weights in enumerate(held)
    )
    return room if found.recompute == "never" and all(each > 0 for each in room) else None
