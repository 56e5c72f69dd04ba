"""Local search on a cut: move one boundary at a time while simulation improves."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate

from penstock.search.instantiate import Evaluated
from penstock.search.plan_search import PlanSearch
from penstock.search.proposal import Proposal

#: Numbers of layers by which a boundary is moved.
STEPS = (1, -1, 2, -2)

#: Relative improvement that is worth another round.
WORTH = 1e-4


def refine_cut(
    search: PlanSearch, candidate: Evaluated, tried: set[Proposal] | None = None
) -> Evaluated:
    """Return the best cut that is reached by moving boundaries, each move simulated; `candidate`
    itself where none helps.

    The exact cut minimizes the slowest stage. The time of a step also depends on filling and
    draining, where stages that are not the slowest count, and on which of them wait for messages.

    Args:
        search: the search.
        candidate: to start from.
        tried: proposals not to evaluate again; those that are evaluated here are added.
    """
    names = {facts.name for facts in search.request.families()}
    if search.request.by != "bottleneck" or candidate.placed.proposal.schedule not in names:
        return candidate
    tried = set() if tried is None else tried
    tried.add(candidate.placed.proposal)
    while not search.is_over:
        better = _better_neighbour(search, candidate, tried)
        if better is None:
            return candidate
        candidate = better
    return candidate


def _better_neighbour(
    search: PlanSearch, candidate: Evaluated, tried: set[Proposal]
) -> Evaluated | None:
    """Return the first neighbouring cut that is faster by enough, or None."""
    message_bytes = [layer.output_bytes_per_sample for layer in search.request.profile]
    for lengths in _neighbours(candidate, message_bytes):
        proposal = replace(candidate.placed.proposal, lengths=lengths)
        if proposal in tried:
            continue
        tried.add(proposal)
        if search.is_over:
            return None
        neighbour = search.evaluate(proposal)
        if neighbour is not None and neighbour.step_s < candidate.step_s * (1 - WORTH):
            return neighbour
    return None


def _neighbours(candidate: Evaluated, message_bytes: Sequence[float]) -> Iterator[tuple[int, ...]]:
    """Yield the cuts that differ in one boundary, those at the busiest ranks first: by a few layers,
    then by as many as lead to a smaller message.
    """
    proposal = candidate.placed.proposal
    busy = candidate.steady_state.timeline.busy if candidate.steady_state else ()
    stage_load = []
    for ranks in candidate.placed.schedule.ranks_of_stage:
        stage_load.append(max(busy[rank] for rank in ranks))
    boundaries = sorted(
        range(proposal.stages - 1),
        key=lambda boundary: -max(stage_load[boundary], stage_load[boundary + 1]),
    )
    ends = list(accumulate(proposal.lengths))
    for boundary in boundaries:
        first = ends[boundary - 1] if boundary else 0
        smaller = _smaller_messages(message_bytes, first, ends[boundary], ends[boundary + 1])
        for step in dict.fromkeys((*STEPS, *smaller)):
            lengths = list(proposal.lengths)
            lengths[boundary] += step
            lengths[boundary + 1] -= step
            if min(lengths) >= 1:
                yield tuple(lengths)


def _smaller_messages(
    message_bytes: Sequence[float], first: int, end: int, last: int
) -> Iterator[int]:
    """Yield the steps from a boundary to others between `first` and `last` after which less is sent
    than after all between: the nearest one first, in both directions.
    """
    for direction, limit in ((1, last), (-1, first)):
        least = message_bytes[end - 1]
        for other in range(end + direction, limit, direction):
            if message_bytes[other - 1] < least:
                least = message_bytes[other - 1]
                yield other - end
