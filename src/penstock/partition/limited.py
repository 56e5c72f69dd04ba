"""The exact cut among those that fit in memory, for ranks that need not be alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypedDict, Unpack

import numpy as np
import numpy.typing as npt

from penstock.errors import PartitionError
from penstock.partition.bottleneck import EVENNESS, ROUNDING
from penstock.partition.catalogue import check_lengths
from penstock.partition.checks import Costs, Floats, check_costs, numbers_of, rows_of, sums_of
from penstock.partition.steps import least_bottleneck, least_sum, spans

Ints = npt.NDArray[np.int64]

#: How close, relatively, the first guess comes to the least bottleneck, and after how many halvings
#: it gives up on that.
CLOSE, HALVINGS = 0.02, 40


class Overlap(TypedDict, total=False):
    """What `limited` takes besides its numbers; its docstring says what it means."""

    overlap: bool


def limited(
    seconds: Costs,
    transfer: Costs | None,
    holds: Costs,
    kept: Costs,
    in_flight: Sequence[float],
    limits: Sequence[float],
    **options: Unpack[Overlap],
) -> list[int] | None:
    """Stage lengths with the least possible bottleneck, that is, the load of the busiest stage or
    link, of those that fit.

        layers       a    b  |  c    d    e       stage 0 has seconds[0][a] + seconds[0][b] to do,
                     and needs
        transfers      t0    t1   t2   t3         holds[a] + holds[b] + in_flight[0] * (kept[a] +
                       kept[b]) bytes

    Among cuts of equal bottleneck it chooses as `minimax` does, and without limits, for ranks that
    are alike, gives the same.

    >>> limited([1, 1, 1, 3], None, [1, 1, 1, 1], [1, 1, 1, 1], in_flight=[2, 1], limits=[9, 9])
    [3, 1]
    >>> limited([1, 1, 1, 3], None, [1, 1, 1, 1], [1, 1, 1, 1], in_flight=[2, 1], limits=[8, 9])
    [2, 2]
    >>> limited([[1, 1, 1, 1], [3, 3, 3, 3]], None, [0] * 4, [0] * 4, in_flight=[2, 1], limits=[9, 9])
    [3, 1]

    Args:
        seconds: shape (stages, layers): what one micro-batch takes in layer l if it stands in stage
        s, forward and backward.
            One row, or a flat list, is for all stages.
        transfer: shape (stages - 1, layers - 1), or the last alone: the cost of a cut after layer l
        if it is the one between
            stages s and s + 1, in seconds. None is none.
        holds: bytes that a layer takes whatever happens (weights, gradients, optimizer state),
        shape (layers,) or
            (stages, layers).
        kept: bytes that a layer keeps for every micro-batch in flight, likewise.
        in_flight: how many micro-batches each stage has in flight at most; need not be whole.
        limits: bytes that each stage may take, infinity if it has no limit.
        overlap: whether transfers run beside the stages' own work (if not given), or take the time
        of both their stages.

    Returns:
        The number of layers of every stage; None if no cut fits, and `least_excess` then says what
        is lacking.

    Raises:
        PartitionError: the numbers do not fit each other, or are not finite and 0 or more (limits
        may be anything but NaN).

    Source: our own; the recurrence of PipeDream (Narayanan et al. 2019, section 3.1) without
    replication, over windows that are as long as memory and the bottleneck of a good guess allow.
    Sums of whole bytes below 2^53 are exact. On one shared core 100 layers on 8 unlike ranks take 2
    ms, 1,000 on 64 take 0.1 s.
    """
    chain = _chain(
        seconds, transfer, (holds, kept, in_flight), limits, overlap=options.get("overlap", True)
    )
    bound = chain.upper_bound()
    if bound is None:
        return None
    tables = [chain.windows(stage, bound) for stage in range(chain.stages)]
    least = least_bottleneck(
        lambda stage: chain.busiest(stage, tables[stage]), chain.stages, chain.layers
    )
    assert least < np.inf
    return least_sum(
        lambda stage: chain.unevenness(stage, tables[stage], least), chain.stages, chain.layers
    )


def least_excess(
    holds: Costs, kept: Costs, in_flight: Sequence[float], limits: Sequence[float]
) -> list[int]:
    """Stage lengths whose fullest stage is least above its limit, or furthest below it: what is
    lacking when nothing fits.

    >>> least_excess([5, 1, 1, 5], [0, 0, 0, 0], in_flight=[2, 1], limits=[4, 8])
    [1, 3]

    Args: as of `limited`. `bytes_per_stage` says what the cut needs.

    Raises:
        PartitionError: as `limited`.
    """
    allowed = _limits(limits)
    memory = _memory(holds, kept, in_flight, len(allowed))
    stages, layers = len(allowed), memory.shape[1] - 1
    _check_stages(stages, layers)
    ends, starts, possible = spans(layers, layers)

    def excess(stage: int) -> Floats:
        need = memory[stage][ends] - memory[stage][starts] - allowed[stage]
        return np.where(possible, need, np.inf)

    least = least_bottleneck(excess, stages, layers)
    top = least + ROUNDING * float(memory[:, -1].max())

    def short(stage: int) -> Floats:
        lacking = excess(stage)
        return np.where(possible & (lacking <= top), np.maximum(lacking, 0.0), np.inf)

    return least_sum(short, stages, layers)


def bytes_per_stage(
    lengths: Sequence[int], holds: Costs, kept: Costs, in_flight: Sequence[float]
) -> list[float]:
    """What every stage of a cut needs, in bytes; arguments as of `limited`.

    >>> bytes_per_stage([1, 3], [5, 1, 1, 5], [1, 0, 0, 0], in_flight=[2, 1])
    [7.0, 7.0]

    Raises:
        PartitionError: the numbers do not fit each other.
    """
    memory = _memory(holds, kept, in_flight, len(lengths))
    ends = np.cumsum(check_lengths(lengths, memory.shape[1] - 1, None))
    return [
        float(row[end] - row[end - length])
        for row, end, length in zip(memory, ends, lengths, strict=True)
    ]


@dataclass(frozen=True)
class _Chain:
    """Prefix sums over layers, a row per stage: seconds, bytes. `links`: row s, column l: of the
    cut before layer l in front of stage s; free at both ends of the model, and so is row `stages`.
    """

    seconds: Floats
    memory: Floats
    links: Floats
    limits: Floats
    overlap: bool

    @property
    def stages(self) -> int:
        return len(self.limits)

    @property
    def layers(self) -> int:
        return int(self.seconds.shape[1]) - 1

    def first(self, stage: int, bound: float) -> Ints:
        """Of every end, the earliest start of a stage that fits and, with room for rounding, is
        within `bound`.
        """
        memory, seconds, limit = self.memory[stage], self.seconds[stage], self.limits[stage]
        index = np.arange(self.layers + 1)
        start: Ints = np.minimum(np.searchsorted(memory, memory - limit), index)
        # Where sums are rounded, a - b <= c and a - c <= b are not the same.
        start = np.where(
            memory - memory[np.maximum(start - 1, 0)] <= limit, np.maximum(start - 1, 0), start
        )
        start = np.where(memory - memory[start] <= limit, start, np.minimum(start + 1, index))
        if np.isfinite(bound):
            start = np.maximum(start, np.searchsorted(seconds, seconds - bound * (1 + 1e-9)))
        return start

    def within(self, bound: float) -> list[int] | None:
        """Some cut that fits and whose stages and links, run side by side, are about within
        `bound`; None if there is none.
        """
        reached = np.zeros(self.layers + 1, bool)
        reached[0] = True
        begins, firsts = [], []
        for stage in range(self.stages):
            firsts.append(self.first(stage, bound))
            begins.append(reached & (self.links[stage] <= bound * (1 + 1e-9)))
            count = np.concatenate(([0], np.cumsum(begins[-1])))[:-1]
            reached = count > np.where(
                firsts[-1] < np.arange(len(count)), count[firsts[-1]], self.layers + 1
            )
        if not reached[-1]:
            return None
        ends = [self.layers]
        for begin, first in zip(reversed(begins), reversed(firsts), strict=True):
            low = int(first[ends[-1]])
            ends.append(low + int(np.flatnonzero(begin[low : ends[-1]])[-1]))
        return ends[::-1]

    def bottleneck(self, ends: list[int], *, overlap: bool) -> float:
        """Of the cut with these ends, the first of them 0."""
        stage = np.arange(self.stages)
        after, before = np.asarray(ends[1:]), np.asarray(ends[:-1])
        loads = self.seconds[stage, after] - self.seconds[stage, before]
        into, out = self.links[stage, before], self.links[stage + 1, after]
        return float(np.max(np.maximum(loads, into) if overlap else loads + into + out))

    def upper_bound(self) -> float | None:
        """The bottleneck of a good cut that fits; None if none does."""
        cut = self.within(np.inf)
        if cut is None:
            return None
        each = np.diff(self.seconds, axis=1).min(axis=0)
        low, high = (
            max(float(each.max()), float(each.sum()) / self.stages),
            self.bottleneck(cut, overlap=True),
        )
        for _ in range(HALVINGS):
            if high <= low * (1 + CLOSE):
                break
            middle = (low + high) / 2
            found = self.within(middle)
            if found is None:
                low = middle
            else:
                cut, high = found, min(self.bottleneck(found, overlap=True), middle)
        return self.bottleneck(cut, overlap=self.overlap)

    def windows(self, stage: int, bound: float) -> tuple[Ints, int]:
        """The earliest starts within `bound`, and the most layers that the stage can then have."""
        first = self.first(stage, bound)
        return first, max(int(np.max(np.arange(self.layers + 1) - first)), 1)

    def busiest(self, stage: int, window: tuple[Ints, int]) -> Floats:
        """The table of the stage's bottlenecks, see `steps.py`."""
        first, longest = window
        ends, starts, possible = spans(self.layers, longest)
        load, before = (
            self.seconds[stage][ends] - self.seconds[stage][starts],
            self.links[stage][starts],
        )
        busiest = (
            np.maximum(load, before)
            if self.overlap
            else load + before + self.links[stage + 1][ends]
        )
        return np.where(possible & (starts >= first[1:, None]), busiest, np.inf)

    def unevenness(self, stage: int, window: tuple[Ints, int], least: float) -> Floats:
        """The table of what the stage adds to the sum that decides among equal bottlenecks."""
        busiest = self.busiest(stage, window)
        allowed = busiest <= least * (1 + ROUNDING)
        ends, starts, _ = spans(self.layers, window[1])
        unit = least or 1.0
        penalty = EVENNESS * np.square((ends - starts) / self.layers)
        if self.overlap:
            load, before = (
                self.seconds[stage][ends] - self.seconds[stage][starts],
                self.links[stage][starts],
            )
            parts = [load, before]
        else:
            parts = [busiest]
        for part in parts:
            penalty = penalty + np.square(np.where(allowed, part, 0.0) / unit)
        return np.where(allowed, penalty, np.inf)


