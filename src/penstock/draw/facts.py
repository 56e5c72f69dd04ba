"""What every drawing says of a timeline in words, and how foreign words are made safe to print."""

from __future__ import annotations

import re
from collections.abc import Sequence

from penstock.draw.scale import Clock, number
from penstock.event import Timeline
from penstock.schedule.op import Kind
from penstock.units import format_bytes

KIND_NAMES = {
    Kind.F: "forward",
    Kind.B: "backward",
    Kind.I: "backward for the input",
    Kind.W: "backward for the weights",
    Kind.U: "update",
}

#: Control characters, lone surrogates and the two that are none: what XML 1.0 forbids, and the C1 controls.
_UNSAFE = re.compile("[\x00-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")
#: Lists with more entries are written as their range.
_LONG_LIST = 16


def clean(text: str) -> str:
    """`text` on one line, without what would steer a terminal or break XML: control characters, lone surrogates."""
    return _UNSAFE.sub("\N{REPLACEMENT CHARACTER}", " ".join(text.split()))


def heading(panel: Timeline) -> str:
    """The title with what the numbers are: `1f1b, simulated`."""
    return ", ".join(clean(part) for part in (panel.title, panel.source) if part)


def kinds(panels: Sequence[Timeline]) -> list[Kind]:
    """The kinds of op that occur, in the order F, B, I, W, U."""
    found = {event.op.kind for panel in panels for event in panel.compute}
    return [kind for kind in Kind if kind in found]


def stages_of_rank(panel: Timeline) -> list[list[int]]:
    """The stages whose ops each rank ran, ascending."""
    held: list[set[int]] = [set() for _ in range(panel.ranks)]
    for event in panel.compute:
        held[event.rank].add(event.op.stage)
    return [sorted(stages) for stages in held]


def busy_shares(panel: Timeline) -> list[float]:
    """Per rank, the share of the makespan in which it worked, 0 to 1."""
    return [seconds / panel.makespan if panel.makespan else 0.0 for seconds in panel.busy]


def percent(share: float) -> str:
    """`0.3333` as `33.3 %`."""
    return f"{100 * share:.1f} %"


def figures(panel: Timeline, clock: Clock) -> list[str]:
    """Makespan, bubble ratio, busy share per rank, peak in flight per stage and, when known, peak memory per rank."""
    busy = [number(100 * share, 0) for share in busy_shares(panel)]
    words = [
        f"makespan {clock.exact(panel.makespan)}",
        f"bubble ratio {percent(panel.bubble_ratio)}",
        f"busy per rank {_listed(busy, list(map(float, busy)))}" + (" %" if busy else ""),
        f"peak in flight {_listed(list(map(str, panel.peak_in_flight)), panel.peak_in_flight)}",
    ]
    if panel.peak_memory is not None:
        words.append(f"peak memory {_listed(list(map(format_bytes, panel.peak_memory)), panel.peak_memory, ' / ')}")
    return words


def _listed(texts: list[str], values: Sequence[float], between: str = " ") -> str:
    if len(texts) <= _LONG_LIST:
        return between.join(texts) or "none"
    return f"{texts[values.index(min(values))]} to {texts[values.index(max(values))]}"
