"""Memory of a timeline's ranks, in the form that drawings need."""

from __future__ import annotations

import numpy as np

from penstock.event import MemoryCurve, Timeline
from penstock.units import format_bytes


def memory_steps(panel: Timeline) -> list[MemoryCurve] | None:
    """Return the memory curve of each rank with one step per moment; None if it is unknown.

    Of several changes at the same time, only the last is kept: the bytes held from then on.
    """
    if panel.memory is None:
        return None
    curves = []
    for curve in panel.memory:
        is_last = np.append(
            np.diff(curve.seconds) > 1e-9 * panel.makespan,
            np.ones(min(len(curve.seconds), 1), bool),
        )
        curves.append(MemoryCurve(curve.seconds[is_last], curve.bytes[is_last]))
    return curves


def downsample(curve: MemoryCurve, steps: int, end: float) -> MemoryCurve:
    """Reduce a curve to at most `steps` steps, each with the maximum over its interval.

    Sampling instead could miss peaks.

    Args:
        curve: bytes over time.
        steps: number of intervals of equal length.
        end: end of the last interval in seconds.
    """
    if len(curve.seconds) <= steps or end <= 0:
        return curve
    edges = np.arange(steps) * (end / steps)
    # Each interval starts with the bytes of the last change before it, 0 if there is none.
    previous = np.searchsorted(curve.seconds, edges, side="right") - 1
    maxima = np.where(previous >= 0, curve.bytes[np.maximum(previous, 0)], 0)
    interval = np.clip((curve.seconds / end * steps).astype(np.int64), 0, steps - 1)
    np.maximum.at(maxima, interval, curve.bytes)
    return MemoryCurve(edges, maxima)


def holders_at_peak(panel: Timeline, rank: int) -> list[tuple[str, int]]:
    """Return what occupies a rank's memory at its peak, as (name, bytes), largest first.

    The list is empty if this is unknown.
    """
    if panel.memory_holders is None:
        return []
    holders = [(name, size) for name, size in panel.memory_holders[rank].items() if size > 0]
    return sorted(holders, key=lambda holder: -holder[1])


def holder_text(panel: Timeline, rank: int) -> str:
    """Return what occupies a rank's memory at its peak: `activations 3.0 KiB, weights 1.0 KiB`."""
    holders = holders_at_peak(panel, rank)
    return ", ".join(f"{name} {format_bytes(size)}" for name, size in holders)
