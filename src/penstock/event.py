"""Event and Timeline: what happened, simulated and real alike."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from itertools import starmap
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from penstock.notebook import Shown
from penstock.schedule.arrays import Array, OpArrays, runs
from penstock.schedule.graph import Row
from penstock.schedule.op import HANDING, Kind, Op
from penstock.schedule.slicing import Slicing


class Event(NamedTuple):
    """One op on one rank, or one transfer (`to_rank` set: the op's value goes from `rank` to
    `to_rank`), in seconds.

    The two ops of a pair have one start and one end.
    """

    rank: int
    op: Op
    start: float
    end: float
    bytes: int = 0
    to_rank: int | None = None


@dataclass(frozen=True, eq=False)
class MemoryCurve:
    """What a rank holds: `bytes[i]` from `seconds[i]` to `seconds[i + 1]`, the last for good.
    Seconds may repeat, where what is held changes more than once at a time.
    """

    seconds: Array
    bytes: Array

    @property
    def peak(self) -> int:
        """The most bytes at any moment."""
        return int(self.bytes.max(initial=0))

    @property
    def peak_at(self) -> float:
        """When that is first, in seconds."""
        return float(self.seconds[int(np.argmax(self.bytes))]) if len(self.bytes) else 0.0


class Account(Protocol):
    """Who knows what the ranks hold over time."""

    @property
    def curves(self) -> tuple[MemoryCurve, ...]:
        """Per rank, its bytes over time."""

    @property
    def holders(self) -> tuple[dict[str, int], ...]:
        """Per rank, what the bytes are for when it is fullest."""


@dataclass(frozen=True, eq=False)
class Moves:
    """The transfers of a log. Per op: `link` (-1 where its value crosses none), `start` and `end`
    of its transfer, and the `place` of its size in `sizes`, in bytes. Per link: `to_rank`.
    """

    link: Array
    to_rank: Array
    start: Array
    end: Array
    place: Array
    sizes: Array


@dataclass(frozen=True, eq=False)
class Log:
    """The same as a timeline's events, as arrays: a rank's ops stand in the order in which it ran
    them.
    """

    ops: OpArrays
    start: Array
    end: Array
    moves: Moves | None = None

    @classmethod
    def of(cls, events: Iterable[Event], ranks: int, slicing: Slicing | None) -> Log:
        """That of compute events."""
        rows: list[list[Event]] = [[] for _ in range(ranks)]
        for event in events:
            rows[event.rank].append(event)
        ops = OpArrays.of(((event.op for event in row) for row in rows), slicing)
        start, end = (
            np.array([event[place] for row in rows for event in row], float) for place in (2, 3)
        )
        return cls(ops, start, end)

    def events(self) -> tuple[Event, ...]:
        """All of it, in order of start, end and rank; of one rank's that begin and end together, in
        the order of its program.
        """
        ops, moves = self.ops, self.moves
        rows = np.arange(len(ops))
        crossing = np.flatnonzero(moves.link >= 0) if moves is not None else rows[:0]
        maker, start, end = np.concatenate([rows, crossing]), self.start, self.end
        to_rank: list[int | None] = [None] * len(rows)
        sizes = [0] * len(rows)
        if moves is not None:
            start, end = (
                np.concatenate([start, moves.start[crossing]]),
                np.concatenate([end, moves.end[crossing]]),
            )
            to_rank += moves.to_rank[moves.link[crossing]].tolist()
            sizes += list(map(round, moves.sizes[moves.place[crossing]].tolist()))
        rank = ops.rank[maker]
        order = np.lexsort((maker, rank, end, start)).tolist()
        found, makers, ranks, starts, ends = (
            ops.all_ops(),
            maker.tolist(),
            rank.tolist(),
            start.tolist(),
            end.tolist(),
        )
        return tuple(
            Event(ranks[i], found[makers[i]], starts[i], ends[i], sizes[i], to_rank[i])
            for i in order
        )

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """Per rank, the seconds in which it works; those that two ops share count once."""
        seconds = []
        for low, high in zip(
            self.ops.first[:-1].tolist(), self.ops.first[1:].tolist(), strict=True
        ):
            start, end = self.start[low:high], self.end[low:high]
            before = np.maximum.accumulate(end)[:-1]
            own = end - start
            own[1:] = np.maximum(end[1:] - np.maximum(start[1:], before), 0.0)
            seconds.append(float(own.sum()))
        return tuple(seconds)

    @cached_property
    def span_bubble_ratio(self) -> float:
        """See `Timeline.span_bubble_ratio`."""
        rows = np.flatnonzero(~self.ops.of_kind(Kind.U, *HANDING))
        starts = runs(self.ops.rank[rows])
        if not len(starts):
            return 0.0
        start, end = self.start[rows], self.end[rows]
        longest = float(
            (np.maximum.reduceat(end, starts) - np.minimum.reduceat(start, starts)).max()
        )
        within = Log(
            OpArrays(
                self.ops.rank[rows],
                self.ops.kind[rows],
                self.ops.stage[rows],
                self.ops.micro_batch[rows],
                np.searchsorted(rows, self.ops.first),
            ),
            start,
            end,
        )
        return max(1.0 - sum(within.busy) / (len(self.busy) * longest), 0.0) if longest else 0.0


def _unknown() -> None:
    return None


@dataclass(frozen=True)
class Timeline(Shown):
    """The events of one step, in order of start. Seconds count from the first event.

    Attributes:
        events: ops and transfers. Of a simulated timeline they are made when they are first asked
        for. ranks, stages: numbers of them. peak_memory: bytes per rank where they are known, else
        None. source: "simulated" or "measured". title: the schedule's name. slicing: how
        micro-batches are cut, if they are: ops then count slices. account: what knows the memory
        over time, if anything does.
    """

    events: tuple[Event, ...]
    ranks: int
    stages: int
    peak_memory: tuple[int, ...] | None = field(
        default_factory=_unknown
    )  # no class attribute: see __getattr__
    source: str = "simulated"
    title: str = ""
    slicing: Slicing | None = None
    account: Account | None = field(default=None, compare=False, repr=False)

    if not TYPE_CHECKING:

        def __getattr__(self, name):  # noqa: ANN001, ANN204 - hidden from checkers, who know the fields
            """What `of_log` has left to be made when it is asked for."""
            if name not in ("events", "peak_memory") or "log" not in self.__dict__:
                raise AttributeError(f"a Timeline has no {name!r}")
            if name == "events":
                value = self.__dict__["log"].events()
            else:
                value = (
                    None
                    if self.account is None
                    else tuple(curve.peak for curve in self.account.curves)
                )
            object.__setattr__(self, name, value)
            return value

    @classmethod
    def of(
        cls,
        events: Iterable[Row],
        ranks: int,
        stages: int,
        peak_memory: tuple[int, ...] | None = None,
        source: str = "simulated",
        title: str = "",
    ) -> Timeline:
        """A timeline whose first event starts at 0, of Events or of a schedule graph's rows.

        Events of a rank that begin and end together stay in the order given.
        """
        ordered = sorted(
            starmap(Event, events), key=lambda event: (event.start, event.end, event.rank)
        )
        origin = ordered[0].start if ordered else 0.0
        moved = tuple(
            event._replace(start=event.start - origin, end=event.end - origin) for event in ordered
        )
        return cls(moved, ranks, stages, peak_memory, source, title)

    @classmethod
    def of_log(cls, log: Log, title: str, account: Account | None = None) -> Timeline:
        """A simulated timeline of arrays that count from 0; its events are made when somebody asks
        for them.
        """
        made = cls.__new__(cls)
        fields = {
            "ranks": len(log.ops.first) - 1,
            "stages": log.ops.stages,
            "source": "simulated",
            "title": title,
            "slicing": log.ops.slicing,
            "account": account,
            "log": log,
        }
        for name, value in fields.items():
            object.__setattr__(made, name, value)
        return made

    @cached_property
    def log(self) -> Log:
        """The compute events as arrays; of a simulated timeline the transfers too."""
        return Log.of(self.compute, self.ranks, self.slicing)

    @cached_property
    def compute(self) -> tuple[Event, ...]:
        """The events that are work of a rank, transfers left out."""
        return tuple(event for event in self.events if event.to_rank is None)

    @cached_property
    def makespan(self) -> float:
        """Seconds from the first event's start to the last compute op's end."""
        return float(self.log.end.max(initial=0.0))

    @property
    def busy(self) -> tuple[float, ...]:
        """Seconds of work per rank; those of a pair once."""
        return self.log.busy

    @property
    def bubble_ratio(self) -> float:
        """Idle time of all ranks / (ranks x makespan)."""
        whole = self.ranks * self.makespan
        return (
            max(1.0 - sum(self.busy) / whole, 0.0) if whole else 0.0
        )  # sums of floats may pass the whole

    @property
    def span_bubble_ratio(self) -> float:
        """The zero-bubble papers' ratio: idle share of the longest span of a rank, first op's start
        to last op's end.

        Source: Qi et al. 2024, section 2.3; with equal stages, (cost - m(f+i+w)) / cost. Updates
        are left out as there: they are not synchronised across ranks. So are evictions and loads,
        which compute nothing.
        """
        return self.log.span_bubble_ratio

    @property
    def peak_in_flight(self) -> tuple[float, ...]:
        """Per stage: the most micro-batches that a rank of it had run forward and not yet finished
        backward, nor handed to a partner. Fractions where micro-batches are cut.
        """
        by_stage = self.log.ops.in_flight[0]
        return by_stage + (0,) * (self.stages - len(by_stage))

    @property
    def peak_on_rank(self) -> tuple[float, ...]:
        """Per rank: the most micro-batches whose activations it held, of all stages together."""
        return self.log.ops.in_flight[1]

    @property
    def memory(self) -> tuple[MemoryCurve, ...] | None:
        """Per rank, its bytes over time, where they are known."""
        return None if self.account is None else self.account.curves

    @property
    def memory_holders(self) -> tuple[dict[str, int], ...] | None:
        """Per rank, what the bytes are for when it is fullest, where that is known: weights,
        gradients, optimizer, activations, boundary, recompute.
        """
        return None if self.account is None else self.account.holders
