"""What every drawing says of a timeline in words, and how foreign words are made safe to print."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from penstock.draw.memory import told
from penstock.draw.scale import Clock, number
from penstock.event import Timeline
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

#: Control characters, lone surrogates and the two that are none: what XML 1.0 forbids, and the C1
#: controls.
_UNSAFE = re.compile("[\x00-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")
#: Lists with more entries are written as their range.
_LONG_LIST = 16


def clean(text: str) -> str:
    """`text` on one line, without what would steer a terminal or break XML: control characters,
    lone surrogates.
    """
    return _UNSAFE.sub("\N{REPLACEMENT CHARACTER}", " ".join(text.split()))


def heading(panel: Timeline) -> str:
    """The title with what the numbers are: `1f1b, simulated`."""
    return ", ".join(clean(part) for part in (panel.title, panel.source) if part)


def kinds(panels: Sequence[Timeline]) -> list[Kind]:
    """The kinds of op that occur, in the order F, B, I, W, U, E, L."""
    found = {number for panel in panels for number in np.unique(panel.log.ops.kind).tolist()}
    return [kind for kind in Kind if ord(kind.value) in found]


def op_number(panel: Timeline, op: Op) -> str:
    """What stands in an op's box: its micro-batch, with the slice where it is cut (`3.1`); of U the
    weight version.
    """
    slicing = panel.slicing
    if slicing is None or op.kind is Kind.U or op.micro_batch >= len(slicing.share):
        return str(op.micro_batch)
    return slicing.label(op.micro_batch)


def op_name(panel: Timeline, op: Op) -> str:
    """The op's text with its slice: `2F3.1`."""
    return f"{op.stage}{op.kind}{op_number(panel, op)}"


def stages_of_rank(panel: Timeline) -> list[list[int]]:
    """The stages whose ops each rank ran, ascending; keeping activations for another rank is none
    of them.
    """
    ops = panel.log.ops
    own = ~ops.of_kind(*ACTIVATION_MOVES)
    count = max(ops.stages, 1)
    held: list[list[int]] = [[] for _ in range(panel.ranks)]
    for place in np.unique(ops.rank[own].astype(np.int64) * count + ops.stage[own]).tolist():
        held[place // count].append(place % count)
    return held


def busy_shares(panel: Timeline) -> list[float]:
    """Per rank, the share of the makespan in which it worked, 0 to 1."""
    return [seconds / panel.makespan if panel.makespan else 0.0 for seconds in panel.busy]


def percent(share: float) -> str:
    """`0.3333` as `33.3 %`."""
    return f"{100 * share:.1f} %"


def figures(panel: Timeline, clock: Clock) -> list[str]:
    """Makespan, bubble ratio, busy share per rank, peak in flight per stage and, when known, peak
    memory per rank.
    """
    busy = [number(100 * share, 0) for share in busy_shares(panel)]
    words = [
        f"makespan {clock.exact(panel.makespan)}",
        f"bubble ratio {percent(panel.bubble_ratio)}",
        f"busy per rank {_listed(busy, list(map(float, busy)))}" + (" %" if busy else ""),
        f"peak in flight {_listed([number(peak, 2) for peak in panel.peak_in_flight], panel.peak_in_flight)}",
    ]
    if panel.peak_memory is not None:
        words.append(
            f"peak memory {_listed(list(map(format_bytes, panel.peak_memory)), panel.peak_memory, ' / ')}"
        )
        if panel.memory_holders is not None and max(panel.peak_memory, default=0) > 0:
            rank = panel.peak_memory.index(max(panel.peak_memory))
            words.append(f"fullest is rank {rank}: {told(panel, rank)}")
    return words


def _listed(texts: list[str], values: Sequence[float], between: str = " ") -> str:
    if len(texts) <= _LONG_LIST:
        return between.join(texts) or "none"
    return f"{texts[values.index(min(values))]} to {texts[values.index(max(values))]}"
