"""Selective recompute: the layers to recompute so that a placed schedule fits, in the least time.

The stages of one rank, with all ranks that hold replicas of them, are an independent problem. A
stage that is alone on its rank is solved exactly (`min_time_recompute`). Where a rank has several,
the problem is solved for its fullest moment; if another moment is then too full, for both.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from penstock.plan.segments import Selection
from penstock.schedule.arrays import Array
from penstock.schedule.recompute import Recompute
from penstock.search.instantiate import PlacedSchedule
from penstock.search.recompute.memory_profile import (
    MemoryProfile,
    Moment,
    divide_room,
    memory_profiles,
)
from penstock.search.recompute.min_time_recompute import (
    COARSE,
    Layers,
    Precision,
    min_time_recompute,
)
from penstock.simulate.memory_curves import weight_bytes_of_ranks
from penstock.simulate.selective_recompute import LayerBytes
from penstock.simulate.simulate import tables_of
from penstock.simulate.stage_seconds import parts_of

#: Maximum number of moments of a rank that are taken into account.
ROUNDS = 4

#: Bytes by which an unrounded peak may exceed a rank's memory: simulation rounds peaks to whole
#: bytes.
ROUNDED_OFF = 0.49


class Infeasible(Exception):  # an answer, not a failure
    """No selection frees enough memory within the cutoff."""


def select_recompute(
    placed: PlacedSchedule, precision: Precision = COARSE, cutoff_s: float = math.inf
) -> PlacedSchedule | None:
    """Return a placed schedule with the layers that must be recomputed, and their costs.

    If nothing fits, the selection is the one that comes nearest. None if two ranks share some of
    their stages but not all.

    Raises:
        Infeasible: with any selection that fits, a step takes more than `cutoff_s` seconds.
    """
    groups = _groups(placed)
    if groups is None:
        return None
    if cutoff_s < math.inf and any(group.least_s() > cutoff_s for group in groups):
        raise Infeasible
    segments: list[tuple[int, int]] = []
    for group in groups:
        segments += group.segments(precision)
    firsts = [part.start for part in parts_of(placed.proposal.lengths)]
    return placed.with_selective_recompute(Selection.of_segments(segments, firsts))


@dataclass
class _Group:
    """Stages, and the ranks that each hold all of them.

    Attributes:
        placed: the placed schedule.
        stages: the stages.
        profiles: the memory profile of each rank.
        free_bytes: per rank, its memory without its weights.
    """

    placed: PlacedSchedule
    stages: tuple[int, ...]
    profiles: list[MemoryProfile]
    free_bytes: list[float]

    @property
    def rank(self) -> int:
        """The first rank that holds these stages."""
        return self.placed.schedule.ranks_of_stage[self.stages[0]][0]

    @cached_property
    def parts(self) -> list[slice]:
        """The layers of each of the stages."""
        return [parts_of(self.placed.proposal.lengths)[stage] for stage in self.stages]

    @cached_property
    def samples(self) -> float:
        """Samples in the largest micro-batch, whose bytes count."""
        return max(self.placed.sizes)

    @cached_property
    def sizes(self) -> LayerBytes:
        """Bytes of the model's layers per sample."""
        return LayerBytes.of(self.placed.request.profile)

    @cached_property
    def full(self) -> Array:
        """Per stage, bytes that a micro-batch saves if nothing is recomputed."""
        return self.samples * np.array(
            [self.sizes.whole(part.start, part.stop) for part in self.parts]
        )

    @cached_property
    def seconds(self) -> list[float]:
        """Seconds of the forward of every layer of the model, on average over micro-batches."""
        request, micro_batches = self.placed.request, self.placed.proposal.micro_batches
        seconds: list[float] = request.mean_seconds(self.rank, "forward", micro_batches).tolist()
        return seconds

    def least_s(self) -> float:
        """Return a lower bound in seconds of any step in which these stages fit.

        It consists of their ops, and of the recompute that frees the bytes in excess at the fullest
        moment, at the rate of the layer that frees most bytes per second.
        """
        schedule = self.placed.schedule
        if schedule.stream is not None:
            return 0.0
        excess, moment = self._fullest(self.full, np.zeros(len(self.parts)))
        if excess <= 0:
            return 0.0
        best_rate = 0.0
        for part, count in zip(self.parts, moment.in_flight.tolist(), strict=True):
            for layer in range(part.start, part.stop):
                best_rate = max(best_rate, self._bytes_freed_per_s(layer, count))
        layer_s = self.placed.request.work_seconds(self.rank, self.placed.proposal.micro_batches)
        work_s = float(sum(layer_s[part].sum() for part in self.parts))
        recompute_s = excess / best_rate if best_rate else np.inf
        return schedule.micro_batches / len(self.profiles) * (recompute_s + work_s)

    def _bytes_freed_per_s(self, layer: int, micro_batches: float) -> float:
        """Return an upper bound of the bytes that recomputing a layer frees, per second of its
        forward, with `micro_batches` in flight.
        """
        freed = micro_batches * self.samples * (self.sizes.saved[layer] + self.sizes.entry[layer])
        if self.seconds[layer]:
            return freed / self.seconds[layer]
        return np.inf if freed else 0.0

    def segments(self, precision: Precision) -> list[tuple[int, int]]:
        """Return the segments to recompute; none where everything fits."""
        excess, moment = self._fullest(self.full, np.zeros(len(self.parts)))
        if excess <= 0:
            return []
        for _ in range(ROUNDS):
            segments, fits = self._min_time_segments(moment, precision)
            excess, exceeded = self._fullest(*self._stage_bytes(segments))
            if excess <= 0 or not fits or len(self.parts) == 1:
                break
            # The elementwise maximum covers both moments.
            moment = Moment(*map(np.maximum, moment, exceeded))
        return segments

    def _min_time_segments(
        self, moment: Moment, precision: Precision
    ) -> tuple[list[tuple[int, int]], bool]:
        """Return the segments that take the least time to recompute so that `moment` fits, and
        whether it then does. A single stage takes all its moments into account.
        """
        is_single = len(self.parts) == 1

        def room(bounds: Array) -> Array:
            """Return the bytes that may be saved under each bound on recomputed segments."""
            return self._room_of_one_stage(bounds) if is_single else self._room_at(moment, bounds)

        # `_room_of_one_stage` is per micro-batch, `_room_at` for those of which something is saved.
        counts = np.ones(1) if is_single else moment.in_flight - moment.split
        places = [layer for part in self.parts for layer in range(part.start, part.stop)]
        segments, fits = min_time_recompute(self._layers(places, counts), room, precision)
        return [(places[first], places[end - 1] + 1) for first, end in segments], fits

    def _layers(self, places: Sequence[int], counts: Array) -> Layers:
        """Return the layers of all stages.

        Args:
            places: their numbers in the model.
            counts: per stage, the number of micro-batches whose bytes count.
        """
        part_lengths = [part.stop - part.start for part in self.parts]
        samples = np.repeat(self.samples * counts, part_lengths)

        def of_layers(bytes_per_sample: Sequence[float]) -> list[float]:
            """Return the bytes per layer of all counted micro-batches."""
            scaled: list[float] = (samples * [bytes_per_sample[layer] for layer in places]).tolist()
            return scaled

        def segment_bytes(first: int, end: int) -> float:
            """Return the bytes of a recomputed segment of one micro-batch."""
            return self.samples * self.sizes.recomputed_bytes(places[first], places[end - 1] + 1)

        return Layers(
            seconds=[self.seconds[layer] for layer in places],
            saved=of_layers(self.sizes.saved),
            entry=of_layers(self.sizes.entry),
            inputs=of_layers(self.sizes.inputs),
            recompute_bytes=segment_bytes,
            firsts=frozenset(np.cumsum([0, *part_lengths])[:-1].tolist()),
        )

    def _room_at(self, moment: Moment, bounds: Array) -> Array:
        """Return the bytes that may be saved at a moment, for bounds on recomputed segments."""
        fixed_bytes = moment.split @ self.full
        room: Array = (
            min(self.free_bytes) - fixed_bytes - moment.recomputed.max(initial=0.0) * bounds
        )
        return room

    def _room_of_one_stage(self, bounds: Array) -> Array:
        """Return the bytes that the single stage may save per micro-batch, for bounds on recomputed
        segments: the least of all moments.
        """
        least = np.full(len(bounds), np.inf)
        for profile, free in zip(self.profiles, self.free_bytes, strict=True):
            # Shape (moments, bounds).
            remaining = free - profile.split * self.full - profile.recomputed * bounds[None, :]
            count = profile.in_flight - profile.split
            room = divide_room(remaining, count)
            least = np.minimum(least, room.min(axis=0, initial=np.inf))
        return least

    def _stage_bytes(self, segments: Sequence[tuple[int, int]]) -> tuple[Array, Array]:
        """Return per stage, with these segments recomputed, the bytes that a micro-batch saves, and
        the most that are recomputed at once.
        """
        selection = Selection.of_segments(segments, [part.start for part in self.parts])
        rows = [self.sizes.stage_bytes(part.start, part.stop, selection) for part in self.parts]
        saved = np.array([saved for saved, _ in rows])
        recomputed = np.array([recomputed for _, recomputed in rows])
        return self.samples * saved, self.samples * recomputed

    def _fullest(self, saved: Array, recomputed: Array) -> tuple[float, Moment]:
        """Return the bytes in excess at the fullest moment of all ranks (negative if everything
        fits), and that moment.

        Args:
            saved: per stage, bytes that a micro-batch saves.
            recomputed: per stage, the most bytes that are recomputed at once.
        """
        worst, moment = -np.inf, None
        for profile, free in zip(self.profiles, self.free_bytes, strict=True):
            total = profile.bytes(saved, self.full, recomputed)
            row = int(np.argmax(total))
            if moment is None or total[row] - free > worst:
                worst, moment = float(total[row]) - free, profile.moment(row)
        assert moment is not None
        return worst, moment


def _groups(placed: PlacedSchedule) -> list[_Group] | None:
    """Group the ranks by their stages; None if two ranks share some stages but not all."""
    schedule = placed.schedule
    weights = weight_bytes_of_ranks(tables_of(schedule, placed.costs, Recompute.NEVER)).sum(axis=1)
    groups: dict[tuple[int, ...], _Group] = {}
    for rank, profile in enumerate(memory_profiles(schedule)):
        if profile.stages:
            group = groups.setdefault(profile.stages, _Group(placed, profile.stages, [], []))
            group.profiles.append(profile)
            free_bytes = placed.request.memory_bytes(rank) - float(weights[rank])
            group.free_bytes.append(free_bytes + ROUNDED_OFF)
    if sum(map(len, groups)) != schedule.stages:
        return None
    return list(groups.values())
