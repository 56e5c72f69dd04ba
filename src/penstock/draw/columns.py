"""Time shares of op kinds per column, for drawings in which ops are narrower than a column."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from penstock.event import Timeline
from penstock.schedule.arrays import Array
from penstock.schedule.op import Kind

#: Columns. Rounding errors of the simulator's sums may move an op's end past a column's edge.
_TOLERANCE = 1e-6


class Spans(NamedTuple):
    """Time spans of the ops of one rank, as arrays.

    Attributes:
        start, end: per op, its times in seconds.
        kind: per op, the code point of its kind's letter.
    """

    start: Array
    end: Array
    kind: Array

    @classmethod
    def of(cls, panel: Timeline, rank: int, column_seconds: float = 0.0) -> Spans:
        """Return the spans of one rank, with the common span of two paired ops split between them.

        The first op of a pair gets the first half, the second op the second half.

        Args:
            panel: the timeline.
            rank: the rank.
            column_seconds: if not 0, pairs are split at a multiple of this length.
        """
        log = panel.log
        rows = slice(int(log.ops.first[rank]), int(log.ops.first[rank + 1]))
        # Copies, since the times of pairs are changed here and not in the timeline.
        start, end = log.start[rows].copy(), log.end[rows].copy()
        same_span = (start[1:] == start[:-1]) & (end[1:] == end[:-1])
        takes_time = end[1:] > start[1:]
        second = 1 + np.flatnonzero(same_span & takes_time)
        middle = (start[second] + end[second]) / 2
        if column_seconds:
            middle = np.floor(middle / column_seconds + 0.5 + _TOLERANCE) * column_seconds
        start[second], end[second - 1] = middle, middle
        return cls(start, end, log.ops.kind[rows])


def column_shares(
    spans: Spans, kinds: Sequence[Kind], count: int, seconds: float
) -> tuple[dict[Kind, Array], Array]:
    """Return how much of each column's time the ops of one rank take, by kind.

    Args:
        spans: the ops of the rank.
        kinds: the kinds of op to count.
        count: number of columns.
        seconds: length of a column.

    Returns:
        Per kind, the share of each column's time, 0 to 1, shape (count,); and the share of the
        longest single op in each column, shape (count,).
    """
    work = {kind: np.zeros(count) for kind in kinds}
    longest = np.zeros(count)
    # In columns: where each op starts and ends, and its first and last column.
    start, end = spans.start / seconds, spans.end / seconds
    first = np.clip((start + _TOLERANCE).astype(np.int64), 0, count - 1)
    last = np.clip(np.ceil(end - _TOLERANCE).astype(np.int64) - 1, first, count - 1)
    first_share = np.maximum(np.minimum(end, first + 1) - start, 0.0)
    last_share = np.where(last > first, end - last, 0.0)
    np.maximum.at(longest, first, first_share)
    np.maximum.at(longest, last, last_share)
    for kind, kind_work in work.items():
        of_kind = spans.kind == ord(kind.value)
        # Several ops may begin in one column, of which `+=` would count only one.
        np.add.at(kind_work, first[of_kind], first_share[of_kind])
        np.add.at(kind_work, last[of_kind], last_share[of_kind])
        # Only ops that fill whole columns need a loop: at most one of them per column.
        filling = np.flatnonzero(of_kind & (last - first > 1))
        for low, high in zip((first[filling] + 1).tolist(), last[filling].tolist(), strict=True):
            kind_work[low:high] += 1.0
            longest[low:high] = 1.0
    return work, longest
