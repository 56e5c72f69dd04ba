"""What bounds a timeline, in a few words."""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from penstock.event import Timeline

#: Below this share of work on the busiest rank, waiting is what costs.
BUSY = 2 / 3


def bound_by(timeline: Timeline, seconds: float | None = None) -> str:
    """`"compute of stage 2"`, `"link 0→1"` or `"bubble"`, with the share of the step that it takes.

    The busiest link (both directions together) bounds it if it is busier than the busiest rank;
    else that rank's compute, unless it waits more than a third of the time, which is bubble:
    filling, draining, and latencies.

    Args:
        timeline: of the step.
        seconds: what the step takes, where that is not all from the first event to the last: other
        batches of a stream run beside
            these.
    """
    whole = timeline.makespan if seconds is None else seconds
    if not whole:
        return "nothing: it takes no time"
    stages, ways = _sums(timeline)
    links: defaultdict[tuple[int, int], float] = defaultdict(float)
    for (rank, to_rank), taken in ways.items():
        links[min(rank, to_rank), max(rank, to_rank)] += taken
    busiest = max(range(timeline.ranks), key=lambda rank: timeline.busy[rank])
    work = timeline.busy[busiest] / whole
    low, high = max(links, key=lambda pair: links[pair], default=(0, 0))
    carried = links.get((low, high), 0.0) / whole
    if carried > 1:  # a stream may keep both directions busy at once
        return f"link {low}→{high}, {max(ways.get((low, high), 0.0), ways.get((high, low), 0.0)) / whole:.0%} of the step in one direction"
    if carried > work:
        return f"link {low}→{high}, {carried:.0%} of the step"
    if work < BUSY:
        return f"bubble, {1 - sum(timeline.busy) / (timeline.ranks * whole):.0%} of the step"
    stage = max((key for key in stages if key[0] == busiest), key=lambda key: stages[key])[1]
    return f"compute of stage {stage}, {work:.0%} of the step"


def _sums(timeline: Timeline) -> tuple[dict[tuple[int, int], float], dict[tuple[int, int], float]]:
    """Seconds of every stage on every rank, and of every directed link."""
    log = timeline.log
    ops, moves = log.ops, log.moves
    count = 1 + int(ops.stage.max(initial=0))
    work = np.bincount(ops.rank.astype(np.int64) * count + ops.stage, weights=log.end - log.start)
    stages = {
        (int(key) // count, int(key) % count): float(work[key]) for key in np.flatnonzero(work)
    }
    if moves is None:
        return stages, {}
    crossing = np.flatnonzero(moves.link >= 0)
    to_rank = moves.to_rank[moves.link[crossing]]
    ranks = timeline.ranks
    taken = np.bincount(
        ops.rank[crossing].astype(np.int64) * ranks + to_rank,
        weights=moves.end[crossing] - moves.start[crossing],
    )
    return stages, {
        (int(key) // ranks, int(key) % ranks): float(taken[key]) for key in np.flatnonzero(taken)
    }
