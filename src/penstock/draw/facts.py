"""Facts that every drawing states about a timeline, and escaping of untrusted text."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from penstock.draw.memory import holder_text
from penstock.draw.scale import Clock, format_number
from penstock.event import Timeline
from penstock.idle import IdleInterval, idle_intervals, idle_seconds
from penstock.schedule.op import ACTIVATION_MOVES, Kind, Op
from penstock.units import format_bytes

KIND_NAMES = {
    Kind.F: "forward",
    Kind.B: "backward",
    Kind.I: "backward for the input",
    Kind.W: "backward for the weights",
    Kind.U: "update",
    Kind.E: "evict: activations to a partner",
    Kind.L: "load: activations back",
}

#: Characters that XML 1.0 forbids (control characters, lone surrogates and two noncharacters), and
#: the C1 controls, which can steer a terminal.
_UNSAFE = re.compile("[\x00-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")
#: With more ops than this, drawings do not tell what ranks wait for.
MAX_EXPLAINED_OPS = 20_000
#: Lists with more entries are written as their range.
_LONG_LIST = 16


def clean(text: str) -> str:
    """Return `text` on one line, safe for a terminal and for XML.

    Control characters and lone surrogates are replaced by U+FFFD.
    """
    return _UNSAFE.sub("\N{REPLACEMENT CHARACTER}", " ".join(text.split()))


def heading(panel: Timeline) -> str:
    """Return the title and the source of a timeline: `1f1b, simulated`."""
    return ", ".join(clean(part) for part in (panel.title, panel.source) if part)


def kinds_in(panels: Sequence[Timeline]) -> list[Kind]:
    """Return the kinds of op that occur, in the order F, B, I, W, U, E, L."""
    codes: set[int] = set()
    for panel in panels:
        codes.update(np.unique(panel.log.ops.kind).tolist())
    return [kind for kind in Kind if ord(kind.value) in codes]


def op_number(panel: Timeline, op: Op) -> str:
    """Return the number in an op's box.

    This is its micro-batch, with the slice if micro-batches are cut into slices (`3.1`); for a U,
    the weight version.
    """
    slicing = panel.slicing
    if slicing is None or op.kind is Kind.U or op.micro_batch >= len(slicing.share):
        return str(op.micro_batch)
    return slicing.label(op.micro_batch)


def op_name(panel: Timeline, op: Op) -> str:
    """Return the text of an op with its slice: `2F3.1`."""
    return f"{op.stage}{op.kind}{op_number(panel, op)}"


def stages_of_rank(panel: Timeline) -> list[list[int]]:
    """Return per rank the stages whose ops it ran, in ascending order.

    Storing activations for another rank does not count as running its stage.
    """
    ops = panel.log.ops
    is_compute = ~ops.of_kind(*ACTIVATION_MOVES)
    stage_count = max(ops.stages, 1)
    stages: list[list[int]] = [[] for _ in range(panel.ranks)]
    # One integer per (rank, stage) pair, so that `np.unique` works on a flat array.
    pairs = ops.rank[is_compute].astype(np.int64) * stage_count + ops.stage[is_compute]
    for pair in np.unique(pairs).tolist():
        rank, stage = divmod(pair, stage_count)
        stages[rank].append(stage)
    return stages


def busy_shares(panel: Timeline, seconds: float | None = None) -> list[float]:
    """Return per rank the share of the makespan, or of `seconds`, in which it worked, 0 to 1."""
    duration = panel.makespan if seconds is None else seconds
    return [min(busy / duration, 1.0) if duration else 0.0 for busy in panel.busy]


def shown_idle(panel: Timeline) -> tuple[IdleInterval, ...]:
    """Return the idle intervals that drawings explain: those of measured timelines.

    They are also left out where there are no transfers, and where the timeline has more than
    `MAX_EXPLAINED_OPS` ops: to find them would take seconds.
    """
    measured = panel.source == "measured" and len(panel.log.start) <= MAX_EXPLAINED_OPS
    if not measured or len(panel.events) == len(panel.compute):
        return ()
    return idle_intervals(panel)


def idle_item(panel: Timeline) -> str:
    """Return the key figure of what idle ranks wait for; empty if that is not known."""
    intervals = shown_idle(panel)
    if not intervals:
        return ""
    lists = []
    seconds = idle_seconds(panel, intervals)
    for name, values in (
        ("neighbour", [row.neighbour for row in seconds]),
        ("link", [row.link for row in seconds]),
        ("rest", [row.rest for row in seconds]),
    ):
        shares = [value / panel.makespan for value in values]
        texts = [format_number(100 * share, 0) for share in shares]
        lists.append(f"{name} {_list_or_range(texts, shares)} %")
    return f"idle per rank for {'; '.join(lists)}"


def percent(share: float) -> str:
    """Format a share as a percentage: `0.3333` as `33.3 %`."""
    return f"{100 * share:.1f} %"


def summary_items(panel: Timeline, clock: Clock) -> list[str]:
    """Return the key figures of a timeline as text, one item each.

    These are makespan, bubble ratio, busy share per rank, peak in flight per stage and, if known,
    what idle ranks wait for, and peak memory per rank with the contents of the rank with the
    highest.
    """
    busy = [format_number(100 * share, 0) for share in busy_shares(panel)]
    busy_list = _list_or_range(busy, [float(share) for share in busy])
    in_flight = [format_number(peak, 2) for peak in panel.peak_in_flight]
    items = [
        f"makespan {clock.exact(panel.makespan)}",
        f"bubble ratio {percent(panel.bubble_ratio)}",
        f"busy per rank {busy_list}" + (" %" if busy else ""),
        f"peak in flight {_list_or_range(in_flight, panel.peak_in_flight)}",
    ]
    idle = idle_item(panel)
    if idle:
        items.append(idle)
    if panel.peak_memory is not None:
        sizes = [format_bytes(peak) for peak in panel.peak_memory]
        items.append(f"peak memory {_list_or_range(sizes, panel.peak_memory, ' / ')}")
        highest = max(panel.peak_memory, default=0)
        if panel.memory_holders is not None and highest > 0:
            rank = panel.peak_memory.index(highest)
            items.append(f"largest on rank {rank}: {holder_text(panel, rank)}")
    return items


def _list_or_range(texts: list[str], values: Sequence[float], separator: str = " ") -> str:
    """Return all `texts`, or for a long list those of the smallest and the largest value."""
    if len(texts) <= _LONG_LIST:
        return separator.join(texts) or "none"
    return f"{texts[values.index(min(values))]} to {texts[values.index(max(values))]}"
