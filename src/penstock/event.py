"""Event and Timeline: what happened, simulated and real alike."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from penstock.schedule.graph import Row
from penstock.schedule.op import Kind, Op


class Event(NamedTuple):
    """One op on one rank, or one transfer (`to_rank` set: the op's value goes from `rank` to `to_rank`), in seconds."""

    rank: int
    op: Op
    start: float
    end: float
    bytes: int = 0
    to_rank: int | None = None


@dataclass(frozen=True)
class Timeline:
    """The events of one step, in order of start. Seconds count from the first event.

    `peak_memory` has bytes per rank where they are known, else None. `source` is `"simulated"` or `"measured"`.
    """

    events: tuple[Event, ...]
    ranks: int
    stages: int
    peak_memory: tuple[int, ...] | None = None
    source: str = "simulated"
    title: str = ""

    @classmethod
    def of(cls, events: Iterable[Row], ranks: int, stages: int, peak_memory: tuple[int, ...] | None = None,
           source: str = "simulated", title: str = "") -> Timeline:  # fmt: skip
        """A timeline whose first event starts at 0, of Events or of a schedule graph's rows.

        Events of a rank that begin and end together stay in the order given.
        """
        ordered = sorted(map(Event._make, events), key=lambda event: (event.start, event.end, event.rank))
        origin = ordered[0].start if ordered else 0.0
        moved = tuple(event._replace(start=event.start - origin, end=event.end - origin) for event in ordered)
        return cls(moved, ranks, stages, peak_memory, source, title)

    @cached_property
    def compute(self) -> tuple[Event, ...]:
        """The events that are work of a rank, transfers left out."""
        return tuple(event for event in self.events if event.to_rank is None)

    @cached_property
    def makespan(self) -> float:
        """Seconds from the first event's start to the last compute op's end."""
        return max((event.end for event in self.compute), default=0.0)

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """Seconds of work per rank."""
        seconds = [0.0] * self.ranks
        for event in self.compute:
            seconds[event.rank] += event.end - event.start
        return tuple(seconds)

    @property
    def bubble_ratio(self) -> float:
        """Idle time of all ranks / (ranks x makespan)."""
        whole = self.ranks * self.makespan
        return max(1.0 - sum(self.busy) / whole, 0.0) if whole else 0.0  # sums of floats may pass the whole

    @cached_property
    def span_bubble_ratio(self) -> float:
        """The zero-bubble papers' ratio: idle share of the longest span of a rank, first op's start to last op's end.

        Source: Qi et al. 2024, section 2.3; with equal stages, (cost - m(f+i+w)) / cost. Updates are left out as there:
        they are not synchronised across ranks.
        """
        spans: dict[int, tuple[float, float]] = {}
        work = [0.0] * self.ranks
        for rank, op, start, end, *_ in self.compute:
            if op.kind is not Kind.U:
                first, last = spans.get(rank, (start, end))
                spans[rank] = (min(first, start), max(last, end))
                work[rank] += end - start
        longest = max((last - first for first, last in spans.values()), default=0.0)
        return max(1.0 - sum(work) / (self.ranks * longest), 0.0) if longest else 0.0

    @cached_property
    def peak_in_flight(self) -> tuple[int, ...]:
        """Per stage: the most micro-batches that a rank had run forward and not yet finished backward."""
        # Not by the clock: ops may take no time at all. A rank's events stand in its program's order (see `of`).
        held: Counter[tuple[int, int]] = Counter()
        peaks = [0] * self.stages
        for event in self.compute:
            kind, stage, _ = event.op
            held[stage, event.rank] += (kind is Kind.F) - (kind in (Kind.B, Kind.W))
            peaks[stage] = max(peaks[stage], held[stage, event.rank])
        return tuple(peaks)
