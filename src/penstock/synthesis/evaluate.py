"""Kernel: start times of the ops of encoded programs.

The rules are those of `schedule.kernels`, which walk a dependency graph that is built once. Here
the order of the ops changes with every move of a search, so the inputs of an op are found by
counting; the tests compare both.
"""

from __future__ import annotations

from penstock.compiled import compiled
from penstock.synthesis.arrays import (
    HOLD,
    RANK,
    RECEIVER,
    UP,
    UPDATE,
    Encoding,
    F,
    Floats,
    Spec,
    W,
    Workspace,
)

#: Columns of `Workspace.turn`.
PLACE, RING, IN_RING = 0, 1, 2


@compiled
def evaluate(spec: Spec, encoding: Encoding, work: Workspace) -> float:
    """Return the seconds until the last op ends, updates included; -1 if the programs deadlock.

    Ranks run their programs in turn, each as far as possible; a message queues its receiver again.
    So every op is considered once, and once more for each message that it waits for.
    """
    reset(spec, work)
    codes, lengths, copies, cost = encoding.codes, encoding.lengths, spec.copies, spec.cost
    start, cause, arrive, maker, done = work.start, work.cause, work.arrive, work.maker, work.done
    link, busy, turn, clock = work.link, work.busy, work.turn, work.free
    ranks, length = codes.shape
    # With several stages on a rank, a stage can update while the rank waits for another's message.
    updates_in_gaps = spec.copies_of.shape[1] > 1 and len(spec.counts) == 1
    # A ring of the ranks that can continue.
    for rank in range(ranks):
        turn[rank, RING], turn[rank, IN_RING] = rank, 1
    first, waiting, left = 0, ranks, 0
    while waiting:
        rank = turn[first, RING]
        first = (first + 1) % ranks
        waiting -= 1
        turn[rank, IN_RING] = 0
        place, free = turn[rank, PLACE], clock[rank]
        while place < lengths[rank]:
            copy, kind = codes[rank, place] >> 2, codes[rank, place] & 3
            way = 0 if kind == F else 1  # down the route with forwards, up with backwards
            op = rank * length + place
            # 1. The op starts when its rank is free and, unless it is a W, its message has arrived.
            begin, why, k = free, op - 1 if place else -1, done[copy, way]
            if kind != W:
                arrived = arrive[way, copy, k]
                if arrived < 0.0:
                    break  # the message will queue this rank again
                done[copy, way] = k + 1
                if arrived > free:
                    if updates_in_gaps:
                        _update_in_gap(spec, work, rank, arrived)
                    begin, why = arrived, maker[way, copy, k]
            start[rank, place], cause[rank, place] = begin, why
            free = clock[rank] = begin + cost[copy, kind]
            place += 1
            if kind >= W:  # W or B
                done[copy, 2] += 1
            receiver = copies[copy, RECEIVER + way] if kind != W else -1
            if receiver < 0:
                continue
            # 2. It sends its value, and the rank that receives it can continue.
            target, end, source = copies[receiver, RANK], free, op
            if target != rank:
                if link[rank, target] > end:
                    source = busy[rank, target]  # the cause of the arrival is the message before
                busy[rank, target] = source
                end = send(link, rank, target, end, cost[copy, UP + way])
                if turn[target, IN_RING] == 0:
                    turn[target, IN_RING] = 1
                    turn[(first + waiting) % ranks, RING] = target
                    waiting += 1
            arrive[way, receiver, k], maker[way, receiver, k] = end, source
        turn[rank, PLACE] = place
    for rank in range(ranks):
        left += lengths[rank] - turn[rank, PLACE]
    return -1.0 if left else end_of_updates(spec, work)


@compiled
def send(link: Floats, rank: int, target: int, ready: float, seconds: float) -> float:
    """Send a message that is ready at `ready` over the link from `rank` to `target`, once that is
    free. Return its arrival. `link` is that of the workspace.
    """
    arrival: float = max(ready, link[rank, target]) + seconds
    link[rank, target] = arrival
    return arrival


@compiled
def reset(spec: Spec, work: Workspace) -> None:
    """Reset a workspace to the state before the first op."""
    for copy in range(len(spec.copies)):
        for way in range(2):
            # The first stage sends no gradients and receives no activations, the last one the other
            # way round: that input is there from the start.
            at = 0.0 if spec.copies[copy, RECEIVER + 1 - way] < 0 else -1.0
            for k in range(work.arrive.shape[2]):
                work.arrive[way, copy, k], work.maker[way, copy, k] = at, -1
        for column in range(4):
            work.done[copy, column] = 0
    for rank in range(len(work.free)):
        work.free[rank] = 0.0
        work.turn[rank, PLACE] = work.turn[rank, IN_RING] = 0
        for other in range(len(work.free)):
            work.link[rank, other] = 0.0


@compiled
def _update_in_gap(spec: Spec, work: Workspace, rank: int, until: float) -> None:
    """Run due updates in the idle time of `rank` before `until`, where they fit."""
    for i in range(spec.copies_of.shape[1]):
        copy = spec.copies_of[rank, i]
        if copy >= 0 and work.done[copy, 2] == spec.counts[0] and work.done[copy, 3] == 0:
            end = work.free[rank] + spec.cost[copy, UPDATE]
            if end <= until:
                work.free[rank] = end
                work.done[copy, 3] = 1


@compiled
def end_of_updates(spec: Spec, work: Workspace) -> float:
    """Return when the last rank has run its remaining updates. The updates of two copies of a stage
    sync at the end.
    """
    last, ranks = 0.0, len(work.free)
    for rank in range(ranks):
        end, same_stage = work.free[rank], 0
        if len(spec.counts) > 1:
            # Rank r and its mirror hold copies of the same two stages, whose gradients are summed:
            # both wait for the later one.
            end = max(end, work.free[ranks - 1 - rank])
            # The middle rank has both copies of one stage, which need one update.
            same_stage = 1 if 2 * rank == ranks - 1 else 0
        for i in range(spec.copies_of.shape[1] - same_stage):
            copy = spec.copies_of[rank, i]
            if copy >= 0 and work.done[copy, 3] == 0:
                end += spec.cost[copy, UPDATE]
        last = max(last, end)
    return last


@compiled
def is_valid(spec: Spec, encoding: Encoding, work: Workspace, rank: int) -> bool:
    """Return whether the codes of `rank` keep the order of ops within its copies and its memory
    limit. Changes `work.done`.
    """
    done, cost, codes, limit = work.done, spec.cost, encoding.codes, spec.limit[rank]
    for i in range(spec.copies_of.shape[1]):
        copy = spec.copies_of[rank, i]
        for column in range(3 if copy >= 0 else 0):
            done[copy, column] = 0
    held = 0.0
    for place in range(encoding.lengths[rank]):
        copy, kind = codes[rank, place] >> 2, codes[rank, place] & 3
        if kind == F:
            done[copy, 0] += 1
            held += cost[copy, HOLD]
            if held > limit:
                return False
            continue
        # The k-th W follows the k-th I, and the k-th I or B the k-th F.
        finished, needed = (2, 1) if kind == W else (1, 0)
        if done[copy, finished] >= done[copy, needed]:
            return False
        if kind != W:
            done[copy, 1] += 1
        if kind >= W:  # W or B
            done[copy, 2] += 1
            held -= cost[copy, HOLD]
    return True
