"""What a schedule holds on a rank at its full moments: how many micro-batches of which stage, and
how many of them run again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import numpy as np

from penstock.schedule.arrays import Array
from penstock.schedule.op import Kind, Schedule
from penstock.simulate.costs import Costs
from penstock.simulate.memory import Changes
from penstock.simulate.simulate import tables_of
from penstock.simulate.structure import dependencies_of


@final
@dataclass(frozen=True, eq=False)
class Footprint:
    """The moments of one rank that no other exceeds in all counts.

    With its weights, the rank holds at the moment t, in bytes, summed over its stages s:

        kept[t, s] x (what a micro-batch keeps)  +  split[t, s] x (the rest of it)  +  whole[t, s] x
                                                 (what comes back at once)

    Attributes:
        stages: the rank's stages.
        kept: micro-batches in flight, shape (moments, stages).
        split: those of them between their I and W.
        whole: those in a B.
    """

    stages: tuple[int, ...]
    kept: Array
    split: Array
    whole: Array

    def bytes(self, kept: Array, full: Array, back: Array) -> Array:
        """What is held at every moment, besides weights; the bytes of a micro-batch by stage."""
        held: Array = (
            self.kept @ kept + self.split @ np.maximum(full - kept, 0.0) + self.whole @ back
        )
        return held


def footprints(made: Schedule) -> tuple[Footprint, ...]:
    """Those of every rank; worked out once for a schedule."""
    cache = dependencies_of(made).cache
    if "footprints" not in cache:
        cache["footprints"] = tuple(_footprints(made))
    found: tuple[Footprint, ...] = cache["footprints"]
    return found


def _footprints(made: Schedule) -> list[Footprint]:
    all_kept = Changes.of(tables_of(made, Costs(activation_bytes=1.0, kept_bytes=1.0), "selective"))
    none_kept = Changes.of(
        tables_of(made, Costs(activation_bytes=1.0, kept_bytes=0.0), "selective")
    )
    ops = dependencies_of(made).ops
    back = ops.of_kind(Kind.B)
    rises = [
        all_kept.kept_at_start,
        np.where(back, 0.0, none_kept.again_at_start),
        np.where(back, none_kept.again_at_start, 0.0),
    ]
    falls = [
        all_kept.kept_at_end,
        np.where(back, 0.0, none_kept.again_at_end),
        np.where(back, none_kept.again_at_end, 0.0),
    ]
    found = []
    for low, high in zip(ops.first[:-1].tolist(), ops.first[1:].tolist(), strict=True):
        own = ops.stage[low:high]
        stages = np.unique(own)
        at = np.searchsorted(stages, own)
        steps = np.zeros((2 * (high - low), 3, len(stages)))
        for number, (rise, fall) in enumerate(zip(rises, falls, strict=True)):
            steps[0::2, number][np.arange(high - low), at] = rise[low:high]
            steps[1::2, number][np.arange(high - low), at] = fall[low:high]
        counts = np.cumsum(steps, axis=0).reshape(len(steps), -1).round(9)
        rows = _highest(np.unique(counts, axis=0)).reshape(-1, 3, len(stages))
        found.append(Footprint(tuple(stages.tolist()), rows[:, 0], rows[:, 1], rows[:, 2]))
    return found


def _highest(rows: Array) -> Array:
    """Those that no other reaches in every column."""
    kept: list[Array] = []
    for row in rows[np.argsort(-rows.sum(axis=1), kind="stable")]:
        if not any((other >= row).all() for other in kept):
            kept.append(row)
    return np.array(kept) if kept else rows[:0]
