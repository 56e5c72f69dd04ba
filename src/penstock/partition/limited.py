"""Exact partitioning under memory limits, for ranks that may differ."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypedDict, Unpack

import numpy as np

from penstock.errors import PartitionError
from penstock.partition.bottleneck import ROUNDING, busiest_of, unevenness
from penstock.partition.catalogue import check_lengths
from penstock.partition.chain_dp import MAXIMUM, SUM, at_starts, best_cut, stage_sums
from penstock.partition.validation import (
    Costs,
    Floats,
    Ints,
    check_costs,
    floats_of,
    numbers_of,
    rows_of,
    sums_of,
)

#: Relative distance from the least bottleneck at which the search for an upper bound stops, and its
#: maximum number of bisections.
CLOSE, HALVINGS = 0.02, 40


class Overlap(TypedDict, total=False):
    """Keyword arguments of `limited`; its docstring describes them."""

    overlap: bool


def limited(
    seconds: Costs,
    transfer: Costs | None,
    fixed_bytes: Costs,
    saved_bytes: Costs,
    in_flight: Sequence[float],
    limits: Sequence[float],
    **options: Unpack[Overlap],
) -> list[int] | None:
    """Minimise the bottleneck, the load of the busiest stage or link, over cuts that fit in memory.

        layers       a    b  |  c    d    e    stage 0 computes for seconds[0][a] + seconds[0][b]
        transfers      t0    t1   t2   t3      and needs fixed_bytes[a] + fixed_bytes[b]
                                               + in_flight[0] * (saved_bytes[a] + saved_bytes[b])

    Ties are broken as in `minimax`; without limits, for equal ranks, the result is the same.

    >>> limited([1, 1, 1, 3], None, [1, 1, 1, 1], [1, 1, 1, 1], in_flight=[2, 1], limits=[9, 9])
    [3, 1]
    >>> limited([1, 1, 1, 3], None, [1, 1, 1, 1], [1, 1, 1, 1], in_flight=[2, 1], limits=[8, 9])
    [2, 2]
    >>> free = [0] * 4
    >>> limited([[1] * 4, [3] * 4], None, free, free, in_flight=[2, 1], limits=[9, 9])
    [3, 1]

    Args:
        seconds: shape (stages, layers): forward and backward seconds of one micro-batch in layer l
            if it is in stage s. One row, or a flat list, applies to all stages.
        transfer: shape (stages - 1, layers - 1), or (layers - 1,) for all stages: seconds of a cut
            after layer l if it is between stages s and s + 1. None is free.
        fixed_bytes: bytes of a layer that do not depend on the micro-batches (weights, gradients,
            optimizer state), shape (layers,) or (stages, layers).
        saved_bytes: bytes that a layer saves per micro-batch in flight, likewise.
        in_flight: per stage, the maximum number of micro-batches in flight; may be fractional.
        limits: bytes that each stage may use, infinity if it has no limit.
        overlap: whether transfers overlap the stages' computation (the default), or occupy both
            stages.

    Returns:
        The number of layers of every stage; None if no cut fits (`least_excess` then returns the
        nearest cut).

    Raises:
        PartitionError: shapes are inconsistent, or numbers are not finite and 0 or more (limits may
            be anything but NaN).

    Source: our own; the recurrence of PipeDream (Narayanan et al. 2019, section 3.1) without
    replication, over windows that are as long as memory and the bottleneck of a good guess allow.
    Sums of whole bytes below 2^53 are exact. On one shared core 100 layers on 8 unlike ranks take 2
    ms, 1,000 on 64 take 0.1 s.
    """
    memory = (fixed_bytes, saved_bytes, in_flight)
    chain = _chain(seconds, transfer, memory, limits, overlap=options.get("overlap", True))
    bound = chain.upper_bound()
    if bound is None:
        return None
    windows = [chain.windows(stage, bound) for stage in range(chain.stages)]

    def busiest(stage: int) -> Floats:
        """Return the table of the stage's bottlenecks."""
        return chain.loads(stage, windows[stage])[0]

    least = best_cut(busiest, chain.stages, chain.layers, MAXIMUM).value
    assert least < np.inf

    def penalties(stage: int) -> Floats:
        """Return the table of the stage's part of the sum that breaks ties in the bottleneck."""
        return unevenness(*chain.loads(stage, windows[stage]), least)

    return best_cut(penalties, chain.stages, chain.layers, SUM).lengths


