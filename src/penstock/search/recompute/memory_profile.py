"""Memory profile of a schedule: how many micro-batches of each stage a rank holds when it is
fullest, and how many of them are being recomputed. Activations that move to another rank (E and L)
count as there at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple, final

import numpy as np

from penstock.schedule.arrays import Array
from penstock.schedule.dependencies import dependencies_of
from penstock.schedule.op import Kind, Schedule
from penstock.schedule.recompute import Recompute
from penstock.simulate.costs import Costs
from penstock.simulate.memory_curves import Changes
from penstock.simulate.simulate import tables_of


class Moment(NamedTuple):
    """Numbers of micro-batches of every stage of a rank at one moment.

    in_flight: of those in flight.
    split: of those between their I and W.
    recomputed: of those in a B.
    """

    in_flight: Array
    split: Array
    recomputed: Array


@final
@dataclass(frozen=True, eq=False)
class MemoryProfile:
    """The moments of one rank that no other moment dominates, that is reaches in all counts.

    At moment t the rank holds, besides its weights and summed over its stages s, in bytes:

        in_flight[t, s] x (bytes that a micro-batch saves)
        + split[t, s] x (bytes of its activations that it does not save)
        + recomputed[t, s] x (bytes of the segment that is recomputed at once)

    Attributes:
        stages: the rank's stages.
        in_flight, split, recomputed: as in `Moment`, shape (moments, stages).
    """

    stages: tuple[int, ...]
    in_flight: Array
    split: Array
    recomputed: Array

    def bytes(self, saved: Array, full: Array, recomputed: Array) -> Array:
        """Return the bytes held at every moment, weights not included.

        Args:
            saved: per stage, bytes that a micro-batch saves for its backward.
            full: per stage, bytes of all its activations.
            recomputed: per stage, bytes of the largest segment that is recomputed at once.
        """
        total: Array = (
            self.in_flight @ saved
            + self.split @ np.maximum(full - saved, 0.0)
            + self.recomputed @ recomputed
        )
        return total

    def moment(self, row: int) -> Moment:
        """Return the moment with this number."""
        return Moment(self.in_flight[row], self.split[row], self.recomputed[row])


def memory_profiles(schedule: Schedule) -> tuple[MemoryProfile, ...]:
    """Return the memory profile of every rank; computed once per schedule."""
    cache = dependencies_of(schedule).cache
    if "memory_profiles" not in cache:
        cache["memory_profiles"] = tuple(_memory_profiles(schedule))
    profiles: tuple[MemoryProfile, ...] = cache["memory_profiles"]
    return profiles


def _memory_profiles(schedule: Schedule) -> Iterator[MemoryProfile]:
    """Yield the memory profile of every rank."""
    ops = dependencies_of(schedule).ops
    at_start, at_end = _changes(schedule)
    for low, high in pairwise(ops.first.tolist()):
        yield _rank_profile(ops.stage[low:high], at_start[:, low:high], at_end[:, low:high])


def _changes(schedule: Schedule) -> tuple[Array, Array]:
    """Return by how much every op changes the three counts of `Moment` at its start and at its end,
    each of shape (3, ops).

    They are counted by two simulations of memory with unit sizes: one in which all activations are
    saved, and one in which all are recomputed.
    """
    save_all = Costs(activation_bytes=1.0, saved_bytes=1.0)
    save_none = Costs(activation_bytes=1.0, saved_bytes=0.0)
    saved = Changes.of(tables_of(schedule, save_all, Recompute.SELECTIVE))
    recomputed = Changes.of(tables_of(schedule, save_none, Recompute.SELECTIVE))
    is_backward = dependencies_of(schedule).ops.of_kind(Kind.B)

    def rows(in_flight: Array, recomputed: Array) -> Array:
        """Return the changes in flight, between I and W, and in a B."""
        split = np.where(is_backward, 0.0, recomputed)
        in_backward = np.where(is_backward, recomputed, 0.0)
        return np.stack([in_flight, split, in_backward])

    at_start = rows(saved.saved_at_start, recomputed.recomputed_at_start)
    return at_start, rows(saved.saved_at_end, recomputed.recomputed_at_end)


def _rank_profile(stage_of_op: Array, at_start: Array, at_end: Array) -> MemoryProfile:
    """Return the memory profile of one rank.

    Args:
        stage_of_op: the stage of each of its ops, in order.
        at_start, at_end: of these ops, as of `_changes`.
    """
    stages = np.unique(stage_of_op)
    column = np.searchsorted(stages, stage_of_op)
    # An op starts at step 2n and ends at step 2n + 1.
    start = 2 * np.arange(len(stage_of_op))
    steps = np.zeros((2 * len(stage_of_op), 3, len(stages)))
    steps[start, :, column] = at_start.T
    steps[start + 1, :, column] = at_end.T
    # Rounded, so that moments whose shares of slices add up to the same are equal rows.
    counts = np.cumsum(steps, axis=0).reshape(len(steps), -1).round(12)
    moments = _undominated(np.unique(counts, axis=0)).reshape(-1, 3, len(stages))
    return MemoryProfile(tuple(stages.tolist()), moments[:, 0], moments[:, 1], moments[:, 2])


def divide_room(room: Array, parts: Array) -> Array:
    """Return how much room each part has, or how many of a size fit: room / parts.

    Where `parts` is 0, there is room for anything (infinity) unless the room is negative (minus
    infinity): something else does not fit.
    """
    anything: Array = np.where(room >= 0, np.inf, -np.inf)
    return np.divide(room, parts, out=anything, where=parts > 0)


def _undominated(rows: Array) -> Array:
    """Return the rows that no other row reaches in every column."""
    # A row can only be dominated by one with at least its sum, so larger sums come first.
    selected: list[Array] = []
    for row in rows[np.argsort(-rows.sum(axis=1), kind="stable")]:
        if not any((other >= row).all() for other in selected):
            selected.append(row)
    return np.array(selected) if selected else rows[:0]
