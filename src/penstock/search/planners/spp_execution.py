"""SPP's PE: a list schedule of micro-batches on stages and channels."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

#: A block: whether it is a forward, and its micro-batch. Its resource is that whose queue it is in.
#: In a queue, a heap, backwards come first, since False is less than True.
_Block = tuple[bool, int]


def makespan(
    forward: Sequence[float],
    backward: Sequence[float],
    channel: Sequence[float],
    sync: Sequence[float],
    micro_batches: int,
) -> float:
    """Return the seconds until all stages have their synced gradients.

    Every stage is a resource, and so is every channel between two of them, for both directions. A
    block of a micro-batch is available once the block before it on its path is done: stage 0,
    channel 0, … the last stage, and back. Whenever a resource is free it starts the first available
    block in this order: backwards, then forwards, each by micro-batch. So the last stage runs each
    backward right after its forward, and no resource waits on purpose: memory is no limit here.
    Replicas of a stage share each micro-batch, and sync their gradients after the stage's last
    backward.

    >>> makespan([1, 1, 1], [2, 2, 2], [0, 0], [0, 0, 0], micro_batches=6)
    24.0

    Args:
        forward, backward: seconds of every stage for a micro-batch.
        channel: seconds of every boundary for a micro-batch, one way.
        sync: seconds of every stage's gradient sync.
        micro_batches: number of micro-batches.

    Source: Luo et al. 2022, SPP, pipeline execution scheduler; docs/literature/spp.md, which has no
    more of the order than this.
    """
    stages = len(forward)
    # By resource, seconds of a forward and of a backward block. Even resources are the stages, odd
    # ones the channels between them.
    seconds: list[tuple[float, float]] = []
    for stage in range(stages):
        seconds.append((forward[stage], backward[stage]))
        if stage + 1 < stages:
            seconds.append((channel[stage], channel[stage]))
    last = len(seconds) - 1
    waiting: list[list[_Block]] = [[] for _ in seconds]
    free = [True] * len(seconds)
    waiting[0] = [(True, number) for number in range(micro_batches)]  # sorted, so it is a heap
    running: list[tuple[float, int, _Block]] = []
    stage_end = [0.0] * stages
    now, changed = 0.0, {0}
    while True:
        for resource in changed:
            if free[resource] and waiting[resource]:
                block = heapq.heappop(waiting[resource])
                free[resource] = False
                is_forward, _ = block
                forward_s, backward_s = seconds[resource]
                end = now + (forward_s if is_forward else backward_s)
                heapq.heappush(running, (end, resource, block))
        if not running:
            return max(end + sync_s for end, sync_s in zip(stage_end, sync, strict=True))
        # All blocks that end now end before any other starts: else the choice of a resource would
        # depend on the order of equal times.
        now = running[0][0]
        changed = set()
        while running and running[0][0] == now:
            _, resource, block = heapq.heappop(running)
            free[resource] = True
            changed.add(resource)
            if resource % 2 == 0:
                stage_end[resource // 2] = now
            next_resource, next_block = _next_block(resource, block, last)
            if next_resource >= 0:
                heapq.heappush(waiting[next_resource], next_block)
                changed.add(next_resource)


def _next_block(resource: int, block: _Block, last: int) -> tuple[int, _Block]:
    """Return the next block on a micro-batch's path, and its resource; -1 at the end."""
    is_forward, number = block
    if is_forward and resource == last:
        return last, (False, number)
    return resource + (1 if is_forward else -1), block