def least_excess(
    fixed_bytes: Costs, saved_bytes: Costs, in_flight: Sequence[float], limits: Sequence[float]
) -> list[int]:
    """Minimise the largest excess over a memory limit: the cut to report when none fits.

    If some cut fits, it is the one with the most memory to spare in its fullest stage.

    >>> least_excess([5, 1, 1, 5], [0, 0, 0, 0], in_flight=[2, 1], limits=[4, 8])
    [1, 3]

    Args: as in `limited`. `bytes_per_stage` returns what the cut needs.

    Raises:
        PartitionError: as `limited`.
    """
    allowed = _limits(limits)
    memory = _memory(fixed_bytes, saved_bytes, in_flight, len(allowed))
    stages, layers = len(allowed), memory.shape[1] - 1
    _check_stages(stages, layers)
    longest = layers - stages + 1

    def excess(stage: int) -> Floats:
        """Return the bytes by which every possible stage exceeds its limit (negative: to spare)."""
        return stage_sums(memory[stage], longest) - float(allowed[stage])

    least = best_cut(excess, stages, layers, MAXIMUM).value
    cutoff = least + ROUNDING * float(memory[:, -1].max())

    def positive_excess(stage: int) -> Floats:
        """Return the excess of every stage within the cutoff, at least 0."""
        stage_excess = excess(stage)
        return np.where(stage_excess <= cutoff, np.maximum(stage_excess, 0.0), np.inf)

    return best_cut(positive_excess, stages, layers, SUM).lengths


def bytes_per_stage(
    lengths: Sequence[int], fixed_bytes: Costs, saved_bytes: Costs, in_flight: Sequence[float]
) -> list[float]:
    """Return the bytes that every stage of a cut needs; arguments as in `limited`.

    >>> bytes_per_stage([1, 3], [5, 1, 1, 5], [1, 0, 0, 0], in_flight=[2, 1])
    [7.0, 7.0]

    Raises:
        PartitionError: the shapes are inconsistent.
    """
    memory = _memory(fixed_bytes, saved_bytes, in_flight, len(lengths))
    ends = np.cumsum(check_lengths(lengths, memory.shape[1] - 1, None))
    return [
        float(row[end] - row[end - length])
        for row, end, length in zip(memory, ends, lengths, strict=True)
    ]


@dataclass(frozen=True)
class _Chain:
    """Prefix sums of seconds and bytes over layers, a row per stage.

    links: row s, column l: seconds of the cut before layer l in front of stage s; 0 at both ends of
        the model and in row `stages`.
    """

    seconds: Floats
    memory: Floats
    links: Floats
    limits: Floats
    overlap: bool

    @property
    def stages(self) -> int:
        """The number of stages."""
        return len(self.limits)

    @property
    def layers(self) -> int:
        """The number of layers."""
        return int(self.seconds.shape[1]) - 1

    def earliest_starts(self, stage: int, bound: float) -> Ints:
        """Return for every end the earliest start of a stage that fits and stays within `bound`.

        The bound has a margin for rounding.
        """
        memory, seconds, limit = self.memory[stage], self.seconds[stage], self.limits[stage]
        index = np.arange(self.layers + 1)
        start: Ints = np.minimum(np.searchsorted(memory, memory - limit), index)
        # With rounded sums, a - b <= c and a - c <= b are not the same: check the neighbours.
        one_earlier = np.maximum(start - 1, 0)
        start = np.where(memory - memory[one_earlier] <= limit, one_earlier, start)
        start = np.where(memory - memory[start] <= limit, start, np.minimum(start + 1, index))
        if np.isfinite(bound):
            # The rounding of prefix sums must not exclude the cut that the bound is of.
            start = np.maximum(start, np.searchsorted(seconds, seconds - bound * (1 + 1e-9)))
        return start

    def within(self, bound: float) -> list[int] | None:
        """Return some cut that fits and whose stages and overlapped links are about within `bound`.

        None if there is none. The first entry of the ends is 0.
        """
        reached = np.zeros(self.layers + 1, bool)
        reached[0] = True
        possible_starts, earliest_starts = [], []
        for stage in range(self.stages):
            earliest = self.earliest_starts(stage, bound)
            starts = reached & (self.links[stage] <= bound * (1 + 1e-9))
            # An end is reached if there is a possible start between the earliest one and the end.
            count = np.concatenate(([0], np.cumsum(starts)))[:-1]
            is_window = earliest < np.arange(len(count))
            # An end without a window is never reached: no count exceeds the number of layers + 1.
            reached = count > np.where(is_window, count[earliest], self.layers + 1)
            possible_starts.append(starts)
            earliest_starts.append(earliest)
        if not reached[-1]:
            return None
        ends = [self.layers]
        for starts, earliest in zip(
            reversed(possible_starts), reversed(earliest_starts), strict=True
        ):
            low = int(earliest[ends[-1]])
            ends.append(low + int(np.flatnonzero(starts[low : ends[-1]])[-1]))
        return ends[::-1]

    def bottleneck(self, ends: list[int], *, overlap: bool) -> float:
        """Return the bottleneck of the cut with these ends, the first of them 0."""
        stage = np.arange(self.stages)
        after, before = np.asarray(ends[1:]), np.asarray(ends[:-1])
        loads = self.seconds[stage, after] - self.seconds[stage, before]
        incoming, outgoing = self.links[stage, before], self.links[stage + 1, after]
        return float(np.max(busiest_of(loads, incoming, outgoing, overlap=overlap)))

    def upper_bound(self) -> float | None:
        """Return the bottleneck of a good cut that fits; None if no cut fits."""
        cut = self.within(np.inf)
        if cut is None:
            return None
        layer_seconds = np.diff(self.seconds, axis=1).min(axis=0)
        # No cut is faster than its dearest layer, nor than an even share of all layers.
        low = max(float(layer_seconds.max()), float(layer_seconds.sum()) / self.stages)
        high = self.bottleneck(cut, overlap=True)
        for _ in range(HALVINGS):
            if high <= low * (1 + CLOSE):
                break
            middle = (low + high) / 2
            candidate = self.within(middle)
            if candidate is None:
                low = middle
            else:
                # `within` has a margin: without the minimum the range might not shrink.
                cut, high = candidate, min(self.bottleneck(candidate, overlap=True), middle)
        # `within` bounds links as if they overlapped; either way any cut gives an upper bound.
        return self.bottleneck(cut, overlap=self.overlap)

    def windows(self, stage: int, bound: float) -> tuple[Ints, int]:
        """Return the earliest starts within `bound`, and the most layers the stage can have."""
        earliest = self.earliest_starts(stage, bound)
        longest = int(np.max(np.arange(self.layers + 1) - earliest))
        return earliest, max(longest, 1)

    def loads(self, stage: int, window: tuple[Ints, int]) -> tuple[Floats, list[Floats]]:
        """Return the table of the stage's bottlenecks, and the loads whose squares break ties."""
        earliest, longest = window
        load = stage_sums(self.seconds[stage], longest)
        incoming, outgoing = at_starts(self.links[stage], longest), self.links[stage + 1, 1:, None]
        busiest = busiest_of(load, incoming, outgoing, overlap=self.overlap)
        starts = np.arange(1, self.layers + 1)[:, None] - np.arange(longest, 0, -1)
        busiest = np.where(starts >= earliest[1:, None], busiest, np.inf)
        return busiest, [load, incoming] if self.overlap else [busiest]


