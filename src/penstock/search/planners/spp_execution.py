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
    # By resource, seconds of a forward and of a backward block. Even resources are the stages, odd
    # ones the channels between them.
    seconds: list[tuple[float, float]] = [(forward[0], backward[0])]
    for hop_s, forward_s, backward_s in zip(channel, forward[1:], backward[1:], strict=True):
        seconds += [(hop_s, hop_s), (forward_s, backward_s)]
    execution = _Execution(seconds, micro_batches)
    execution.start_blocks({0})
    while execution.running:
        execution.start_blocks(execution.end_blocks())
    stage_ends = execution.last_end[::2]
    return max(end + sync_s for end, sync_s in zip(stage_ends, sync, strict=True))


class _Execution:
    """The blocks that run and wait at a moment.

    Attributes:
        running: heap of the running blocks, as (end, resource, block).
        last_end: by resource, the end of the last block that it has run.
    """

    def __init__(self, seconds: Sequence[tuple[float, float]], micro_batches: int) -> None:
        self.running: list[tuple[float, int, _Block]] = []
        self.last_end = [0.0] * len(seconds)
        self._seconds = seconds
        self._now = 0.0
        self._free = [True] * len(seconds)
        self._waiting: list[list[_Block]] = [[] for _ in seconds]
        # Sorted, so it is a heap.
        self._waiting[0] = [(True, number) for number in range(micro_batches)]

    def start_blocks(self, resources: set[int]) -> None:
        """Start the first waiting block of each of these resources that is free."""
        for resource in resources:
            if self._free[resource] and self._waiting[resource]:
                block = heapq.heappop(self._waiting[resource])
                is_forward, _ = block
                forward_s, backward_s = self._seconds[resource]
                end = self._now + (forward_s if is_forward else backward_s)
                heapq.heappush(self.running, (end, resource, block))
                self._free[resource] = False

    def end_blocks(self) -> set[int]:
        """Advance to the next end of a block.

        All blocks that end at this moment do so before any other starts: otherwise the choice of a
        resource would depend on the order of equal times.

        Returns:
            The resources that have become free, or have got another waiting block.
        """
        self._now = self.running[0][0]
        changed = set()
        while self.running and self.running[0][0] == self._now:
            _, resource, block = heapq.heappop(self.running)
            self._free[resource] = True
            self.last_end[resource] = self._now
            changed.add(resource)
            following = _next_block(resource, block, len(self._seconds) - 1)
            if following is not None:
                next_resource, next_block = following
                heapq.heappush(self._waiting[next_resource], next_block)
                changed.add(next_resource)
        return changed


def _next_block(resource: int, block: _Block, last: int) -> tuple[int, _Block] | None:
    """Return the next block on a micro-batch's path, after its resource; None at the end.

    Args:
        resource, block: where the micro-batch is.
        last: the resource of the last stage.
    """
    is_forward, number = block
    if is_forward:
        return (last, (False, number)) if resource == last else (resource + 1, block)
    return (resource - 1, block) if resource > 0 else None
