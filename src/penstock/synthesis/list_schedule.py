"""Kernel: list scheduling. Every rank always starts the op that is due first, of those that it can
start soon.

Giffler and Thompson 1960: the rank whose next op could end first of all decides first, so that all
ops are known that could start before that end. How long it may wait for an op that is due earlier
is the rule's patience.

If the ops of all micro-batches are due at fixed offsets, and those of each micro-batch by a
constant pace later than those of the one before, the offsets are a block that repeats, as in
controllable memory's (Qi et al. 2024); I far before all others gives 1F1B, F far before all others
GPipe, W far behind fills bubbles. If ops are due when a given program starts them, the rule
approximately reproduces that program.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from penstock.compiled import compiled
from penstock.synthesis.arrays import (
    HOLD,
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
        patience: (1,) 0: start what can start now; 1: wait for what is due earlier as long as no op
            would end meanwhile.
        cap: (R,) memory to use, at most the limit.
        whole: (C, M) 1 where the backward is not split.
    """

    due: Floats
    patience: Floats
    cap: Floats
    whole: Ints


# Numba counts references of every array that it passes to another function, which takes longer than
# an op takes here: so the loop over ops is one function.


@compiled
def list_schedule(spec: Spec, rule: Rule, encoding: Encoding, work: Workspace) -> float:
    """Write the programs that the rule makes. Return their makespan, or -1 if the rule's cap lets
    no op continue.
    """
    reset(spec, work)
    codes, lengths = encoding.codes, encoding.lengths
    copies, cost, copies_of = spec.copies, spec.cost, spec.copies_of
    due, whole, patience = rule.due, rule.whole, rule.patience[0]
    arrive, done, link, free = work.arrive, work.done, work.link, work.free
    ranks, stages, far = len(lengths), len(copies) // len(spec.counts), _far(spec, rule.cap)
    # Per copy and kind (F, I or B, W), when its next op could start; infinite if it cannot yet.
    begin = np.empty((len(copies), 3))
    # Per rank, when the first of its next ops could start, and when the first could end.
    first_start, first_end = np.empty(ranks), np.empty(ranks)
    lengths[:] = 0
    unfinished = stages * spec.counts.sum()  # micro-batches of copies
    # The ranks for which that may have changed: the first `changes` of `changed`.
    changed, changes = np.arange(ranks + 1), ranks
    while True:
        # 1. What could the changed ranks start next?
        for turn in range(changes):
            other = changed[turn]
            first_start[other] = first_end[other] = np.inf
            for i in range(copies_of.shape[1]):
                copy = copies_of[other, i]
                for kind in range(3 if copy >= 0 else 0):
                    begin[copy, kind] = np.inf
                    k = done[copy, kind]
                    # An I or B follows the k-th F, a W the k-th I.
                    possible = spec.counts[copy // stages] if kind == F else done[copy, kind - 1]
                    if k >= possible:
                        continue
                    ready = free[other] if kind == W else arrive[kind, copy, k]
                    if ready < 0.0 or (kind == F and not _fits(spec, rule.cap, done, copy, far)):
                        continue
                    start = max(ready, free[other])
                    code = B if kind == I and whole[copy, k] else kind
                    begin[copy, kind] = start
                    first_start[other] = min(first_start[other], start)
                    first_end[other] = min(first_end[other], start + cost[copy, code])
        # 2. The rank whose next op could end first decides: what ends later cannot change that op.
        rank = int(np.argmin(first_end))
        if first_end[rank] == np.inf:
            break  # all ops are placed, or the cap lets none continue
        # 3. Of the ops that it can start soon, it takes the one that is due first.
        wait_until = first_start[rank] + patience * (first_end[rank] - first_start[rank])
        first_due, copy, kind = np.inf, -1, -1
        for i in range(copies_of.shape[1]):
            other = copies_of[rank, i]
            for other_kind in range(3 if other >= 0 else 0):
                k = done[other, other_kind]
                if begin[other, other_kind] <= wait_until and due[other, other_kind, k] < first_due:
                    first_due, copy, kind = due[other, other_kind, k], other, other_kind
        k = done[copy, kind]
        code = B if kind == I and whole[copy, k] else kind
        codes[rank, lengths[rank]] = 4 * copy + code
        lengths[rank] += 1
        end = free[rank] = begin[copy, kind] + cost[copy, code]
        done[copy, kind] += 1
        done[copy, W] += code == B  # a B is also its W
        unfinished -= code >= W  # W or B
        # 4. It sends its value. It changes what its rank and the receiver can start; all, if `far`.
        receiver, target = copies[copy, 1 + kind] if kind != W else -1, rank
        if receiver >= 0:
            target = copies[receiver, 0]
            if target != rank:
                end = send(link, rank, target, end, cost[copy, UP + kind])
            arrive[kind, receiver, k] = end
        if not far:
            changed[0], changed[1], changes = rank, target, 1 if target == rank else 2
    return -1.0 if unfinished else end_of_updates(spec, work)


@compiled
def _far(spec: Spec, cap: Floats) -> bool:
    """Return whether no rank can decide alone what fits: there are two routes, and some rank cannot
    hold a micro-batch of each.
    """
    for rank in range(len(cap) if len(spec.counts) > 1 else 0):
        both = 0.0
        for i in range(spec.copies_of.shape[1]):
            both += spec.cost[spec.copies_of[rank, i], HOLD]
        if both > cap[rank]:
            return True
    return False


@compiled
def _fits(spec: Spec, cap: Floats, done: Ints, copy: int, far: bool) -> bool:
    """Return whether a forward of `copy` leaves its rank within the cap, and all micro-batches able
    to finish.

    On two routes it suffices that either always leaves memory for one micro-batch of the other:
    both can then drain as if alone.
    """
    rank, stages = spec.copies[copy, 0], len(spec.copies) // len(spec.counts)
    held = spec.cost[copy, HOLD]  # with the new forward
    most = 0.0  # if all micro-batches were in flight
    # What its route has in flight, and one micro-batch of every stage of the rank.
    with_other_route = spec.cost[copy, HOLD] * (done[copy, F] - done[copy, I])
    for i in range(spec.copies_of.shape[1]):
        other = spec.copies_of[rank, i]
        if other >= 0:
            held += spec.cost[other, HOLD] * (done[other, F] - done[other, W])
            with_other_route += spec.cost[other, HOLD]
            most += spec.cost[other, HOLD] * spec.counts[other // stages]
    if held > cap[rank]:
        return False
    if len(spec.counts) == 1 and (spec.copies_of.shape[1] == 1 or most <= cap[rank]):
        return True
    if len(spec.counts) > 1 and not far:
        return bool(with_other_route <= cap[rank])
    done[copy, F] += 1
    free = _way_out(spec, cap, done) if far else _way_out_of_rank(spec, cap, done, rank)
    done[copy, F] -= 1
    return free


@compiled
def _way_out_of_rank(spec: Spec, cap: Floats, done: Ints, rank: int) -> bool:
    """Return whether the micro-batches in flight can finish on `rank`, oldest first.

    Each needs memory on its later stages while it and all micro-batches behind it hold theirs; a
    waiting W can run at once. Since micro-batches stay in order, no other order of finishing
    exists, and every rank can be checked alone.
    """
    first = spec.copies_of[rank, 0]
    for i in range(spec.copies_of.shape[1]):
        copy = spec.copies_of[rank, i]
        if copy < 0:
            continue
        # The micro-batch to finish: the oldest in flight, and the next one of every later stage.
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
def _way_out(spec: Spec, cap: Floats, done: Ints) -> bool:
    """Return whether all micro-batches in flight on two routes can finish, one after the other: the
    banker's algorithm (Dijkstra 1965).
    """
    stages = len(spec.copies) // 2
    out = np.empty(2, np.int64)
    out[0], out[1] = done[0, I], done[stages, I]
    moved = True
    while moved:
        moved = False
        for route in range(2):
            while out[route] < done[route * stages, F] and _can_finish(spec, cap, done, out, route):
                out[route] += 1
                moved = True
    return bool(out[0] >= done[0, F] and out[1] >= done[stages, F])


@compiled
def _can_finish(spec: Spec, cap: Floats, done: Ints, out: Ints, route: int) -> bool:
    """Return whether the next micro-batch of `route` has memory on every rank, once `out` of each
    route have finished.
    """
    stages = len(spec.copies) // 2
    for copy in range(route * stages, route * stages + stages):
        if done[copy, F] > out[route]:
            continue
        rank = spec.copies[copy, 0]
        held = spec.cost[copy, HOLD]
        for i in range(spec.copies_of.shape[1]):
            other = spec.copies_of[rank, i]
            if other >= 0:
                held += spec.cost[other, HOLD] * max(
                    0, done[other, F] - max(out[other // stages], done[other, I])
                )
        if held > cap[rank]:
            return False
    return True
