"""A cut made better by what simulation says: layers moved over one boundary at a time, as long as
that helps.
"""

from __future__ import annotations

from dataclasses import replace

from penstock.search.hunt import Hunt
from penstock.search.laid import Scored

#: Moves of a boundary by so many layers.
STEPS = (1, -1, 2, -2)

#: An improvement that is worth another round, relatively.
WORTH = 1e-4


def refined(hunt: Hunt, found: Scored) -> Scored:
    """The best cut that is reached by moving boundaries, each move simulated; `found` itself where
    none helps.

    The exact cut makes the slowest stage as fast as can be; what a step takes depends on filling
    and draining too, where stages that are not the slowest count, and on which of them wait for
    messages.
    """
    if hunt.request.by != "bottleneck" or found.laid.proposal.schedule not in _plain(hunt):
        return found
    tried = {found.laid.proposal.lengths}
    while not hunt.over:
        better = _neighbour(hunt, found, tried)
        if better is None:
            return found
        found = better
    return found


def _plain(hunt: Hunt) -> set[str]:
    return {facts.name for facts in hunt.request.families()}


def _neighbour(hunt: Hunt, found: Scored, tried: set[tuple[int, ...]]) -> Scored | None:
    """The first cut next to it that is faster by enough, boundaries of the busiest ranks first."""
    proposal, busy = found.laid.proposal, found.found.timeline.busy if found.found else ()
    held = found.laid.made.ranks_of_stage
    load = [max(busy[rank] for rank in ranks) for ranks in held]
    order = sorted(
        range(proposal.stages - 1), key=lambda boundary: -max(load[boundary], load[boundary + 1])
    )
    for boundary in order:
        for step in STEPS:
            lengths = list(proposal.lengths)
            lengths[boundary] += step
            lengths[boundary + 1] -= step
            cut = tuple(lengths)
            if min(cut) < 1 or cut in tried:
                continue
            tried.add(cut)
            if hunt.over:
                return None
            weighed = hunt.weigh(replace(proposal, lengths=cut))
            if weighed is not None and weighed.step_s < found.step_s * (1 - WORTH):
                return weighed
    return None
