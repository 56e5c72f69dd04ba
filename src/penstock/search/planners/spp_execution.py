"""SPP's PE: list scheduling of micro-batches on stages and channels."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

#: A block: whether it is a forward, its micro-batch; the resource is known where it waits.
_Block = tuple[bool, int]


def makespan(
    forward: Sequence[float],
    backward: Sequence[float],
    channel: Sequence[float],
    sync: Sequence[float],
    micro_batches: int,
) -> float:
    """Seconds until all stages have their summed gradients.

    Every stage is a resource, and so is every channel between two of them, for both directions. A
    block of a micro-batch is available once the block before it on its way is done: stage 0,
    channel 0, … the last stage, and back. Whenever a resource is free it starts the first block
    that is available, of the order: backwards, then forwards, each by micro-batch. So the last
    stage runs each backward right after its forward, and nothing waits on purpose: memory is no
    limit here. Copies of a stage share each micro-batch, and add up their gradients after the
    stage's last backward.

    >>> makespan([1, 1, 1], [2, 2, 2], [0, 0], [0, 0, 0], micro_batches=6)
    24.0

    Args:
        forward, backward, sync: seconds of every stage; the first two of a micro-batch, the last of
        a batch. channel: seconds of every boundary, one way. micro_batches: of a batch.

    Source: Luo et al. 2022, SPP, pipeline execution scheduler; LITERATURE 8.3, which has no more of
    the order than this.
    """
    stages = len(forward)
    last = 2 * stages - 2  # resources are in the order of the way: stage, channel, stage, …
    seconds = [
        (forward[i // 2], backward[i // 2]) if i % 2 == 0 else (channel[i // 2], channel[i // 2])
        for i in range(last + 1)
    ]
    waiting: list[list[_Block]] = [[] for _ in range(last + 1)]
    free = [True] * (last + 1)
    waiting[0] = [(True, number) for number in range(micro_batches)]  # sorted, so it is a heap
    done: list[tuple[float, int, _Block]] = []
    now, ended = 0.0, [0.0] * stages
    touched = {0}
    while True:
        for resource in touched:
            if free[resource] and waiting[resource]:
                block = heapq.heappop(waiting[resource])
                free[resource] = False
                heapq.heappush(done, (now + seconds[resource][not block[0]], resource, block))
        if not done:
            return max(end + met for end, met in zip(ended, sync, strict=True))
        now = done[0][0]
        touched = set()
        while done and done[0][0] == now:
            _, resource, (is_forward, number) = heapq.heappop(done)
            free[resource] = True
            touched.add(resource)
            if resource % 2 == 0:
                ended[resource // 2] = now
            if is_forward and resource == last:
                after, block = last, (False, number)
            else:
                after, block = resource + (1 if is_forward else -1), (is_forward, number)
            if after >= 0:
                heapq.heappush(waiting[after], block)
                touched.add(after)
