"""The layers to recompute so that the saved activations fit in memory, in the least time.

Layers are numbered 0 … n-1. Consecutive recomputed layers form a segment, which is recomputed at
once in the backward. Dynamic programming over states: a place between layers, whether the layer
before it saves its activations, a bound T on the bytes of any recomputed segment, and the seconds
of the recomputed layers before the place, in whole ticks. The value of a state is the least number
of bytes that the layers before the place save:

    saving[j + 1]    = saved(j) + min(saving[j], recomputing[j] + entry(j))
                       layer j saves its activations
    recomputing[j]   = min over i < j of
                       min(saving[i], recomputing[i])[ticks(i … j) earlier] + input(i)
                       layers i … j - 1 are a segment, if T allows it

The values for all T and all ticks are one array. Bytes are exact, so that a solution that fits is
found whenever one of the bounds T that are tried allows it; its seconds exceed the least by at most
half a tick per layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import final

import numpy as np

from penstock.schedule.arrays import Array


@final
@dataclass(frozen=True)
class Precision:
    """Resolution of the dynamic program.

    Attributes:
        ticks: ticks for the seconds of all layers together.
        ticks_per_layer: minimum number of ticks per layer.
        bounds: maximum number of bounds T on recomputed segments that are tried.
    """

    ticks: int
    ticks_per_layer: int
    bounds: int


#: COARSE for the hundreds of candidates of a search, FINE for the plan that will run.
COARSE, FINE = Precision(96, 4, 4), Precision(1024, 16, 24)


@final
@dataclass(frozen=True)
class Layers:
    """The layers of a rank, stage after stage. Bytes are those of all micro-batches in flight.

    Attributes:
        seconds: per layer, seconds of its forward.
        saved: per layer, bytes that it saves.
        entry: per layer, bytes that it saves in addition behind a segment or at the beginning of a
            stage.
        inputs: per layer, bytes of its input.
        recompute_bytes: bytes of a recomputed segment of one micro-batch, from its first layer and
            one past its last.
        firsts: the first layer of every stage.
    """

    seconds: Sequence[float]
    saved: Sequence[float]
    entry: Sequence[float]
    inputs: Sequence[float]
    recompute_bytes: Callable[[int, int], float]
    firsts: frozenset[int]

    def all_segments(self) -> list[tuple[int, int]]:
        """Return all segments of consecutive layers of one stage: (first, one past the last)."""
        segments = []
        for first in range(len(self.seconds)):
            for end in range(first + 1, len(self.seconds) + 1):
                segments.append((first, end))
                if end in self.firsts:
                    break
        return segments


def min_time_recompute(
    layers: Layers, room: Callable[[Array], Array], precision: Precision = FINE
) -> tuple[list[tuple[int, int]], bool]:
    """Return the segments that take the least time to recompute, and whether the rest then fits; if
    nothing fits, the segments that come nearest.

    Args:
        layers: the layers of a rank.
        room: for an array of bounds T on recomputed segments, the bytes that may be saved under
            each.
        precision: the resolution of the search.
    """
    segment_bytes = {segment: layers.recompute_bytes(*segment) for segment in layers.all_segments()}
    bounds = _bounds(sorted(set(segment_bytes.values())), precision.bounds)
    table = _Table(layers, segment_bytes, bounds, precision)
    least = np.minimum(table.saving[-1], table.recomputing[-1])
    excess = least - room(bounds)[:, None]
    fits = excess <= 0
    if fits.any():
        # The least time at which anything fits; there, the bound under which least is saved.
        tick = int(np.argmax(fits.any(axis=0)))
        row = int(np.argmin(np.where(fits[:, tick], least[:, tick], np.inf)))
    else:
        nearest = np.unravel_index(np.argmin(excess), excess.shape)
        row, tick = int(nearest[0]), int(nearest[1])
    return table.segments(row, tick), bool(fits.any())


def _bounds(sizes: list[float], most: int) -> Array:
    """Return the bounds T to try, ascending: 0, where nothing is recomputed, and `sizes`; of more
    than `most` sizes an even selection with the smallest and the largest.
    """
    if len(sizes) > most:
        sizes = [sizes[round(place)] for place in np.linspace(0, len(sizes) - 1, most)]
    return np.array([0.0, *sizes])


class _Table:
    """The values of all states: arrays of shape (bounds, ticks), one per place."""

    def __init__(
        self,
        layers: Layers,
        segment_bytes: dict[tuple[int, int], float],
        bounds: Array,
        precision: Precision,
    ) -> None:
        self.layers, self.bounds = layers, bounds
        count, total_s = len(layers.seconds), sum(layers.seconds)
        ticks = max(precision.ticks, precision.ticks_per_layer * count)
        layer_ticks = [
            round(seconds / total_s * ticks) if total_s else 0 for seconds in layers.seconds
        ]
        self.ticks = [0, *np.cumsum(layer_ticks).tolist()]
        self.firsts_of: dict[int, list[int]] = {}
        for first, end in segment_bytes:
            self.firsts_of.setdefault(end, []).append(first)
        shape = len(bounds), self.ticks[-1] + 1
        self.saving, self.recomputing = [np.full(shape, np.inf)], [np.full(shape, np.inf)]
        self.best: list[Array] = []
        # Before the first layer nothing is saved, and a stage begins there as behind a segment.
        self.recomputing[0][:, 0] = 0.0
        for place in range(count):
            self.best.append(np.minimum(self.saving[place], self.recomputing[place]))
            self.saving.append(np.minimum(*self._saving_options(place)))
            self.recomputing.append(self._least_with_segment(place + 1, segment_bytes))

    def _least_with_segment(self, end: int, segment_bytes: dict[tuple[int, int], float]) -> Array:
        """Return the bytes saved before place `end` if the last segment ends there."""
        least = np.full_like(self.saving[0], np.inf)
        ticks = least.shape[1]
        for first in self.firsts_of[end]:
            # The bounds from this one on allow the segment, which adds these ticks.
            low = np.searchsorted(self.bounds, segment_bytes[first, end])
            added = self.ticks[end] - self.ticks[first]
            earlier = self.best[first][low:, : ticks - added] + self.layers.inputs[first]
            target = least[low:, added:]
            np.minimum(target, earlier, out=target)
        return least

    def _saving_options(self, place: int) -> tuple[Array, Array]:
        """Return the bytes saved up to and including a layer that saves: where the layer before it
        saves too, and where that is recomputed or belongs to another stage.
        """
        saved, entry = self.layers.saved[place], self.layers.entry[place]
        if place in self.layers.firsts:
            return self.saving[place] + (saved + entry), self.recomputing[place] + (saved + entry)
        return self.saving[place] + saved, self.recomputing[place] + (saved + entry)

    def segments(self, row: int, tick: int) -> list[tuple[int, int]]:
        """Return the segments of the solution with bound `row` and `tick`, traced back from the
        last place.
        """
        segments, end = [], len(self.layers.seconds)
        saves = self._saves(self.saving[end], self.recomputing[end], row, tick)
        while end:
            if saves:
                end -= 1
                saves = self._saves(*self._saving_options(end), row, tick)
                continue
            first = min(
                self.firsts_of[end], key=lambda first: self._with_segment(first, end, row, tick)
            )
            segments.append((first, end))
            tick -= self.ticks[end] - self.ticks[first]
            end = first
            saves = self._saves(self.saving[end], self.recomputing[end], row, tick)
        return segments[::-1]

    def _with_segment(self, first: int, end: int, row: int, tick: int) -> float:
        """Return the bytes saved if this is the last segment; infinite if it exceeds the bound."""
        earlier = tick - (self.ticks[end] - self.ticks[first])
        if earlier < 0 or self.layers.recompute_bytes(first, end) > self.bounds[row]:
            return np.inf
        return float(self.best[first][row, earlier] + self.layers.inputs[first])

    @staticmethod
    def _saves(saving: Array, recomputing: Array, row: int, tick: int) -> bool:
        """Return whether saving the layer before a place is at least as good as recomputing it."""
        return bool(saving[row, tick] <= recomputing[row, tick])
