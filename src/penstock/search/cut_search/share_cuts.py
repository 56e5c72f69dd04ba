"""Good cuts are found with one schedule and used with all: local search on the cuts of every kind
of candidate, and each result tried with the other schedules.

A cut that suits the links, say after a layer with a small output, suits most schedules. The bounds
of `explore_cuts` need the work of a search of their own for every schedule to see that.
"""

from __future__ import annotations

import math
from dataclasses import replace

from penstock.search.cut_search.refine_cut import WORTH, refine_cut
from penstock.search.instantiate import Evaluated, by_time
from penstock.search.plan_search import PlanSearch
from penstock.search.proposal import Proposal

#: Candidates are refined up to this multiple of the best time: the largest gain of a local search
#: over the cut that balances stages was 21 % (VGG-16 on 4 hosts with links of 100 Mbit/s).
NEAR = 1.3

#: A schedule with its stages and replicas, the number of micro-batches, and the devices.
_Kind = tuple[object, int, tuple[int, ...]]


def share_cuts(search: PlanSearch) -> None:
    """Refine the cuts of all candidates near the best time, the fastest first, and evaluate every
    other kind of the same stages with the result, until nothing is left or the budget is spent.
    """
    if search.request.by != "bottleneck":
        return
    tried = {candidate.placed.proposal for candidate in search.feasible}
    refined: dict[_Kind, float] = {}
    candidate = _next(search, refined)
    while candidate is not None and not search.is_over:
        better = refine_cut(search, candidate, tried)
        refined[_kind(candidate)] = better.step_s
        for proposal in _with_the_same_cut(search, better):
            if proposal not in tried and not search.is_over:
                tried.add(proposal)
                search.evaluate(proposal)
        candidate = _next(search, refined)


def _next(search: PlanSearch, refined: dict[_Kind, float]) -> Evaluated | None:
    """Return the fastest candidate of a kind that was not refined, or that became faster by another
    kind's cut; None if there is none near the best.
    """
    names = {facts.name for facts in search.request.families()}
    for candidate in sorted(search.feasible, key=by_time):
        if candidate.step_s > NEAR * search.best_s:
            return None
        proposal = candidate.placed.proposal
        is_better = candidate.step_s < refined.get(_kind(candidate), math.inf) * (1 - WORTH)
        if proposal.schedule in names and proposal.stages > 1 and is_better:
            return candidate
    return None


def _kind(candidate: Evaluated) -> _Kind:
    """Return what is refined once: the kind, its number of micro-batches and its devices."""
    proposal = candidate.placed.proposal
    return candidate.kind, proposal.micro_batches, proposal.devices


def _with_the_same_cut(search: PlanSearch, refined: Evaluated) -> list[Proposal]:
    """Return proposals with the cut of a candidate: with half and twice its micro-batches, where
    the request allows that, and with the other schedules in as many stages on the same devices.
    """
    cut = refined.placed.proposal
    pipelines = cut.replicas if isinstance(cut.replicas, int) else 1
    counts = search.request.micro_batch_counts(pipelines)
    proposals = []
    for micro_batches in (cut.micro_batches // 2, cut.micro_batches * 2):
        if micro_batches in counts:
            proposals.append(replace(cut, micro_batches=micro_batches))
    for candidate in sorted(search.feasible, key=by_time):
        other = candidate.placed.proposal
        if _division(other) == _division(cut):
            proposals.append(replace(other, lengths=cut.lengths))
    return proposals


def _division(proposal: Proposal) -> tuple[object, ...]:
    """Return what proposals have in common that can have the same cut."""
    return proposal.stages, proposal.replicas, proposal.devices
