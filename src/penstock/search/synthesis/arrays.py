"""What the kernels read and write: a problem and programs as arrays of numbers.

A *copy* is a stage on one route through the ranks: copy `route` x S + `stage`. One placement has
one route; a bidirectional one has two, and every micro-batch takes one of them. Micro-batches of a
route are alike, so that a program needs no numbers for them: the k-th forward of a copy is that of
the route's k-th micro-batch, and so are the k-th backward (B or I) and the k-th W, that of the k-th
I. That loses nothing: where micro-batches of a route pass each other somewhere, renaming them by
their turn at each place gives a program of the same times, since the k-th op of a copy starts after
k others of the copy before have ended.

So a program is a *word*, a row of codes: 4 x copy + kind, kinds F, I, W, B being 0, 1, 2, 3.
Updates are not written: a copy's U stands in the first idle time after its last backward that is
long enough, or at the end.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

F, I, W, B = 0, 1, 2, 3  # noqa: E741 - the field's letters


#: Columns of `Spec.cost`, after those of F, I, W and B.
UPDATE, UP, DOWN, HOLD = 4, 5, 6, 7


class Spec(NamedTuple):
    """A problem. C copies, R ranks, D routes.

    Few arrays, since handing over many is what compiled functions are slow at.

    Attributes:
        counts: (D,) micro-batches of each route.
        copies_of: (R, V) the copies on each rank, ascending, the rest -1.
        copies: (C, 3) rank of each copy, the copy that takes its forwards' values and the one that
        takes its backwards'; -1 for
            none.
        cost: (C, 8) seconds of F, I, W, B, U, of a forward's and of a backward's message; and what
        a micro-batch holds from
            its F to its B or W.
        limit: (R,) the most that a rank may hold.
    """

    counts: Ints
    copies_of: Ints
    copies: Ints
    cost: Floats
    limit: Floats


class Words(NamedTuple):
    """Programs: (R, L) codes, and how many of each row count."""

    codes: Ints
    lengths: Ints


class Work(NamedTuple):
    """Room for an evaluation, and what it found out.

    Attributes:
        start: (R, L) when each op starts.
        cause: (R, L) what it waited for last, as rank x L + place; -1 for nothing.
        arrive: (2, C, M) when the input of a copy's forward, backward is there; -1 while it is not
        known. maker: (2, C, M) what sent it. done: (C, 4) forwards, backwards (I or B), releases (W
        or B), updates so far. free: (R,) when each rank is free. link, busy: (R, R) when a link is
        free, and the op that keeps it busy. turn: (R, 3) ops played; ranks to look at; whether a
        rank is among them.
    """

    start: Floats
    cause: Ints
    arrive: Floats
    maker: Ints
    done: Ints
    free: Floats
    link: Floats
    busy: Ints
    turn: Ints


def work_for(spec: Spec) -> Work:
    """Room for programs of this problem."""
    ranks, copies, most = len(spec.limit), len(spec.copies), int(spec.counts.max())
    length = room_for(spec)
    return Work(
        np.zeros((ranks, length)),
        np.zeros((ranks, length), np.int64),
        np.zeros((2, copies, most)),
        np.zeros((2, copies, most), np.int64),
        np.zeros((copies, 4), np.int64),
        np.zeros(ranks),
        np.zeros((ranks, ranks)),
        np.zeros((ranks, ranks), np.int64),
        np.zeros((ranks, 3), np.int64),
    )


def words_for(spec: Spec) -> Words:
    """Empty words with room for programs of this problem."""
    return Words(
        np.zeros((len(spec.limit), room_for(spec)), np.int64), np.zeros(len(spec.limit), np.int64)
    )


def room_for(spec: Spec) -> int:
    """The most ops of a rank: three for every micro-batch of every copy."""
    stages = len(spec.copies) // len(spec.counts)
    return int(
        max(
            sum(3 * spec.counts[copy // stages] for copy in row if copy >= 0)
            for row in spec.copies_of
        )
    )
