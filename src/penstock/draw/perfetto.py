"""Timelines as trace-event JSON for ui.perfetto.dev and chrome://tracing.

Format: "Trace Event Format" (Google; the document that Perfetto's own manual names for JSON
traces): complete events X, metadata M, flows s and f, counters C; `ts` and `dur` in microseconds.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from penstock.draw.facts import clean, heading, op_name, op_number, shown_idle
from penstock.event import Event, Timeline
from penstock.idle import IdleInterval
from penstock.schedule.op import Kind, Op
from penstock.schedule.rules import needs

Entry = dict[str, object]

#: Thread of a rank's ops; the thread of its link to rank r is r + 2, those of further transfers at
#: the same time come after all of these, and the process of rank r is r + 1. No process or thread
#: is 0, which Perfetto takes for the kernel's idle process (google/perfetto issues 394 and 560).
_OPS_THREAD = 1
#: Thread of a rank's idle intervals, in measured timelines: after all others.
_IDLE_THREAD = 1_000_000_000


def perfetto(panels: Sequence[Timeline]) -> str:
    """Return timelines as a trace with one process per rank.

    A process has one thread for its ops and one for each link that starts at the rank; in a
    measured timeline also one for its idle intervals, by what they wait for. If memory is known, it
    also has a counter of bytes. Arrows go from the op that produces a value to the op that consumes
    it, or to the end of the transfer if the consumer is unknown.

    Args:
        panels: the timelines. If there are several, the names of processes include the timeline.
    """
    entries: list[Entry] = []
    first_process, flow_id = 1, 0
    for panel in panels:
        suffix = f", {heading(panel)}" if len(panels) > 1 else ""
        idle = shown_idle(panel)
        threads = _Threads.of(panel)
        entries += _metadata(panel, threads, first_process, suffix)
        for event in panel.events:
            entries.append(_slice(panel, event, threads.track(event, first_process)))
        entries += [_idle_slice(panel, interval, first_process) for interval in idle]
        entries += _counters(panel, first_process)
        entries += _flows(panel, threads, first_process, flow_id)
        first_process += panel.ranks
        flow_id += len(panel.events)
    summary = {
        "penstock": [
            {
                "title": clean(panel.title),
                "source": clean(panel.source),
                "makespan_s": panel.makespan,
                "bubble_ratio": panel.bubble_ratio,
            }
            for panel in panels
        ]
    }
    lines = ",\n".join(json.dumps(entry, separators=(",", ":")) for entry in entries)
    return (
        f'{{"displayTimeUnit":"ms","otherData":{json.dumps(summary)},'
        f'"traceEvents":[\n{lines}\n]}}\n'
    )


@dataclass(frozen=True)
class _Threads:
    """The threads of a timeline's events.

    A rank has one for its ops, and one for each link that starts at it. Slices of one thread must
    not overlap. Measured transfers of one link may: each further one at a time has a thread of its
    own.

    Attributes:
        ranks: number of ranks.
        lane: per transfer (rank, op, to_rank), its place among the threads of its link, from 0.
        lanes: per link (rank, to_rank), the number of its threads.
    """

    ranks: int
    lane: dict[tuple[int, Op, int], int]
    lanes: dict[tuple[int, int], int]

    @classmethod
    def of(cls, panel: Timeline) -> _Threads:
        """Assign the transfers of a timeline to threads."""
        lane_of: dict[tuple[int, Op, int], int] = {}
        lane_ends: dict[tuple[int, int], list[float]] = {}
        for event in panel.events:
            if event.to_rank is None:
                continue
            ends = lane_ends.setdefault((event.rank, event.to_rank), [])
            lane = 0
            while lane < len(ends) and _microseconds(ends[lane]) > _microseconds(event.start):
                lane += 1
            # Replaces the end of a free thread, or appends one.
            ends[lane : lane + 1] = [event.end]
            lane_of[event.rank, event.op, event.to_rank] = lane
        lanes = {link: len(ends) for link, ends in lane_ends.items()}
        return cls(panel.ranks, lane_of, lanes)

    def named(self, rank: int) -> list[tuple[int, str]]:
        """Return number and name of the threads of a rank."""
        named = [(_OPS_THREAD, "ops")]
        for (source, target), count in sorted(self.lanes.items()):
            if source != rank:
                continue
            named.append((self._number(target, 0), f"to rank {target}"))
            for lane in range(1, count):
                named.append((self._number(target, lane), f"to rank {target}, {lane + 1}"))
        return named

    def track(self, event: Event, first_process: int) -> dict[str, int]:
        """Return the process and thread of an event."""
        thread = _OPS_THREAD
        if event.to_rank is not None:
            lane = self.lane[event.rank, event.op, event.to_rank]
            thread = self._number(event.to_rank, lane)
        return {"pid": first_process + event.rank, "tid": thread}

    def _number(self, to_rank: int, lane: int) -> int:
        """Return the thread of a link to a rank."""
        # After the thread of the ops come `ranks` numbers for every lane.
        return to_rank + 2 + lane * self.ranks


def _metadata(panel: Timeline, threads: _Threads, first_process: int, suffix: str) -> list[Entry]:
    """Return the names and the order of processes and threads.

    Args:
        panel: the timeline.
        threads: of its events.
        first_process: process of rank 0.
        suffix: what follows the rank in the name of a process.
    """
    entries: list[Entry] = []
    has_idle = bool(shown_idle(panel))
    for rank in range(panel.ranks):
        process = first_process + rank
        entries.append(
            _metadata_entry("process_name", process, _OPS_THREAD, {"name": f"rank {rank}{suffix}"})
        )
        entries.append(
            _metadata_entry("process_sort_index", process, _OPS_THREAD, {"sort_index": process})
        )
        named = threads.named(rank)
        if has_idle:
            named.append((_IDLE_THREAD, "idle"))
        for thread, name in named:
            entries.append(_metadata_entry("thread_name", process, thread, {"name": name}))
            entries.append(
                _metadata_entry("thread_sort_index", process, thread, {"sort_index": thread})
            )
    return entries


def _metadata_entry(name: str, process: int, thread: int, args: Entry) -> Entry:
    return {"name": name, "ph": "M", "pid": process, "tid": thread, "args": args}


def _slice(panel: Timeline, event: Event, track: dict[str, int]) -> Entry:
    """Return the slice of an op or transfer on its track."""
    args: Entry = {"stage": event.op.stage, "micro_batch": event.op.micro_batch}
    if event.bytes:
        args["bytes"] = event.bytes
    if panel.slicing is not None and event.op.kind is not Kind.U:
        args["micro_batch"] = panel.slicing.micro_batch_of[event.op.micro_batch]
        args["slice"] = op_number(panel, event.op)
    name, category = op_name(panel, event.op), event.op.kind.value
    if event.to_rank is not None:
        name, category = f"send {name}", "transfer"
        args["to_rank"] = event.to_rank
    start, end = _microseconds(event.start), _microseconds(event.end)
    return {
        "name": name,
        "cat": category,
        "ph": "X",
        "ts": start,
        "dur": round(end - start, 3),
        **track,
        "args": args,
    }


def _idle_slice(panel: Timeline, interval: IdleInterval, first_process: int) -> Entry:
    """Return the slice of an idle interval, named after what the rank waits for."""
    name = "neither neighbour nor link"
    args: Entry = {}
    transfer = interval.transfer
    if transfer is not None:
        name = f"waits for the {interval.cause.value}: {op_name(panel, transfer.op)}"
        args = {"from_rank": transfer.rank, "bytes": transfer.bytes}
    start, end = _microseconds(interval.start), _microseconds(interval.end)
    return {
        "name": name,
        "cat": f"idle, {interval.cause.value}",
        "ph": "X",
        "ts": start,
        "dur": round(end - start, 3),
        "pid": first_process + interval.rank,
        "tid": _IDLE_THREAD,
        "args": args,
    }


def _counters(panel: Timeline, first_process: int) -> list[Entry]:
    """Return the memory counters of all ranks.

    Of several changes at the same time, only the last is written: the bytes held from then on.
    """
    entries: list[Entry] = []
    for rank, curve in enumerate(panel.memory or ()):
        moments = [_microseconds(seconds) for seconds in curve.seconds.tolist()]
        bytes_at = dict(zip(moments, curve.bytes.tolist(), strict=True))
        for moment, size in bytes_at.items():
            entries.append(
                {
                    "ph": "C",
                    "name": "memory",
                    "pid": first_process + rank,
                    "ts": moment,
                    "args": {"bytes": size},
                }
            )
    return entries


def _flows(panel: Timeline, threads: _Threads, first_process: int, last_id: int) -> list[Entry]:
    """Return one arrow per transfer.

    Args:
        panel: the timeline.
        threads: of its events.
        first_process: process of rank 0.
        last_id: the last id in use. Ids are numbers, since Perfetto reads text as hexadecimal.
    """
    producers = {(event.rank, event.op): event for event in panel.compute}
    consumers = _first_consumers(panel)
    entries: list[Entry] = []
    flow_id = last_id
    for transfer in panel.events:
        if transfer.to_rank is None:
            continue
        flow_id += 1
        producer = producers.get((transfer.rank, transfer.op), transfer)
        consumer = consumers.get((transfer.to_rank, transfer.op))
        flow = {"name": "value", "cat": "flow", "id": flow_id}
        start = _moment_within(producer, 0.999)
        entries.append({**flow, "ph": "s", "ts": start, **threads.track(producer, first_process)})
        target, share = (consumer, 0.001) if consumer else (transfer, 0.999)
        end = _moment_within(target, share)
        entries.append(
            {**flow, "ph": "f", "bp": "e", "ts": end, **threads.track(target, first_process)}
        )
    return entries


def _first_consumers(panel: Timeline) -> dict[tuple[int, Op], Event]:
    """Return the first event on each rank that needs the value of an op."""
    consumers: dict[tuple[int, Op], Event] = {}
    for event in panel.compute:
        for group in needs(event.op, panel.stages, panel.slicing):
            for op in group:
                consumers.setdefault((event.rank, op), event)
    return consumers


def _moment_within(event: Event, share: float) -> float:
    """Return a moment inside an event, in microseconds.

    Perfetto attaches the end of an arrow to the slice that is open at that moment. At an edge of
    the event none may be open, so `share` is not 0 or 1.
    """
    return _microseconds(event.start + share * (event.end - event.start))


def _microseconds(seconds: float) -> float:
    """Convert seconds to microseconds, rounded to nanoseconds."""
    return round(seconds * 1e6, 3)
