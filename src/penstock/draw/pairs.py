"""Pairs of ops that run as one: two consecutive events of a rank with the same span."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from penstock.event import Event, Timeline


def events_by_rank(panel: Timeline) -> list[list[Event]]:
    """Return the compute events of each rank, in order."""
    rows: list[list[Event]] = [[] for _ in range(panel.ranks)]
    for event in panel.compute:
        rows[event.rank].append(event)
    return rows


def pair_halves(events: Sequence[Event]) -> dict[int, int]:
    """Return which events of one rank belong to a pair.

    Returns:
        From the index of an event to 0 for the first op of a pair and 1 for the second. Events
        outside pairs are absent.
    """
    halves: dict[int, int] = {}
    for index, (event, successor) in enumerate(pairwise(events)):
        same_span = event.start == successor.start and event.end == successor.end
        if same_span and event.end > event.start and index not in halves:
            halves[index], halves[index + 1] = 0, 1
    return halves


def split_pairs(
    events: Sequence[Event], column_seconds: float = 0.0
) -> tuple[list[Event], set[int]]:
    """Split the common span of each pair between its two ops, for drawings one line high.

    Args:
        events: the events of one rank, in order.
        column_seconds: if not 0, pairs are split at a multiple of this length.

    Returns:
        The events with split spans, and the indices of the second ops of pairs.
    """
    halves = pair_halves(events)
    split = list(events)
    for index, half in halves.items():
        event = events[index]
        middle = (event.start + event.end) / 2
        if column_seconds:
            middle = math.floor(middle / column_seconds + 0.5 + 1e-6) * column_seconds
        split[index] = event._replace(start=middle) if half else event._replace(end=middle)
    return split, {index for index, half in halves.items() if half}
