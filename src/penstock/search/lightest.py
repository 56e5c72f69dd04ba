"""Which layers to run again so that what is kept fits, at the least seconds: exact but for the
rounding of seconds.

Layers stand at places 0 … n-1. A state is a place, whether the layer before it is kept, a bound T
on what may come back of a segment at once, and how long the layers before it take that run again,
in whole ticks. Its value is the least that can be kept before it:

    kept[j + 1] = min(kept[j] + saved(j), cut[j] + saved(j) + entry(j))           layer j keeps what
                                                                                  it saves
    cut[j]      = min over i < j of min(kept[i], cut[i])[earlier by ticks(i … j)] + given(i)     i …
                j - 1 is a segment, if it may be

All T and ticks at once are one array. Bytes are exact, so that whatever fits is found, if any of
the bounds T that are tried lets it; and the seconds of what is found are above the least by no more
than half a tick for each layer.
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
    """Ticks of all layers together (no fewer than so many for each), and bounds that are tried."""

    ticks: int
    ticks_of_each: int
    bounds: int


#: For what is tried by the hundred, and for what will be.
COARSE, FINE = Precision(96, 4, 4), Precision(1024, 16, 24)


@final
@dataclass(frozen=True)
class Layers:
    """Layers of a rank, those of one stage after those of another; bytes are those of all
    micro-batches that the rank holds.

    Attributes:
        seconds: of each layer's forward.
        saved, entry, given: bytes that each keeps, keeps besides behind a segment or at the
        beginning of a stage, and is given. back: what comes back of a segment, from its first and
        one past its last layer; for one micro-batch. firsts: places at which a stage begins.
    """

    seconds: Sequence[float]
    saved: Sequence[float]
    entry: Sequence[float]
    given: Sequence[float]
    back: Callable[[int, int], float]
    firsts: frozenset[int]

    def may_be(self) -> list[tuple[int, int]]:
        """All segments: consecutive layers of one stage."""
        found = []
        for first in range(len(self.seconds)):
            for end in range(first + 1, len(self.seconds) + 1):
                found.append((first, end))
                if end in self.firsts:
                    break
        return found


def lightest(
    layers: Layers, room: Callable[[Array], Array], precision: Precision = FINE
) -> tuple[list[tuple[int, int]], bool]:
    """The segments that take the least, and whether what is kept then fits; if nothing fits, those
    that come nearest.

    Args:
        layers: of a rank.
        room: for bounds T on what comes back of a segment, in an array, how much may be kept then.
        precision: how finely to look.
    """
    possible = layers.may_be()
    backs = {segment: layers.back(*segment) for segment in possible}
    bounds = _bounds(sorted(set(backs.values())), precision.bounds)
    space = _Space(layers, backs, bounds, precision)
    least = np.minimum(space.kept[-1], space.cut[-1])
    over = least - room(bounds)[:, None]
    fits = over <= 0
    if fits.any():
        tick = int(np.argmax(fits.any(axis=0)))
        row = int(np.argmin(np.where(fits[:, tick], least[:, tick], np.inf)))
    else:
        row, tick = (int(each) for each in np.unravel_index(np.argmin(over), over.shape))
    return space.back(row, tick), bool(fits.any())


def _bounds(every: list[float], most: int) -> Array:
    """0, where nothing runs again, and all bounds, or of many some of every size, the smallest and
    the largest among them.
    """
    if len(every) > most:
        every = [every[round(place)] for place in np.linspace(0, len(every) - 1, most)]
    return np.array([0.0, *every])


class _Space:
    """All states with their values: arrays of shape (bounds, ticks), one for every place."""

    def __init__(
        self,
        layers: Layers,
        backs: dict[tuple[int, int], float],
        bounds: Array,
        precision: Precision,
    ) -> None:
        self.layers, self.bounds = layers, bounds
        count, whole = len(layers.seconds), sum(layers.seconds)
        ticks = max(precision.ticks, precision.ticks_of_each * count)
        each = [round(seconds / whole * ticks) if whole else 0 for seconds in layers.seconds]
        self.ticks = [0, *np.cumsum(each).tolist()]
        self.firsts_of: dict[int, list[int]] = {}
        for first, end in backs:
            self.firsts_of.setdefault(end, []).append(first)
        shape = len(bounds), self.ticks[-1] + 1
        self.kept, self.cut, self.before = [np.full(shape, np.inf)], [np.full(shape, np.inf)], []
        self.cut[0][:, 0] = 0.0
        for place in range(count):
            self.before.append(np.minimum(self.kept[place], self.cut[place]))
            self.kept.append(np.minimum(*self._ways_to_keep(place)))
            self.cut.append(np.full(shape, np.inf))
            for first in self.firsts_of[place + 1]:
                low, later = (
                    np.searchsorted(bounds, backs[first, place + 1]),
                    self.ticks[place + 1] - self.ticks[first],
                )
                target = self.cut[-1][low:, later:]
                np.minimum(
                    target,
                    self.before[first][low:, : shape[1] - later] + layers.given[first],
                    out=target,
                )

    def _ways_to_keep(self, place: int) -> tuple[Array, Array]:
        """What is kept behind a layer that keeps: where the one before does, and where it does not
        or is another stage's.
        """
        saved, entry = self.layers.saved[place], self.layers.entry[place]
        if place in self.layers.firsts:
            return self.kept[place] + (saved + entry), self.cut[place] + (saved + entry)
        return self.kept[place] + saved, self.cut[place] + (saved + entry)

    def back(self, row: int, tick: int) -> list[tuple[int, int]]:
        """The segments on the way to the last place's least value."""
        found, end = [], len(self.layers.seconds)
        keeps = self._keeps(self.kept[end], self.cut[end], row, tick)
        while end:
            if keeps:
                end -= 1
                keeps = self._keeps(*self._ways_to_keep(end), row, tick)
                continue
            first = min(
                self.firsts_of[end], key=lambda first: self._with_segment(first, end, row, tick)
            )
            found.append((first, end))
            tick -= self.ticks[end] - self.ticks[first]
            end = first
            keeps = self._keeps(self.kept[end], self.cut[end], row, tick)
        return found[::-1]

    def _with_segment(self, first: int, end: int, row: int, tick: int) -> float:
        """What is kept where the last segment is this; infinite where it may not be."""
        earlier = tick - (self.ticks[end] - self.ticks[first])
        if earlier < 0 or self.layers.back(first, end) > self.bounds[row]:
            return np.inf
        return float(self.before[first][row, earlier] + self.layers.given[first])

    @staticmethod
    def _keeps(kept: Array, cut: Array, row: int, tick: int) -> bool:
        return bool(kept[row, tick] <= cut[row, tick])
