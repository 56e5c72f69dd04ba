"""Ops that run as one: two events of a rank with one span."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from penstock.event import Event, Timeline


def by_rank(panel: Timeline) -> list[list[Event]]:
    """The compute events of every rank, in order."""
    rows: list[list[Event]] = [[] for _ in range(panel.ranks)]
    for event in panel.compute:
        rows[event.rank].append(event)
    return rows


def halves(events: Sequence[Event]) -> dict[int, int]:
    """Of one rank's events, by their place, the first (0) and second (1) of pairs; all others are
    whole.
    """
    found: dict[int, int] = {}
    for first, (one, other) in enumerate(pairwise(events)):
        if one.start == other.start and one.end == other.end > one.start and first not in found:
            found[first], found[first + 1] = 0, 1
    return found


def side_by_side(events: Sequence[Event], column: float = 0.0) -> tuple[list[Event], set[int]]:
    """One rank's events with the span of every pair cut in two, for drawings of one line, in whole
    columns if told; and the places of second halves.
    """
    found = halves(events)
    apart = list(events)
    for place, half in found.items():
        event = events[place]
        middle = (event.start + event.end) / 2
        if column:
            middle = math.floor(middle / column + 0.5 + 1e-6) * column
        apart[place] = event._replace(start=middle) if half else event._replace(end=middle)
    return apart, {place for place, half in found.items() if half}