def _chain(
    seconds: Costs,
    transfer: Costs | None,
    memory: tuple[Costs, Costs, Sequence[float]],
    limits: Sequence[float],
    *,
    overlap: bool,
) -> _Chain:
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
    need = _memory(*memory, stages)
    if need.shape[1] != layers + 1:
        raise PartitionError(
            f"holds and kept are of {need.shape[1] - 1} layers, seconds of {layers}"
        )
    return _Chain(sums_of(rows), need, links, allowed, bool(overlap))


def _check_stages(stages: int, layers: int) -> None:
    if not 1 <= stages <= layers:
        raise PartitionError(
            f"cannot make {stages} stages from {layers} layers: every stage needs at least one"
        )


def _memory(holds: Costs, kept: Costs, in_flight: Sequence[float], stages: int) -> Floats:
    """Prefix sums of every stage's bytes, shape (stages, layers + 1)."""
    own, flying = numbers_of(holds, "holds"), check_costs(in_flight, "in_flight", stages)
    layers = own.shape[-1]
    each = rows_of(numbers_of(kept, "kept"), "kept", stages, layers)
    return sums_of(rows_of(own, "holds", stages, layers) + flying[:, None] * each)


def _limits(limits: Sequence[float]) -> Floats:
    numbers = np.asarray(limits, dtype=np.float64)
    if numbers.ndim != 1 or np.isnan(numbers).any():
        raise PartitionError(f"limits: {limits!r} must be one number of bytes for each stage")
    return numbers
