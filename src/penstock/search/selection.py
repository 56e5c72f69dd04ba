"""Which layers run again so that a way fits: on every rank that lacks memory, those that take the
least.

One rank's stages, with all ranks that have copies of them, are a question of their own. A stage
alone on its rank is answered exactly (`lightest`); where a rank has several, what they hold at its
fullest moment is weighed, and if another moment is then too full, that too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from penstock.plan.segments import Selection
from penstock.schedule.arrays import Array
from penstock.search.footprint import Footprint, footprints
from penstock.search.laid import Laid
from penstock.search.lightest import COARSE, Layers, Precision, lightest
from penstock.simulate.memory import weights_held
from penstock.simulate.selective import LayerBytes
from penstock.simulate.simulate import tables_of
from penstock.simulate.stage_seconds import PHASES, largest_part, parts_of

#: How often moments are added that turn out to be too full.
ROUNDS = 4


class Hopeless(Exception):  # an answer, not a failure
    """Memory lacks, and to free it takes more time than there is."""


def selected(laid: Laid, precision: Precision = COARSE, reach: float = math.inf) -> Laid | None:
    """The same with the layers that have to run again, and what that costs; if nothing fits, with
    those that come nearest. None where ranks share some of their stages and not others.

    Raises:
        Hopeless: whatever runs again, a step takes more than `reach` seconds.
    """
    groups = _groups(laid)
    if groups is None:
        return None
    if reach < math.inf and any(group.least_s() > reach for group in groups):
        raise Hopeless
    found: list[tuple[int, int]] = []
    for group in groups:
        found += group.segments(precision)
    firsts = [part.start for part in parts_of(laid.proposal.lengths)]
    return laid.with_selection(Selection.of_segments(found, firsts))


@dataclass
class _Group:
    """Stages, and the ranks that have them, all of them each; with the bytes that a rank has
    besides its weights.
    """

    laid: Laid
    stages: tuple[int, ...]
    prints: list[Footprint]
    rooms: list[float]

    @property
    def rank(self) -> int:
        """The first that has these stages."""
        return self.laid.made.ranks_of_stage[self.stages[0]][0]

    @cached_property
    def parts(self) -> list[slice]:
        """The layers of each of the stages."""
        return [parts_of(self.laid.proposal.lengths)[stage] for stage in self.stages]

    @cached_property
    def samples(self) -> float:
        """In the largest micro-batch, whose bytes count."""
        return largest_part(
            self.laid.request.batch / self.laid.proposal.micro_batches, self.laid.made.micro_batches
        )

    @cached_property
    def sizes(self) -> LayerBytes:
        """Of the layers."""
        return LayerBytes.of(self.laid.request.profile)

    @cached_property
    def full(self) -> Array:
        """By stage, what a micro-batch keeps if nothing runs again."""
        return self.samples * np.array(
            [self.sizes.whole(part.start, part.stop) for part in self.parts]
        )

    @cached_property
    def seconds(self) -> list[float]:
        """Of every layer's forward."""
        laid = self.laid
        return laid.request.profile_of(self.rank).seconds(
            "forward", laid.request.batch / laid.proposal.micro_batches
        )

    def least_s(self) -> float:
        """Seconds that no step can undercut in which these stages fit: their ops, and what frees
        the bytes that are too many at the fullest moment, at the rate of the layer that frees most
        in a second.
        """
        laid = self.laid
        if laid.made.stream is not None:
            return 0.0
        over, (times, *_) = self._fullest(self.full)
        if over <= 0:
            return 0.0
        most = 0.0
        for part, count in zip(self.parts, times.tolist(), strict=True):
            for layer in range(part.start, part.stop):
                freed = count * self.samples * (self.sizes.saved[layer] + self.sizes.entry[layer])
                most = max(
                    most,
                    freed / self.seconds[layer]
                    if self.seconds[layer]
                    else np.inf
                    if freed
                    else 0.0,
                )
        profile, samples = (
            laid.request.profile_of(self.rank),
            laid.request.batch / laid.proposal.micro_batches,
        )
        rows = [np.array(profile.seconds(phase, samples)) for phase in PHASES]
        each = rows[0] + np.minimum(rows[1], rows[2] + rows[3])
        work = float(sum(each[part].sum() for part in self.parts))
        return (
            laid.made.micro_batches / len(self.prints) * ((over / most if most else np.inf) + work)
        )

    def segments(self, precision: Precision) -> list[tuple[int, int]]:
        """Those that run again; none where everything fits."""
        parts, samples, sizes, full = self.parts, self.samples, self.sizes, self.full
        if self._too_full(full, full, np.zeros(len(parts))) is None:
            return []
        _, weighed = self._fullest(full)
        for _ in range(ROUNDS):
            found, fits = self._lightest(weighed, precision)
            chosen = Selection.of_segments(found, [part.start for part in parts])
            held = [sizes.stage_bytes(part.start, part.stop, chosen) for part in parts]
            kept, back = (samples * np.array(column) for column in zip(*held, strict=True))
            over = self._too_full(kept, full, back)
            if over is None or not fits or len(parts) == 1:
                break
            weighed = tuple(np.maximum(a, b) for a, b in zip(weighed, over, strict=True))  # type: ignore[assignment]  # of three
        return found

    def _lightest(
        self, weighed: tuple[Array, Array, Array], precision: Precision
    ) -> tuple[list[tuple[int, int]], bool]:
        """The segments that take the least with what is weighed; one stage's with all its moments."""
        parts, samples, sizes, full = self.parts, self.samples, self.sizes, self.full
        places = [layer for part in parts for layer in range(part.start, part.stop)]
        kept, split, whole = weighed
        times = kept - split
        if len(parts) == 1:
            times = np.ones(1)
        of_layer = np.repeat(samples * times, [part.stop - part.start for part in parts])
        firsts = np.cumsum([0, *(part.stop - part.start for part in parts)])[:-1]

        def all_held(row: Sequence[float]) -> list[float]:
            found: list[float] = (of_layer * [row[layer] for layer in places]).tolist()
            return found

        layers = Layers(
            [self.seconds[layer] for layer in places],
            all_held(sizes.saved),
            all_held(sizes.entry),
            all_held(sizes.inputs),
            lambda first, end: samples * sizes.comes_back(places[first], places[end - 1] + 1),
            frozenset(firsts.tolist()),
        )

        def room(bounds: Array) -> Array:
            if len(parts) == 1:
                return self._room_alone(bounds, full)
            left: Array = min(self.rooms) - split @ full - whole.max(initial=0.0) * bounds
            return left

        found, fits = lightest(layers, room, precision)
        return [(places[first], places[end - 1] + 1) for first, end in found], fits

    def _room_alone(self, bounds: Array, full: Array) -> Array:
        """How much the one stage may keep of a micro-batch, for bounds on what comes back: the
        least of all moments.
        """
        least = np.full(len(bounds), np.inf)
        for each, room in zip(self.prints, self.rooms, strict=True):
            left = room - each.split * full - each.whole * bounds[None, :]
            count = each.kept - each.split
            some = np.where(
                count > 0,
                left / np.where(count > 0, count, 1.0),
                np.where(left >= 0, np.inf, -np.inf),
            )
            least = np.minimum(least, some.min(axis=0, initial=np.inf))
        return least

    def _fullest(self, full: Array) -> tuple[float, tuple[Array, Array, Array]]:
        """By how much a rank holds too much at the worst moment, if nothing runs again, and the
        counts of that moment.
        """
        worst, found = -np.inf, None
        for each, room in zip(self.prints, self.rooms, strict=True):
            held = each.kept @ full
            row = int(np.argmax(held))
            if found is None or held[row] - room > worst:
                worst, found = (
                    float(held[row]) - room,
                    (each.kept[row], each.split[row], each.whole[row]),
                )
        assert found is not None
        return worst, found

    def _too_full(self, kept: Array, full: Array, back: Array) -> tuple[Array, Array, Array] | None:
        """The counts of a moment at which a rank holds more than it has, by most; None if there is
        none.
        """
        worst, found = 0.0, None
        for each, room in zip(self.prints, self.rooms, strict=True):
            held = each.bytes(kept, full, back)
            row = int(np.argmax(held))
            if held[row] - room > worst:
                worst, found = held[row] - room, (each.kept[row], each.split[row], each.whole[row])
        return found


def _groups(laid: Laid) -> list[_Group] | None:
    """The stages of every rank with the ranks that have them; None where two ranks share some and
    not all.
    """
    made, prints = laid.made, footprints(laid.made)
    weights = weights_held(tables_of(made, laid.costs, "never")).sum(axis=1)
    found: dict[tuple[int, ...], _Group] = {}
    for rank, own in enumerate(prints):
        if own.stages:
            group = found.setdefault(own.stages, _Group(laid, own.stages, [], []))
            group.prints.append(own)
            group.rooms.append(laid.request.memory_bytes(rank) - float(weights[rank]) - 1.0)
    if sum(map(len, found)) != made.stages:
        return None
    return list(found.values())
