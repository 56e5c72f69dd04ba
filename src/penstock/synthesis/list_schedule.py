"""Kernel: list scheduling by a priority rule, which gives every op a time at which it is due.

Ops are placed one at a time (Giffler and Thompson 1960). The rank whose next op could end first
places an op: of the ops that it could start soon, the one that is due first. The rule's patience
says how long the rank may stay idle for an op that is due earlier. No op that another rank places
later can make an input available before that first end, so that all ops that the rank could start
by then are known.

If an op is due at a fixed offset plus a constant pace times its micro-batch, the offsets are a
block that repeats, as in controllable memory's (Qi et al. 2024). Offsets that put I before all
other kinds give 1F1B, F before all others GPipe; W after all others fills bubbles. If ops are due
when a given program starts them, the rule approximately reproduces that program.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from penstock.compiled import compiled
from penstock.synthesis.arrays import (
    HOLD,
    RANK,
    RECEIVER,
    UP,
    B,
    Encoding,
    F,
    Floats,
    I,
    Ints,
    Spec,
    W,
    Workspace,
)
from penstock.synthesis.evaluate import end_of_updates, reset, send


class Rule(NamedTuple):
    """A priority rule.

    Attributes:
        due: (C, 3, M) when the k-th F, I or B, W of each copy are due.
        patience: (1,) 0: only ops that can start as early as any other; 1: also ops that can start
            before the first op could end; in proportion between.
        cap: (R,) memory to use, at most the limit.
        whole: (C, M) 1 where the backward is not split.
    """

    due: Floats
    patience: Floats
    cap: Floats
    whole: Ints


# `list_schedule` is one long function for speed: Numba counts references of every array that is
# passed to another function, which takes longer than placing an op.


@compiled
def list_schedule(spec: Spec, rule: Rule, encoding: Encoding, work: Workspace) -> float:
    """Write the programs that the rule makes. Return their makespan, or -1 if the rule's cap lets
    no op continue.

    Every turn of the loop places one op:

    1. For each rank whose choice may have changed, compute when the next F, the next I or B, and
       the next W of each of its copies could start and end. An op cannot start before its input is
       known, nor an F before the cap has memory for it.
    2. Choose the rank with the earliest possible end. There is none when all ops are placed, or
       when nothing fits the cap.
    3. Of this rank's ops that can start within its patience, choose the one that is due first.
    4. Append it to the rank's program, and send its value to the receiving copy, if there is one: a
       W has none, nor have the F of the last stage and the backward of the first.

    The choice may then have changed on this rank and on the receiving one; on all ranks if memory
    couples them. `done[copy, kind]` counts the placed ops, a B as an I and as a W.
    """
    reset(spec, work)
    codes, lengths = encoding.codes, encoding.lengths
    copies, cost, copies_of = spec.copies, spec.cost, spec.copies_of
    due, whole, cap, patience = rule.due, rule.whole, rule.cap, rule.patience[0]
    arrive, done, link, free = work.arrive, work.done, work.link, work.free
    ranks, stages, coupled = len(lengths), len(copies) // len(spec.counts), _coupled(spec, cap)
    # Per copy and kind (F, I or B, W), when its next op could start; infinite if it cannot yet.
    next_start = np.empty((len(copies), 3))
    # Per rank, the earliest start and the earliest end of its next ops.
    first_start, first_end = np.empty(ranks), np.empty(ranks)
    lengths[:] = 0
    unreleased = stages * spec.counts.sum()  # micro-batches of all copies without their W or B
    # The ranks to look at in step 1: the first `changes` of `changed`. At first all of them.
    changed, changes = np.arange(ranks + 1), ranks
    while True:
        # 1. When could the next ops of the changed ranks start and end?
        for i in range(changes):
            rank = changed[i]
            first_start[rank] = first_end[rank] = np.inf
            for j in range(copies_of.shape[1]):
                copy = copies_of[rank, j]
                for kind in range(3 if copy >= 0 else 0):
                    next_start[copy, kind] = np.inf
                    k = done[copy, kind]
                    # The k-th I or B follows the k-th F, the k-th W the k-th I.
                    possible = spec.counts[copy // stages] if kind == F else done[copy, kind - 1]
                    if k >= possible:
                        continue
                    ready = free[rank] if kind == W else arrive[kind, copy, k]
                    if ready < 0.0 or (kind == F and not _fits(spec, cap, done, copy, coupled)):
                        continue  # its input is not sent yet, or there is no memory for it
                    start = max(ready, free[rank])
                    code = B if kind == I and whole[copy, k] else kind
                    next_start[copy, kind] = start
                    first_start[rank] = min(first_start[rank], start)
                    first_end[rank] = min(first_end[rank], start + cost[copy, code])
        # 2. The rank whose next op could end first.
        rank = int(np.argmin(first_end))
        if first_end[rank] == np.inf:
            break
        # 3. Of its ops that can start by `until`, the one that is due first.
        until = first_start[rank] + patience * (first_end[rank] - first_start[rank])
        first_due, copy, kind = np.inf, -1, -1
        for i in range(copies_of.shape[1]):
            other = copies_of[rank, i]
            for other_kind in range(3 if other >= 0 else 0):
                k = done[other, other_kind]
                if next_start[other, other_kind] <= until and due[other, other_kind, k] < first_due:
                    first_due, copy, kind = due[other, other_kind, k], other, other_kind
        # 4. Place it.
        k = done[copy, kind]
        code = B if kind == I and whole[copy, k] else kind
        codes[rank, lengths[rank]] = 4 * copy + code
        lengths[rank] += 1
        end = free[rank] = next_start[copy, kind] + cost[copy, code]
        done[copy, kind] += 1
        done[copy, W] += code == B
        unreleased -= code >= W  # W or B
        receiver, target = copies[copy, RECEIVER + kind] if kind != W else -1, rank
        if receiver >= 0:
            target = copies[receiver, RANK]
            if target != rank:
                end = send(link, rank, target, end, cost[copy, UP + kind])
            arrive[kind, receiver, k] = end
        if not coupled:
            changed[0], changed[1], changes = rank, target, 1 if target == rank else 2
    return -1.0 if unreleased else end_of_updates(spec, work)


@compiled
def _coupled(spec: Spec, cap: Floats) -> bool:
    """Return whether it depends on other ranks which forwards fit on a rank: there are two routes,
    and some rank cannot hold a micro-batch of each.
    """
    for rank in range(len(cap) if len(spec.counts) > 1 else 0):
        both = 0.0
        for i in range(spec.copies_of.shape[1]):
            both += spec.cost[spec.copies_of[rank, i], HOLD]
        if both > cap[rank]:
            return True
    return False


@compiled
def _fits(spec: Spec, cap: Floats, done: Ints, copy: int, coupled: bool) -> bool:
    """Return whether a forward of `copy` leaves its rank within the cap, and all micro-batches in
    flight able to finish.
    """
    rank, stages = spec.copies[copy, RANK], len(spec.copies) // len(spec.counts)
    # Memory of the rank with the new forward; and if all micro-batches were in flight.
    held, most = spec.cost[copy, HOLD], 0.0
    # What the copy has in flight, and one micro-batch of every copy of the rank: one of these is
    # the new one, the other one is on the other route.
    with_other_route = spec.cost[copy, HOLD] * (done[copy, F] - done[copy, I])
    for i in range(spec.copies_of.shape[1]):
        other = spec.copies_of[rank, i]
        if other >= 0:
            held += spec.cost[other, HOLD] * (done[other, F] - done[other, W])
            with_other_route += spec.cost[other, HOLD]
            most += spec.cost[other, HOLD] * spec.counts[other // stages]
    if held > cap[rank]:
        return False
    if len(spec.counts) == 1:
        if spec.copies_of.shape[1] == 1 or most <= cap[rank]:
            return True
    elif not coupled:
        # If each route always leaves memory for one micro-batch of the other, both can finish as if
        # they were alone.
        return bool(with_other_route <= cap[rank])
    done[copy, F] += 1
    if coupled:
        all_can_finish = _routes_can_finish(spec, cap, done)
    else:
        all_can_finish = _rank_can_finish(spec, cap, done, rank)
    done[copy, F] -= 1
    return all_can_finish


@compiled
def _rank_can_finish(spec: Spec, cap: Floats, done: Ints, rank: int) -> bool:
    """Return whether all micro-batches in flight on one route can finish on `rank`.

    They finish one after the other, the oldest first, since micro-batches of a route stay in order.
    Each needs memory on its later stages while it and all micro-batches behind it hold theirs. A
    waiting W can run at once, so a micro-batch holds memory only until its I. The order is the same
    on all ranks, so every rank can be checked alone.
    """
    first = spec.copies_of[rank, 0]
    for i in range(spec.copies_of.shape[1]):
        copy = spec.copies_of[rank, i]
        if copy < 0:
            continue
        # Only these micro-batches can need the most memory: the oldest in flight, and of every
        # later stage the next one to reach it.
        m = done[first, I] if copy == first else done[copy, F]
        if m >= done[first, F]:
            continue
        held = 0.0
        for j in range(spec.copies_of.shape[1]):
            other = spec.copies_of[rank, j]
            if other >= 0:
                # What micro-batches from `m` on hold, and what `m` has yet to hold.
                held += spec.cost[other, HOLD] * max(0, done[other, F] - max(m, done[other, I]))
                if done[other, F] <= m:
                    held += spec.cost[other, HOLD]
        if held > cap[rank]:
            return False
    return True


@compiled
def _routes_can_finish(spec: Spec, cap: Floats, done: Ints) -> bool:
    """Return whether all micro-batches in flight on two routes can finish, one after the other: the
    banker's algorithm (Dijkstra 1965).
    """
    stages = len(spec.copies) // 2
    finished = np.empty(2, np.int64)  # per route
    finished[0], finished[1] = done[0, I], done[stages, I]
    progress = True
    while progress:
        progress = False
        for route in range(2):
            while finished[route] < done[route * stages, F] and _next_can_finish(
                spec, cap, done, finished, route
            ):
                finished[route] += 1
                progress = True
    return bool(finished[0] >= done[0, F] and finished[1] >= done[stages, F])


@compiled
def _next_can_finish(spec: Spec, cap: Floats, done: Ints, finished: Ints, route: int) -> bool:
    """Return whether the next micro-batch of `route` has memory on every rank, once `finished` of
    each route have finished.
    """
    stages = len(spec.copies) // 2
    for copy in range(route * stages, route * stages + stages):
        if done[copy, F] > finished[route]:
            continue  # it holds memory there already
        rank = spec.copies[copy, RANK]
        held = spec.cost[copy, HOLD]
        for i in range(spec.copies_of.shape[1]):
            other = spec.copies_of[rank, i]
            if other >= 0:
                first_in_flight = max(finished[other // stages], done[other, I])
                held += spec.cost[other, HOLD] * max(0, done[other, F] - first_in_flight)
        if held > cap[rank]:
            return False
    return True
