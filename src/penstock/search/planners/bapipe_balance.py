"""BaPipe's balanced partitions.

    1. ideal          | every accelerator is busy equally long: T* = 1 / sum over n of 1 / T^n
    2. inter-layer    | whole layers, the slowest stage as fast as possible
    3. coarse-grained | the same with only those cuts at which the link transfers what crosses
                      | within a stage's time
    4. memory         | layers at the boundaries move to neighbours with free memory
    5. intra-layer    | the layers at the boundaries are split so that all are busy equally long
                      | (FPGA)

Source: Zhao et al. 2020, BaPipe (arXiv 2012.12544), as docs/literature/bapipe.md has it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from penstock.errors import PlanError
from penstock.partition.chain_dp import MAXIMUM, best_cut, stage_sums
from penstock.search.planners.layer_costs import Numbers, before

#: Indexed by accelerator, then by layer.
Seconds = Sequence[Sequence[float]]


def fractional_cut(seconds: Seconds) -> tuple[float, tuple[float, ...]]:
    """Return the seconds of every stage if layers may be split, and for each stage the number of
    layers up to its end, which may be fractional.

    A part of a layer takes its share of the layer's seconds. The result is T* if one accelerator is
    faster than another by the same factor at every layer.

    >>> seconds, ends = fractional_cut([[1.0, 1.0, 4.0], [1.0, 1.0, 4.0]])
    >>> round(seconds, 6), [round(end, 6) for end in ends]
    (3.0, [2.25, 3.0])
    """
    sums = [before(tuple(row)) for row in seconds]
    layers = len(seconds[0])

    def ends_of(stage_s: float) -> list[float]:
        """Return the ends of stages that take `stage_s` each, as far as there are layers."""
        ends, end = [], 0.0
        for row in sums:
            end_s = float(np.interp(end, np.arange(layers + 1), row)) + stage_s
            # The last place with these seconds: layers that take no time go with the stage before.
            end = float(layers) if end_s >= row[-1] else _place(row, end_s)
            ends.append(end)
        return ends

    low, high = 0.0, max(float(row[-1]) for row in sums)
    # More halvings than a double has bits: the loop ends at two neighbouring numbers.
    for _ in range(100):
        middle = (low + high) / 2
        if ends_of(middle)[-1] >= layers:
            high = middle
        else:
            low = middle
    return high, tuple(ends_of(high))


def _place(sums: np.ndarray[tuple[int], np.dtype[np.float64]], end_s: float) -> float:
    """Return the last place, in layers, at which the sum of seconds is `end_s`."""
    after = int(np.searchsorted(sums, end_s, side="right"))
    return float(after - 1 + (end_s - sums[after - 1]) / (sums[after] - sums[after - 1]))


def balanced_lengths(seconds: Seconds, allowed: Sequence[bool] | None = None) -> tuple[int, ...]:
    """Return the cut in whole layers whose slowest stage is fastest, accelerators in the given
    order; of equal ones the one that cuts earliest.

    Args:
        seconds: per accelerator, seconds of every layer; there is one stage per accelerator.
        allowed: for every layer but the last, whether the model may be cut behind it; by default
            everywhere.

    Raises:
        PlanError: there are fewer places to cut than needed.
    """
    stages, layers = len(seconds), len(seconds[0])
    allowed_ends = np.ones(layers + 1, bool)
    if allowed is not None:
        allowed_ends[1:layers] = np.asarray(allowed[: layers - 1], bool)
    if allowed_ends[1:layers].sum() < stages - 1:
        raise PlanError(
            f"{stages} stages need {stages - 1} cuts, and there are "
            f"{int(allowed_ends[1:layers].sum())} places to cut"
        )
    not_allowed = np.where(allowed_ends[1:], 0.0, np.inf)[:, None]

    def stage_seconds(stage: int) -> Numbers:
        """Return the table of a stage."""
        sums = before(tuple(seconds[stage]))
        return stage_sums(sums, layers - stages + 1) + not_allowed

    return tuple(best_cut(stage_seconds, stages, layers, MAXIMUM).lengths)


def coarse_boundaries(hops_s: Sequence[float], stage_s: float, cuts: int) -> list[bool]:
    """Return for every boundary whether it may be a cut: those that the link transfers within a
    stage's time; if these are fewer than `cuts`, the quickest.

    Args:
        hops_s: seconds of a micro-batch over every boundary.
        stage_s: seconds of a stage for a micro-batch.
        cuts: number of cuts that are needed.
    """
    bound = max(stage_s, sorted(hops_s)[cuts - 1]) if cuts else stage_s
    return [hop <= bound for hop in hops_s]


def tune_memory(
    lengths: Sequence[int], excess: Callable[[Sequence[int]], Sequence[float]]
) -> tuple[int, ...]:
    """Move boundary layers to neighbours one by one, as long as that reduces the total excess of
    memory, and return the cut.

    A layer leaves the stage with the largest excess, for the stage that gives the least total; the
    stages between pass on one layer each. It ends where nothing is gained, or where no stage has
    free memory.

    Args:
        lengths: layers in every stage.
        excess: for a cut, the bytes of each stage in excess of its memory, 0 if it fits.
    """
    current = tuple(lengths)
    excess_bytes = list(excess(current))
    while sum(excess_bytes) > 0 and (min(excess_bytes) == 0 or len(current) == 1):
        divisible = [stage for stage in range(len(current)) if current[stage] > 1]
        if not divisible:
            break
        fullest = max(divisible, key=lambda stage: excess_bytes[stage])
        moved = [_moved(current, fullest, to) for to in range(len(current)) if to != fullest]
        rated = [(sum(excess(cut)), cut) for cut in moved]
        least, cut = min(rated, default=(sum(excess_bytes), current))
        if least >= sum(excess_bytes):
            break
        current, excess_bytes = cut, list(excess(cut))
    return current


def _moved(lengths: tuple[int, ...], source: int, target: int) -> tuple[int, ...]:
    """Return a cut with one layer fewer in stage `source` and one more in stage `target`; the
    layers of the stages between shift by one.
    """
    new = list(lengths)
    new[source] -= 1
    new[target] += 1
    return tuple(new)
