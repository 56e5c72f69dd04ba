"""Describe what bounds a timeline."""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from penstock.event import Timeline

#: If the busiest rank works less than this share of the time, the bubble is the bottleneck.
BUSY = 2 / 3


def describe_bottleneck(timeline: Timeline, seconds: float | None = None) -> str:
    """Return `"compute of stage 2"`, `"link 0→1"` or `"bubble"`, with its share of the step.

    The busiest link (both directions together) is the bottleneck if it is busier than the busiest
    rank; else the compute of that rank, unless it waits more than a third of the time, which counts
    as bubble: filling, draining, and latencies.

    Args:
        timeline: of the step.
        seconds: seconds of the step, where they are not those from the first event to the last:
            other batches of a stream run at the same time.
    """
    whole = timeline.makespan if seconds is None else seconds
    if not whole:
        return "nothing: it takes no time"
    stage_seconds, directed_seconds = _sums(timeline)
    link_seconds: defaultdict[tuple[int, int], float] = defaultdict(float)
    for (rank, to_rank), transfer_s in directed_seconds.items():
        link_seconds[min(rank, to_rank), max(rank, to_rank)] += transfer_s
    busiest = max(range(timeline.ranks), key=lambda rank: timeline.busy[rank])
    work_share = timeline.busy[busiest] / whole
    low, high = max(link_seconds, key=lambda pair: link_seconds[pair], default=(0, 0))
    link_share = link_seconds.get((low, high), 0.0) / whole
    if link_share > 1:  # a stream may keep both directions busy at once
        up, down = directed_seconds.get((low, high), 0.0), directed_seconds.get((high, low), 0.0)
        return f"link {low}→{high}, {max(up, down) / whole:.0%} of the step in one direction"
    if link_share > work_share:
        return f"link {low}→{high}, {link_share:.0%} of the step"
    if work_share < BUSY:
        return f"bubble, {1 - sum(timeline.busy) / (timeline.ranks * whole):.0%} of the step"
    stages_of_busiest = [key for key in stage_seconds if key[0] == busiest]
    _, stage = max(stages_of_busiest, key=lambda key: stage_seconds[key])
    return f"compute of stage {stage}, {work_share:.0%} of the step"


def _sums(timeline: Timeline) -> tuple[dict[tuple[int, int], float], dict[tuple[int, int], float]]:
    """Return the seconds of every stage on every rank, and of every link in each direction."""
    log = timeline.log
    ops, moves = log.ops, log.moves
    count = 1 + int(ops.stage.max(initial=0))
    # One key for (rank, stage), so that a single bincount adds up all pairs.
    work = np.bincount(ops.rank.astype(np.int64) * count + ops.stage, weights=log.end - log.start)
    stage_seconds = {
        (int(key) // count, int(key) % count): float(work[key]) for key in np.flatnonzero(work)
    }
    if moves is None:
        return stage_seconds, {}
    crossing = np.flatnonzero(moves.link >= 0)
    to_rank = moves.to_rank[moves.link[crossing]]
    ranks = timeline.ranks
    transfers = np.bincount(
        ops.rank[crossing].astype(np.int64) * ranks + to_rank,
        weights=moves.end[crossing] - moves.start[crossing],
    )
    directed_seconds = {
        (int(key) // ranks, int(key) % ranks): float(transfers[key])
        for key in np.flatnonzero(transfers)
    }
    return stage_seconds, directed_seconds
