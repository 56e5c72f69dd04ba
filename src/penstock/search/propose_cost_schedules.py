"""Propose schedules that are built from the costs of the best candidates of a search."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from penstock.plan.plan import Option
from penstock.schedule.recompute import Recompute
from penstock.search.instantiate import Evaluated
from penstock.search.proposal import Proposal
from penstock.search.request import PlanRequest

#: Least budget in seconds for a search over orders of ops, which takes some seconds.
SEARCHED_FROM_S = 20.0

#: Rounds of one such search, and the seconds after which the clock stops it. One core does the
#: rounds in 2.5 s.
ROUNDS, SECONDS = 100, 6.0

#: Such a search is not started for more ops (stages x micro-batches): it would explore too few of
#: their orders.
MOST_OPS = 400


def cost_schedules(request: PlanRequest, candidates: Sequence[Evaluated]) -> Iterator[Proposal]:
    """Yield proposals with the cut of each candidate and programs ordered for its costs.

    Candidates count if they have one stage per rank and no replicas, see `is_plain`. The programs
    are those of the zero-bubble heuristic; with a budget of 20 s or more, for the first candidate
    also the result of a search within the memory that activations may use. Nothing is proposed if
    schedules were named or the weight rule is not "flush".
    """
    if request.schedules is not None or (request.weights or "flush") != "flush":
        return
    plain = [candidate for candidate in candidates if is_plain(candidate)]
    for candidate in plain:
        for name in ("zb-auto", "zb-1p"):
            yield _proposal(candidate, name)
    if request.budget_s < SEARCHED_FROM_S or not plain:
        return
    fastest = plain[0]  # candidates are in order of their time
    room = _activation_room(fastest)
    ops = fastest.placed.proposal.stages * fastest.placed.proposal.micro_batches
    if room is not None and ops <= MOST_OPS:
        limits: tuple[tuple[str, Option], ...] = (
            ("memory_limit", room),
            ("budget_s", SECONDS),
            ("max_rounds", ROUNDS),
        )
        yield replace(_proposal(fastest, "synthesised"), options=limits)


def _proposal(candidate: Evaluated, schedule: str) -> Proposal:
    """Return the proposal of a candidate with another schedule, which has no options."""
    proposal = candidate.placed.proposal
    return Proposal(
        proposal.lengths,
        schedule,
        proposal.micro_batches,
        recompute=candidate.recompute,
        devices=proposal.devices,
    )


def is_plain(candidate: Evaluated) -> bool:
    """Return whether a candidate has several stages, stage r on rank r alone, whole micro-batches
    and a flush.
    """
    schedule = candidate.placed.schedule
    if schedule.stages == 1 or schedule.slicing is not None or schedule.stream is not None:
        return False
    return all(stages == (rank,) for rank, stages in enumerate(schedule.stages_of_rank))


def _activation_room(candidate: Evaluated) -> tuple[int, ...] | None:
    """Return per rank the bytes that activations may use besides the weights; None if the candidate
    recomputes, or a rank has none.
    """
    if candidate.recompute is not Recompute.NEVER:
        return None
    placed = candidate.placed
    weight_bytes = placed.costs.spread("weight_bytes", placed.schedule.stages) or ()
    room = tuple(
        int(placed.request.memory_bytes(rank) - size) for rank, size in enumerate(weight_bytes)
    )
    return room if min(room, default=1) > 0 else None
