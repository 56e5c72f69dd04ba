"""What bounds a timeline, in a few words."""

from __future__ import annotations

from collections import defaultdict

from penstock.event import Timeline

#: Below this share of work on the busiest rank, waiting is what costs.
BUSY = 2 / 3


def bound_by(timeline: Timeline, seconds: float | None = None) -> str:
    """`"compute of stage 2"`, `"link 0→1"` or `"bubble"`, with the share of the step that it takes.

    The busiest link (both directions together) bounds it if it is busier than the busiest rank; else that rank's compute, unless
    it waits more than a third of the time, which is bubble: filling, draining, and latencies.

    Args:
        timeline: of the step.
        seconds: what the step takes, where that is not all from the first event to the last: other batches of a stream run beside
            these.
    """
    whole = timeline.makespan if seconds is None else seconds
    if not whole:
        return "nothing: it takes no time"
    stages: defaultdict[tuple[int, int], float] = defaultdict(float)
    links: defaultdict[tuple[int, int], float] = defaultdict(float)
    ways: defaultdict[tuple[int, int], float] = defaultdict(float)
    for rank, op, start, end, _, to_rank in timeline.events:
        if to_rank is None:
            stages[rank, op.stage] += end - start
        else:
            links[min(rank, to_rank), max(rank, to_rank)] += end - start
            ways[rank, to_rank] += end - start
    busiest = max(range(timeline.ranks), key=lambda rank: timeline.busy[rank])
    work = timeline.busy[busiest] / whole
    low, high = max(links, key=lambda pair: links[pair], default=(0, 0))
    carried = links.get((low, high), 0.0) / whole
    if carried > 1:  # a stream may keep both directions busy at once
        return f"link {low}→{high}, {max(ways[low, high], ways[high, low]) / whole:.0%} of the step in one direction"
    if carried > work:
        return f"link {low}→{high}, {carried:.0%} of the step"
    if work < BUSY:
        return f"bubble, {1 - sum(timeline.busy) / (timeline.ranks * whole):.0%} of the step"
    stage = max((key for key in stages if key[0] == busiest), key=lambda key: stages[key])[1]
    return f"compute of stage {stage}, {work:.0%} of the step"
