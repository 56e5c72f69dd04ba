"""What a rank did in every column of a drawing: where ops are narrower than a column, all that can
be shown of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from penstock.event import Timeline
from penstock.schedule.arrays import Array
from penstock.schedule.op import Kind


class Spans(NamedTuple):
    """The ops of one rank, as arrays: when they began and ended, in seconds, and the numbers of
    their kinds' letters.
    """

    start: Array
    end: Array
    kind: Array

    @classmethod
    def of(cls, panel: Timeline, rank: int, column: float = 0.0) -> Spans:
        """Those of a rank; the two ops of a pair have half of their span each, one after the other,
        in whole columns if told.
        """
        log = panel.log
        rows = slice(int(log.ops.first[rank]), int(log.ops.first[rank + 1]))
        start, end = log.start[rows].copy(), log.end[rows].copy()
        second = 1 + np.flatnonzero(
            (start[1:] == start[:-1]) & (end[1:] == end[:-1]) & (end[1:] > start[1:])
        )
        middle = (start[second] + end[second]) / 2
        if column:
            middle = np.floor(middle / column + 0.5 + 1e-6) * column
        start[second], end[second - 1] = middle, middle
        return cls(start, end, log.ops.kind[rows])


def shares(
    spans: Spans, names: Sequence[Kind], count: int, seconds: float
) -> tuple[dict[Kind, Array], Array]:
    """One rank's work in `count` columns of `seconds` each, for these kinds of op.

    Returns:
        Per kind, the share of every column's time that its ops took, 0 to 1; and the share of every
        column's longest single op.
    """
    work = {kind: np.zeros(count) for kind in names}
    longest = np.zeros(count)
    begin, finish = spans.start / seconds, spans.end / seconds
    first = np.clip((begin + 1e-6).astype(np.int64), 0, count - 1)
    last = np.clip(np.ceil(finish - 1e-6).astype(np.int64) - 1, first, count - 1)
    lead = np.maximum(np.minimum(finish, first + 1) - begin, 0.0)
    tail = np.where(last > first, finish - last, 0.0)
    np.maximum.at(longest, first, lead)
    np.maximum.at(longest, last, tail)
    for kind, done in work.items():
        own = spans.kind == ord(kind.value)
        np.add.at(done, first[own], lead[own])
        np.add.at(done, last[own], tail[own])
        long = np.flatnonzero(own & (last - first > 1))  # at most one per column that it fills
        for low, high in zip((first[long] + 1).tolist(), last[long].tolist(), strict=True):
            done[low:high] += 1.0
            longest[low:high] = 1.0
    return work, longest
