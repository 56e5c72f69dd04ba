"""Local search on the devices of a candidate: exchange two, or one for an unused one, while
simulation improves.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations

from penstock.search.cut_search.refine_cut import first_faster, refine_cut
from penstock.search.instantiate import Evaluated
from penstock.search.plan_search import PlanSearch
from penstock.search.proposal import Proposal
from penstock.search.shapes import placement_key

#: Candidates on more ranks are not changed: the number of exchanges grows with their square.
MOST_RANKS = 16


def refine_devices(search: PlanSearch, candidate: Evaluated) -> Evaluated:
    """Return the best candidate that is reached by exchanging devices, each exchange simulated with
    the same cut and, unless the cut is requested, with the lengths of the exchanged stages
    exchanged as well; `candidate` itself where none helps.
    """
    if candidate.placed.schedule.ranks > MOST_RANKS or search.request.cluster.ranks == 1:
        return candidate
    cluster = search.request.cluster

    def key(proposal: Proposal) -> object:
        """Return what is equal for proposals that differ by equal devices alone."""
        return placement_key(cluster, proposal.devices), proposal.lengths

    tried: set[object] = set()
    while not search.is_over:
        tried.add(key(replace(candidate.placed.proposal, devices=_devices_of(candidate))))
        better = first_faster(search, candidate, _exchanges(search, candidate), tried, key)
        if better is None:
            return candidate
        candidate = refine_cut(search, better)
    return candidate


def _exchanges(search: PlanSearch, candidate: Evaluated) -> Iterator[Proposal]:
    """Yield the proposals with two devices exchanged, or one for an unused one."""
    schedule, proposal = candidate.placed.schedule, candidate.placed.proposal
    devices = _devices_of(candidate)
    is_plain = all(stages == (rank,) for rank, stages in enumerate(schedule.stages_of_rank))
    moves_cuts = is_plain and search.request.by == "bottleneck"
    for a, b in combinations(range(len(devices)), 2):
        exchanged, lengths = list(devices), list(proposal.lengths)
        exchanged[a], exchanged[b] = exchanged[b], exchanged[a]
        yield replace(proposal, devices=tuple(exchanged))
        if moves_cuts and lengths[a] != lengths[b]:
            lengths[a], lengths[b] = lengths[b], lengths[a]
            yield replace(proposal, devices=tuple(exchanged), lengths=tuple(lengths))
    for unused in range(search.request.cluster.ranks):
        if unused not in devices:
            for place in range(len(devices)):
                exchanged = list(devices)
                exchanged[place] = unused
                yield replace(proposal, devices=tuple(exchanged))


def _devices_of(candidate: Evaluated) -> tuple[int, ...]:
    """Return the devices of a candidate's ranks."""
    ranks = candidate.placed.schedule.ranks
    return candidate.placed.proposal.devices[:ranks] or tuple(range(ranks))
