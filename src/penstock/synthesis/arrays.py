"""The arrays that the kernels read and write: a problem, encoded programs, and a workspace.

A *copy* is a stage on one route through the ranks: copy `route` x S + `stage`. A linear,
interleaved or V placement has one route; a bidirectional one has two, and every micro-batch takes
one of them. Micro-batches of a route are alike, so that a program needs no numbers for them: the
k-th forward of a copy is that of the route's k-th micro-batch, and so are the k-th backward (B or
I), and the k-th W, that of the k-th I. This loses nothing: if micro-batches of a route overtake
each other, renumbering them by their turn at each place gives a program of the same times, since
the k-th op of a copy starts after k others of the copy before have ended.

So the program of a rank is encoded as a row of codes: 4 x copy + kind, kinds F, I, W, B being 0, 1,
2, 3. Updates are not encoded: the U of a copy runs in the first idle time after its last backward
that is long enough, or at the end.
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

#: Columns of `Spec.copies`: the rank; and the receiver of activations, after which comes that of
#: gradients (`RECEIVER + F` and `RECEIVER + I`).
RANK, RECEIVER = 0, 1


class Spec(NamedTuple):
    """A problem with C copies, R ranks and D routes.

    It has few arrays, since the time of a call of a compiled function grows with their number.

    Attributes:
        counts: (D,) micro-batches of each route.
        copies_of: (R, V) the copies on each rank, ascending, the rest -1.
        copies: (C, 3) rank of each copy, the copy that receives its activations, and the copy that
            receives its gradients; -1 for none.
        cost: (C, 8) seconds of F, I, W, B, U, of a forward's and of a backward's message; and the
            memory that a micro-batch holds from its F to its B or W.
        limit: (R,) memory of each rank.
    """

    counts: Ints
    copies_of: Ints
    copies: Ints
    cost: Floats
    limit: Floats


class Encoding(NamedTuple):
    """Encoded programs: (R, L) codes, and the number of codes in each row."""

    codes: Ints
    lengths: Ints


class Workspace(NamedTuple):
    """Workspace of an evaluation, and its results.

    Attributes:
        start: (R, L) start of each op.
        cause: (R, L) the op that it waited for last, as rank x L + place; -1 for none.
        arrive: (2, C, M) arrival of the input of a copy's forwards and of its backwards; -1 while
            unknown.
        maker: (2, C, M) the op that sent it.
        done: (C, 4) number of forwards, backwards (I or B), releases (W or B), updates so far.
        free: (R,) when each rank is free.
        link, busy: (R, R) when a link is free, and the op whose message occupies it.
        turn: (R, 3) number of evaluated ops of a rank; a ring of the ranks to continue with;
            whether a rank is in the ring.
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


def make_workspace(spec: Spec) -> Workspace:
    """Return a workspace for programs of this problem."""
    ranks, copies, most = len(spec.limit), len(spec.copies), int(spec.counts.max())
    length = max_ops(spec)
    return Workspace(
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


def empty_encoding(spec: Spec) -> Encoding:
    """Return empty programs with space for all ops of this problem."""
    return Encoding(
        np.zeros((len(spec.limit), max_ops(spec)), np.int64), np.zeros(len(spec.limit), np.int64)
    )


def max_ops(spec: Spec) -> int:
    """Return the maximum number of ops of a rank: three per micro-batch of every copy."""
    stages = len(spec.copies) // len(spec.counts)
    most = 0
    for row in spec.copies_of:
        most = max(most, sum(3 * int(spec.counts[copy // stages]) for copy in row if copy >= 0))
    return most
