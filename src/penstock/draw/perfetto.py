"""Timelines as trace-event JSON for ui.perfetto.dev and chrome://tracing.

Format: "Trace Event Format" (Google; the document that Perfetto's own manual names for JSON
traces): complete events X, metadata M, flows s and f, counters C; `ts` and `dur` in microseconds.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from penstock.draw.facts import clean, heading, op_name, op_number
from penstock.event import Event, Timeline
from penstock.schedule.op import Kind, Op
from penstock.schedule.rules import needs

#: The thread of a rank's ops; that of its link to rank r is r + 2. Neither a process nor a thread
#: is 0, which Perfetto takes for
#: the kernel's idle process (google/perfetto issues 394 and 560): the process of rank r is r + 1.
_OPS = 1


def perfetto(panels: Sequence[Timeline]) -> str:
    """Draw timelines as a trace: a process per rank, with a thread for its ops and one for every
    link that starts there.

    Where it is known what the ranks hold, each has a counter of bytes. Arrows go from the op that
    made a value to the op that took it, or to the transfer's end where no op is known to have.

    Args:
        panels: the timelines; of several, every process says whose it is.
    """
    entries: list[dict[str, object]] = []
    for index, panel in enumerate(panels):
        first = 1 + sum(before.ranks for before in panels[:index])
        entries += _processes(panel, first, f", {heading(panel)}" if len(panels) > 1 else "")
        entries += [_slice(panel, event, first) for event in panel.events]
        entries += _counters(panel, first)
        entries += _flows(panel, first, sum(len(before.events) for before in panels[:index]))
    about = {
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
        f'{{"displayTimeUnit":"ms","otherData":{json.dumps(about)},"traceEvents":[\n{lines}\n]}}\n'
    )


def _processes(panel: Timeline, first: int, whose: str) -> list[dict[str, object]]:
    """Names and order of processes and threads."""
    entries: list[dict[str, object]] = []
    links = {(event.rank, event.to_rank) for event in panel.events if event.to_rank is not None}
    for rank in range(panel.ranks):
        process = {"ph": "M", "pid": first + rank, "tid": _OPS}
        entries.append({"name": "process_name", **process, "args": {"name": f"rank {rank}{whose}"}})
        entries.append(
            {"name": "process_sort_index", **process, "args": {"sort_index": first + rank}}
        )
        threads = [
            (_OPS, "ops"),
            *(
                (target + 2, f"to rank {target}")
                for source, target in sorted(links)
                if source == rank
            ),
        ]
        for thread, name in threads:
            entries.append(
                {"name": "thread_name", **process, "tid": thread, "args": {"name": name}}
            )
            entries.append(
                {
                    "name": "thread_sort_index",
                    **process,
                    "tid": thread,
                    "args": {"sort_index": thread},
                }
            )
    return entries


def _place(event: Event, first: int) -> dict[str, int]:
    return {"pid": first + event.rank, "tid": _OPS if event.to_rank is None else event.to_rank + 2}


def _slice(panel: Timeline, event: Event, first: int) -> dict[str, object]:
    args: dict[str, object] = {"stage": event.op.stage, "micro_batch": event.op.micro_batch}
    if event.bytes:
        args["bytes"] = event.bytes
    if panel.slicing is not None and event.op.kind is not Kind.U:
        args |= {
            "micro_batch": panel.slicing.micro_batch_of[event.op.micro_batch],
            "slice": op_number(panel, event.op),
        }
    name, kind = op_name(panel, event.op), event.op.kind.value
    if event.to_rank is not None:
        name, kind = f"send {name}", "transfer"
        args["to_rank"] = event.to_rank
    start, end = _microseconds(event.start), _microseconds(event.end)
    return {
        "name": name,
        "cat": kind,
        "ph": "X",
        "ts": start,
        "dur": round(end - start, 3),
        **_place(event, first),
        "args": args,
    }


def _counters(panel: Timeline, first: int) -> list[dict[str, object]]:
    """What every rank holds; of several changes at a time the last, which is what it holds from
    then on.
    """
    entries: list[dict[str, object]] = []
    for rank, curve in enumerate(panel.memory or ()):
        held = dict(
            zip(map(_microseconds, curve.seconds.tolist()), curve.bytes.tolist(), strict=True)
        )
        entries += [
            {
                "ph": "C",
                "name": "memory",
                "pid": first + rank,
                "ts": moment,
                "args": {"bytes": count},
            }
            for moment, count in held.items()
        ]
    return entries


def _flows(panel: Timeline, first: int, number: int) -> list[dict[str, object]]:
    """One arrow per transfer, numbered on from `number`: Perfetto reads ids that are text as
    hexadecimal.
    """
    made = {(event.rank, event.op): event for event in panel.compute}
    taken: dict[tuple[int, Op], Event] = {}
    for event in panel.compute:
        for group in needs(event.op, panel.stages, panel.slicing):
            for op in group:
                taken.setdefault((event.rank, op), event)
    entries: list[dict[str, object]] = []
    for transfer in panel.events:
        if transfer.to_rank is None:
            continue
        number += 1
        maker = made.get((transfer.rank, transfer.op), transfer)
        taker = taken.get((transfer.to_rank, transfer.op))
        flow = {"name": "value", "cat": "flow", "id": number}
        entries.append({**flow, "ph": "s", "ts": _within(maker, 0.999), **_place(maker, first)})
        last, share = (taker, 0.001) if taker else (transfer, 0.999)
        entries.append(
            {**flow, "ph": "f", "bp": "e", "ts": _within(last, share), **_place(last, first)}
        )
    return entries


def _within(event: Event, share: float) -> float:
    """A moment inside an event: an arrow belongs to the slice that is open at its end, and at the
    edges none may be.
    """
    return _microseconds(event.start + share * (event.end - event.start))


def _microseconds(seconds: float) -> float:
    return round(seconds * 1e6, 3)
