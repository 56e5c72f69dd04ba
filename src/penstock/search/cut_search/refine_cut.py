"""Local search on a cut: move one boundary at a time while simulation improves."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

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
    message_bytes = [layer.output_bytes_per_sample for layer in search.request.profile]
    while not search.is_over:
        neighbours = (
            replace(candidate.placed.proposal, lengths=lengths)
            for lengths in _neighbours(candidate, message_bytes)
        )
        better = first_faster(search, candidate, neighbours, tried)
        if better is None:
            return candidate
        candidate = better
    return candidate


def first_faster(
    search: PlanSearch,
    candidate: Evaluated,
    neighbours: Iterable[Proposal],
    tried: set[Any],
    key: Callable[[Proposal], object] = lambda proposal: proposal,
) -> Evaluated | None:
    """Return the first neighbour that is faster than a candidate by enough, or None.

    The first and not the best: a round then costs a few simulations instead of all.

    Args:
        search: the search.
        candidate: to improve.
        neighbours: proposals to evaluate, in this order.
        tried: keys of proposals not to evaluate again; those that are evaluated here are added.
        key: returns what is equal for proposals that take the same time.
    """
    for proposal in neighbours:
        if key(proposal) in tried:
            continue
        tried.add(key(proposal))
        if search.is_over:
            return None
        neighbour = search.evaluate(proposal)
        if neighbour is not None and neighbour.step_s < candidate.step_s * (1 - WORTH):
            return neighbour
    return None


def _neighbours(candidate: Evaluated, message_bytes: Sequence[float]) -> Iterator[tuple[int, ...]]:
    """Yield the cuts that differ in one boundary, those at the busiest ranks first: by a few
    layers, then by as many as lead to a smaller message.
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