def _chain(
    seconds: Costs,
    transfer: Costs | None,
    memory: tuple[Costs, Costs, Sequence[float]],
    limits: Sequence[float],
    *,
    overlap: bool,
) -> _Chain:
    """Validate the arguments of `limited` and compute the prefix sums.

    `memory` is (fixed_bytes, saved_bytes, in_flight).
    """
    if not isinstance(overlap, (bool, np.bool_)):
        raise PartitionError(f"overlap is {overlap!r}; it must be True or False")
    allowed, times = _limits(limits), numbers_of(seconds, "seconds")
    stages, layers = len(allowed), times.shape[-1]
    _check_stages(stages, layers)
    rows = rows_of(times, "seconds", stages, layers)
    links = np.zeros((stages + 1, layers + 1))
    if transfer is not None and stages > 1:
        links[1:-1, 1:-1] = rows_of(
            numbers_of(transfer, "transfer"), "transfer", stages - 1, layers - 1
        )
    stage_bytes = _memory(*memory, stages)
    if stage_bytes.shape[1] != layers + 1:
        raise PartitionError(
            f"fixed_bytes and saved_bytes have {stage_bytes.shape[1] - 1} layers, "
            f"but seconds has {layers}"
        )
    return _Chain(sums_of(rows), stage_bytes, links, allowed, bool(overlap))


def _check_stages(stages: int, layers: int) -> None:
    """Raise an error if the layers do not suffice for the stages."""
    if not 1 <= stages <= layers:
        raise PartitionError(
            f"cannot make {stages} stages from {layers} layers: every stage needs at least one"
        )


def _memory(
    fixed_bytes: Costs, saved_bytes: Costs, in_flight: Sequence[float], stages: int
) -> Floats:
    """Return the prefix sums of every stage's bytes, shape (stages, layers + 1)."""
    fixed = numbers_of(fixed_bytes, "fixed_bytes")
    micro_batches = check_costs(in_flight, "in_flight", stages)
    layers = fixed.shape[-1]
    saved = rows_of(numbers_of(saved_bytes, "saved_bytes"), "saved_bytes", stages, layers)
    fixed_rows = rows_of(fixed, "fixed_bytes", stages, layers)
    return sums_of(fixed_rows + micro_batches[:, None] * saved)


def _limits(limits: Sequence[float]) -> Floats:
    """Return the limits as an array after checking that they are numbers."""
    numbers = floats_of(limits)
    if numbers is None or numbers.ndim != 1 or np.isnan(numbers).any():
        raise PartitionError(f"limits: {limits!r} must be one number of bytes for each stage")
    return numbers
