"""What a timeline's ranks hold, as drawings need it."""

from __future__ import annotations

import numpy as np

from penstock.event import MemoryCurve, Timeline
from penstock.units import format_bytes


def steps(panel: Timeline) -> list[MemoryCurve] | None:
    """Every rank's curve with one step per moment: of changes at the same time only what the rank
    holds from then on.
    """
    if panel.memory is None:
        return None
    found = []
    for curve in panel.memory:
        last = np.append(
            np.diff(curve.seconds) > 1e-9 * panel.makespan,
            np.ones(min(len(curve.seconds), 1), bool),
        )
        found.append(MemoryCurve(curve.seconds[last], curve.bytes[last]))
    return found


def thinned(curve: MemoryCurve, moments: int, until: float) -> MemoryCurve:
    """At most so many steps, each with the most bytes of its stretch of time: peaks stay, which a
    sample could miss.
    """
    if len(curve.seconds) <= moments or until <= 0:
        return curve
    edges = np.arange(moments) * (until / moments)
    before = np.searchsorted(curve.seconds, edges, side="right") - 1
    most = np.where(before >= 0, curve.bytes[np.maximum(before, 0)], 0)
    place = np.clip((curve.seconds / until * moments).astype(np.int64), 0, moments - 1)
    np.maximum.at(most, place, curve.bytes)
    return MemoryCurve(edges, most)


def held_by(panel: Timeline, rank: int) -> list[tuple[str, int]]:
    """Who holds how many bytes when a rank is fullest, largest first; nothing where that is not
    known.
    """
    holders = panel.memory_holders
    found = (
        []
        if holders is None
        else [(name, count) for name, count in holders[rank].items() if count > 0]
    )
    return sorted(found, key=lambda each: -each[1])


def told(panel: Timeline, rank: int) -> str:
    """The same in words: `activations 3.0 KiB, weights 1.0 KiB`."""
    return ", ".join(f"{name} {format_bytes(count)}" for name, count in held_by(panel, rank))
