"""Local search on a cut: move layers over one boundary at a time while simulation improves."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from penstock.search.instantiate import Evaluated
from penstock.search.plan_search import PlanSearch

#: Numbers of layers by which a boundary is moved.
STEPS = (1, -1, 2, -2)

#: Relative improvement that is worth another round.
WORTH = 1e-4


def refine_cut(search: PlanSearch, candidate: Evaluated) -> Evaluated:
    """Return the best cut that is reached by moving boundaries, each move simulated; `candidate`
    itself where none helps.

    The exact cut minimizes the slowest stage. The time of a step also depends on filling and
    draining, where stages that are not the slowest count, and on which of them wait for messages.
    """
    names = {facts.name for facts in search.request.families()}
    if search.request.by != "bottleneck" or candidate.placed.proposal.schedule not in names:
        return candidate
    tried = {candidate.placed.proposal.lengths}
    while not search.is_over:
        better = _better_neighbour(search, candidate, tried)
        if better is None:
            return candidate
        candidate = better
    return candidate


def _better_neighbour(
    search: PlanSearch, candidate: Evaluated, tried: set[tuple[int, ...]]
) -> Evaluated | None:
    """Return the first neighbouring cut that is faster by enough, or None."""
    for lengths in _neighbours(candidate):
        if lengths in tried:
            continue
        tried.add(lengths)
        if search.is_over:
            return None
        neighbour = search.evaluate(replace(candidate.placed.proposal, lengths=lengths))
        if neighbour is not None and neighbour.step_s < candidate.step_s * (1 - WORTH):
            return neighbour
    return None


def _neighbours(candidate: Evaluated) -> Iterator[tuple[int, ...]]:
    """Yield the cuts that differ in one boundary, those at the busiest ranks first."""
    proposal = candidate.placed.proposal
    busy = candidate.steady_state.timeline.busy if candidate.steady_state else ()
    stage_load = []
    for ranks in candidate.placed.schedule.ranks_of_stage:
        stage_load.append(max(busy[rank] for rank in ranks))
    boundaries = sorted(
        range(proposal.stages - 1),
        key=lambda boundary: -max(stage_load[boundary], stage_load[boundary + 1]),
    )
    for boundary in boundaries:
        for step in STEPS:
            lengths = list(proposal.lengths)
            lengths[boundary] += step
            lengths[boundary + 1] -= step
            if min(lengths) >= 1:
                yield tuple(lengths)
