"""Event and Timeline: when each op and transfer ran, simulated or measured."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise, starmap
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from penstock.notebook import NotebookPicture
from penstock.schedule.arrays import Array, OpArrays, runs
from penstock.schedule.op import ACTIVATION_MOVES, Kind, Op
from penstock.schedule.slicing import Slicing
from penstock.units import format_seconds

#: The fields of an Event: rank, op, start, end, bytes, the receiving rank of a transfer, and the
#: seconds of waiting before an op.
EventRow = tuple[int, Op, float, float, int, int | None, float | None]


class Event(NamedTuple):
    """One op on one rank, or one transfer between ranks. Times are in seconds.

    For a transfer, `to_rank` is set: the value that `op` produced goes from `rank` to `to_rank`.
    The two ops of a pair have the same start and end.

    In a measured timeline, a transfer starts when its op ends. It ends when the value is in the
    receiver's memory, or where that is not known (process groups), when the op that takes it is
    ready to start: a value that the receiver did not wait for may have arrived earlier.

    `wait_s` is measured: for how long, up to its start, an op waited for a value of another rank.
    None if it is not known.
    """

    rank: int
    op: Op
    start: float
    end: float
    bytes: int = 0
    to_rank: int | None = None
    wait_s: float | None = None


@dataclass(frozen=True)
class MeasuredMemory:
    """Peak bytes of one rank that stand beside the sum of its tensors in `Timeline.peak_memory`.

    Attributes:
        buffers: of messages over process groups: receives that were posted ahead, and sends that
            have not left; since the pipeline was made.
        allocated: that torch's allocator had given to tensors on the rank's GPU, those of ops and
            their workspaces included; 0 on the CPU. Like `reserved`, of the whole process, and
            since it began or since `torch.cuda.reset_peak_memory_stats`.
        reserved: that torch's allocator had taken from the GPU; 0 on the CPU.
    """

    buffers: int
    allocated: int
    reserved: int


@dataclass(frozen=True, eq=False)
class MemoryCurve:
    """Memory of one rank over time, as a step function.

    The rank holds `bytes[i]` from `seconds[i]` to `seconds[i + 1]`; the last value stays until the
    end. A moment occurs several times in `seconds` if the memory changes several times then.
    """

    seconds: Array
    bytes: Array

    @property
    def peak(self) -> int:
        """Maximum number of bytes."""
        return int(self.bytes.max(initial=0))

    @property
    def peak_at(self) -> float:
        """Time at which the maximum is first reached, in seconds."""
        return float(self.seconds[int(np.argmax(self.bytes))]) if len(self.bytes) else 0.0


class MemoryAccount(Protocol):
    """Source of the memory figures of a timeline, which computes them on demand."""

    @property
    def curves(self) -> tuple[MemoryCurve, ...]:
        """Memory over time, per rank."""

    @property
    def holders(self) -> tuple[dict[str, int], ...]:
        """Bytes by purpose at the moment of peak memory, per rank."""


@dataclass(frozen=True, eq=False)
class TransferArrays:
    """The transfers of an `EventArrays`, as arrays.

    Attributes:
        link: per op, the link that its value crosses, -1 if it crosses none.
        to_rank: per link, the receiving rank.
        start, end: per op, times of its transfer in seconds.
        place: per op, the index of its transfer's size in `sizes`.
        sizes: sizes in bytes.
    """

    link: Array
    to_rank: Array
    start: Array
    end: Array
    place: Array
    sizes: Array


@dataclass(frozen=True, eq=False)
class EventArrays:
    """The events of a timeline as arrays, rank by rank.

    The ops of a rank are in the order in which the rank ran them.

    Attributes:
        ops: the ops.
        start, end: per op, its times in seconds.
        moves: the transfers, if they are known.
    """

    ops: OpArrays
    start: Array
    end: Array
    moves: TransferArrays | None = None

    @classmethod
    def of(cls, events: Iterable[Event], ranks: int, slicing: Slicing | None) -> EventArrays:
        """Build the arrays from compute events."""
        rows: list[list[Event]] = [[] for _ in range(ranks)]
        for event in events:
            rows[event.rank].append(event)
        programs = []
        rank_by_rank: list[Event] = []
        for row in rows:
            programs.append([event.op for event in row])
            rank_by_rank += row
        ops = OpArrays.of(programs, slicing)
        start = np.array([event.start for event in rank_by_rank], float)
        end = np.array([event.end for event in rank_by_rank], float)
        return cls(ops, start, end)

    def events(self) -> tuple[Event, ...]:
        """Return all events, ordered by start, end and rank.

        Events of one rank with the same start and end are in program order.
        """
        ops, moves = self.ops, self.moves
        op_indices = np.arange(len(ops))
        # An event is an op, or the transfer of an op's value: `producer` is the index of that op.
        producer, start, end = op_indices, self.start, self.end
        to_rank: list[int | None] = [None] * len(op_indices)
        sizes = [0] * len(op_indices)
        if moves is not None:
            crossing = np.flatnonzero(moves.link >= 0)
            producer = np.concatenate([op_indices, crossing])
            start = np.concatenate([start, moves.start[crossing]])
            end = np.concatenate([end, moves.end[crossing]])
            to_rank += moves.to_rank[moves.link[crossing]].tolist()
            sizes += list(map(round, moves.sizes[moves.place[crossing]].tolist()))
        rank = ops.rank[producer]
        order = np.lexsort((producer, rank, end, start)).tolist()
        # Python lists: element access is several times faster than in NumPy arrays.
        all_ops = ops.all_ops()
        producers, ranks = producer.tolist(), rank.tolist()
        starts, ends = start.tolist(), end.tolist()
        return tuple(
            Event(ranks[i], all_ops[producers[i]], starts[i], ends[i], sizes[i], to_rank[i])
            for i in order
        )

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """Busy time per rank in seconds; time that two ops share counts once."""
        bounds = self.ops.first.tolist()
        busy_seconds = []
        for low, high in pairwise(bounds):
            start, end = self.start[low:high], self.end[low:high]
            # Of every op only the part after the end of all earlier ops counts.
            previous_end = np.maximum.accumulate(end)[:-1]
            added_seconds = end - start
            added_seconds[1:] = np.maximum(end[1:] - np.maximum(start[1:], previous_end), 0.0)
            busy_seconds.append(float(added_seconds.sum()))
        return tuple(busy_seconds)

    @cached_property
    def span_bubble_ratio(self) -> float:
        """See `Timeline.span_bubble_ratio`."""
        compute = np.flatnonzero(~self.ops.of_kind(Kind.U, *ACTIVATION_MOVES))
        rank_starts = runs(self.ops.rank[compute])
        if not len(rank_starts):
            return 0.0
        start, end = self.start[compute], self.end[compute]
        spans = np.maximum.reduceat(end, rank_starts) - np.minimum.reduceat(start, rank_starts)
        longest_span = float(spans.max())
        if not longest_span:
            return 0.0
        busy = EventArrays(self.ops.at(compute), start, end).busy
        return max(1.0 - sum(busy) / (len(self.busy) * longest_span), 0.0)


def _no_peak_memory() -> None:
    """Return None, the default of `Timeline.peak_memory`."""


@dataclass(frozen=True, repr=False)
class Timeline(NotebookPicture):
    """The events of one step, ordered by start. Times are in seconds from the first event.

    Attributes:
        events: ops and transfers. A simulated timeline builds them at the first access.
        ranks, stages: how many there are.
        peak_memory: bytes per rank, None if unknown.
        source: "simulated" or "measured".
        title: name of the schedule.
        slicing: how micro-batches are cut into slices, if they are; ops then count slices.
        account: source of the memory over time, if it is known.
        measured_memory: per rank, further peaks of a measured timeline; None if simulated.
        hosts: per rank, the name of its host; empty if it is not known.

    Examples:
        >>> import penstock as ps
        >>> timeline = ps.simulate(ps.schedule("1f1b", 2, 2), ps.Costs(forward=1, backward=2))
        >>> timeline.makespan, timeline.peak_in_flight
        (9.0, (2, 1))
    """

    events: tuple[Event, ...]
    ranks: int
    stages: int
    # A default factory, since a plain default would become a class attribute, and `__getattr__`
    # would not be called for it.
    peak_memory: tuple[int, ...] | None = field(default_factory=_no_peak_memory)
    source: str = "simulated"
    title: str = ""
    slicing: Slicing | None = None
    account: MemoryAccount | None = field(default=None, compare=False, repr=False)
    measured_memory: tuple[MeasuredMemory, ...] | None = field(
        default=None, compare=False, repr=False
    )
    hosts: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return (
            f"<Timeline {self.title}, {self.source}: {self.stages} stages on {self.ranks} ranks, "
            f"makespan {format_seconds(self.makespan)}, bubble ratio {self.bubble_ratio:.1%}>"
        )

    # Type checkers know the fields and must not see the untyped `__getattr__`.
    if not TYPE_CHECKING:

        def __getattr__(self, name):  # noqa: ANN001, ANN204 - see above
            """Compute the fields that `of_log` leaves out, at their first access."""
            if name not in ("events", "peak_memory") or "log" not in self.__dict__:
                raise AttributeError(f"a Timeline has no {name!r}")
            if name == "events":
                value = self.__dict__["log"].events()
            elif self.account is None:
                value = None
            else:
                value = tuple(curve.peak for curve in self.account.curves)
            object.__setattr__(self, name, value)
            return value

    @classmethod
    def of(
        cls,
        events: Iterable[Event | EventRow],
        ranks: int,
        stages: int,
        peak_memory: tuple[int, ...] | None = None,
        source: str = "simulated",
        title: str = "",
    ) -> Timeline:
        """Build a timeline from Events or from rows with their fields.

        Times are shifted so that the first event starts at 0. Events of a rank with the same start
        and end stay in the order given.
        """
        ordered = sorted(
            starmap(Event, events), key=lambda event: (event.start, event.end, event.rank)
        )
        origin = ordered[0].start if ordered else 0.0
        shifted = tuple(
            event._replace(start=event.start - origin, end=event.end - origin) for event in ordered
        )
        return cls(shifted, ranks, stages, peak_memory, source, title)

    @classmethod
    def of_log(cls, log: EventArrays, title: str, account: MemoryAccount | None = None) -> Timeline:
        """Build a simulated timeline from arrays whose times start at 0.

        `events` and `peak_memory` are computed at their first access.
        """
        timeline = cls.__new__(cls)
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
            object.__setattr__(timeline, name, value)
        return timeline

    @cached_property
    def log(self) -> EventArrays:
        """The compute events as arrays; for a simulated timeline the transfers too."""
        return EventArrays.of(self.compute, self.ranks, self.slicing)

    @cached_property
    def compute(self) -> tuple[Event, ...]:
        """The events without the transfers."""
        return tuple(event for event in self.events if event.to_rank is None)

    @cached_property
    def makespan(self) -> float:
        """Seconds from the first event's start to the last compute op's end."""
        return float(self.log.end.max(initial=0.0))

    @property
    def busy(self) -> tuple[float, ...]:
        """Busy time per rank in seconds; the time of a pair counts once."""
        return self.log.busy

    @property
    def bubble_ratio(self) -> float:
        """Idle time of all ranks / (ranks x makespan)."""
        rank_seconds = self.ranks * self.makespan
        if not rank_seconds:
            return 0.0
        # The sum of busy times may exceed the total by a rounding error.
        return max(1.0 - sum(self.busy) / rank_seconds, 0.0)

    @property
    def span_bubble_ratio(self) -> float:
        """Idle share of the longest span of a rank, from its first op's start to its last op's end.

        This is the bubble ratio of the zero-bubble papers. Source: Qi et al. 2024, section 2.3;
        with equal stages, (cost - m(f+i+w)) / cost. As there, updates are left out, because they
        are not synchronised across ranks. Evictions and loads are left out too, because they
        compute nothing.
        """
        return self.log.span_bubble_ratio

    @property
    def peak_in_flight(self) -> tuple[float, ...]:
        """Maximum number of micro-batches in flight on any rank of a stage, per stage.

        In flight: the forward has run, the backward has not finished, and the activations are not
        on a partner rank. A fraction where micro-batches are cut into slices.
        """
        by_stage = self.log.ops.in_flight[0]
        return by_stage + (0,) * (self.stages - len(by_stage))

    @property
    def peak_on_rank(self) -> tuple[float, ...]:
        """Maximum number of micro-batches whose activations a rank holds, over all its stages."""
        return self.log.ops.in_flight[1]

    @property
    def memory(self) -> tuple[MemoryCurve, ...] | None:
        """Memory over time, per rank; None if unknown."""
        return None if self.account is None else self.account.curves

    @property
    def memory_holders(self) -> tuple[dict[str, int], ...] | None:
        """Bytes by purpose at the moment of peak memory, per rank; None if unknown.

        The purposes are weights, gradients, optimizer, activations, boundary and recompute.
        """
        return None if self.account is None else self.account.holders
