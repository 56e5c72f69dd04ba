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
from penstock.synthesis.arrays import HOLD, UP, Encoding, Floats, Ints, Spec, Workspace
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


@compiled
def list_schedule(spec: Spec, rule: Rule, encoding: Encoding, work: Workspace) -> float:
    """Write the programs that the rule makes. Return their makespan, or -1 if the rule's cap lets
    no op continue.
    """
    reset(spec, work)
    codes, lengths, copies, cost, copies_of = (
        encoding.codes,
        encoding.lengths,
        spec.copies,
        spec.cost,
        spec.copies_of,
    )
    dues, whole = rule.due, rule.whole
    arrive, done, link, free = work.arrive, work.done, work.link, work.free
    ranks, stages, far = len(lengths), len(copies) // len(spec.counts), _far(spec, rule.cap)
    # begin: per copy and kind, when the next op could start. soon: per rank, when an op could
    # start, and when one could end.
    begin, soon = np.empty((len(copies), 3)), np.empty((2, ranks))
    look, looks, left = np.empty(2, np.int64), ranks, 0
    for copy in range(len(copies)):
        left += spec.counts[copy // stages]
        lengths[copies[copy, 0]] = 0
    while True:
        for i in range(looks):
            rank = look[i] if looks <= 2 and looks < ranks else i
            soon[0, rank] = soon[1, rank] = np.inf
            for j in range(copies_of.shape[1]):
                copy = copies_of[rank, j]
                for kind in range(3 if copy >= 0 else 0):
                    k = done[copy, kind]
                    begin[copy, kind] = np.inf
                    if k >= (spec.counts[copy // stages] if kind == 0 else done[copy, kind - 1]):
                        continue
                    at = free[rank] if kind == 2 else arrive[kind, copy, k]
                    if at < 0.0 or (kind == 0 and not _fits(spec, rule.cap, done, copy, far)):
                        continue
                    begin[copy, kind] = at = max(at, free[rank])
                    soon[0, rank] = min(soon[0, rank], at)
                    soon[1, rank] = min(
                        soon[1, rank], at + cost[copy, 3 if kind == 1 and whole[copy, k] else kind]
                    )
        rank = 0
        for other in range(1, ranks):
            rank = other if soon[1, other] < soon[1, rank] else rank
        if soon[1, rank] == np.inf:
            break
        wait_until = soon[0, rank] + rule.patience[0] * (soon[1, rank] - soon[0, rank])
        best, copy, kind = np.inf, -1, -1
        for j in range(copies_of.shape[1]):
            other = copies_of[rank, j]
            for what in range(3 if other >= 0 else 0):
                if begin[other, what] <= wait_until and dues[other, what, done[other, what]] < best:
                    best, copy, kind = dues[other, what, done[other, what]], other, what
        code = 3 if kind == 1 and whole[copy, done[copy, 1]] else kind
        codes[rank, lengths[rank]] = 4 * copy + code
        lengths[rank] += 1
        end = free[rank] = begin[copy, kind] + cost[copy, code]
        done[copy, kind] += 1
        done[copy, 2] += code == 3
        left -= code >= 2
        look[0], looks = rank, 1
        taker = copies[copy, 1 + kind] if kind < 2 else -1
        if taker >= 0:
            target = copies[taker, 0]
            if target != rank:
                end = send(link, rank, target, end, cost[copy, UP + kind])
                look[1], looks = target, 2
            arrive[kind, taker, done[copy, kind] - 1] = end
        if far:  # an op on any rank may free memory for an op on any other
            looks = ranks
    return -1.0 if left else end_of_updates(spec, work)


@compiled
def _far(spec: Spec, cap: Floats) -> bool:
    """Return whether there are two routes and some rank cannot hold a micro-batch of each: then no
    rank can decide alone what fits.
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
    held, most, with_other_route = (
        spec.cost[copy, HOLD],
        0.0,
        spec.cost[copy, HOLD] * (done[copy, 0] - done[copy, 1]),
    )
    for i in range(spec.copies_of.shape[1]):
        other = spec.copies_of[rank, i]
        if other >= 0:
            held += spec.cost[other, HOLD] * (done[other, 0] - done[other, 2])
            with_other_route += spec.cost[other, HOLD]
            most += spec.cost[other, HOLD] * spec.counts[other // stages]
    if held > cap[rank]:
        return False
    if len(spec.counts) == 1 and (spec.copies_of.shape[1] == 1 or most <= cap[rank]):
        return True
    if len(spec.counts) > 1 and not far:
        return bool(with_other_route <= cap[rank])
    done[copy, 0] += 1
    free = _way_out(spec, cap, done) if far else _way_out_of_rank(spec, cap, done, rank)
    done[copy, 0] -= 1
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
        number = spec.copies_of[rank, i]
        if number < 0:
            continue
        # The oldest micro-batch, and those that wait before a stage.
        m = done[first, 1] if number == first else done[number, 0]
        if m >= done[first, 0]:
            continue
        held = 0.0
        for j in range(spec.copies_of.shape[1]):
            copy = spec.copies_of[rank, j]
            if copy >= 0:
                held += spec.cost[copy, HOLD] * max(0, done[copy, 0] - max(m, done[copy, 1]))
                if done[copy, 0] <= m:
                    held += spec.cost[copy, HOLD]
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
    out[0], out[1] = done[0, 1], done[stages, 1]
    moved = True
    while moved:
        moved = False
        for route in range(2):
            while out[route] < done[route * stages, 0] and _can_finish(spec, cap, done, out, route):
                out[route] += 1
                moved = True
    return bool(out[0] >= done[0, 0] and out[1] >= done[stages, 0])


@compiled
def _can_finish(spec: Spec, cap: Floats, done: Ints, out: Ints, route: int) -> bool:
    """Return whether the next micro-batch of `route` has memory on every rank, once `out` of each
    route have finished.
    """
    stages = len(spec.copies) // 2
    for copy in range(route * stages, route * stages + stages):
        if done[copy, 0] > out[route]:
            continue
        rank = spec.copies[copy, 0]
        held = spec.cost[copy, HOLD]
        for i in range(spec.copies_of.shape[1]):
            other = spec.copies_of[rank, i]
            if other >= 0:
                held += spec.cost[other, HOLD] * max(
                    0, done[other, 0] - max(out[other // stages], done[other, 1])
                )
        if held > cap[rank]:
            return False
    return True
