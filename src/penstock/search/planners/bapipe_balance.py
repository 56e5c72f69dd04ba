"""BaPipe's balanced partitions: between layers, through layers, with fewer cuts where transfers
bound, and within memory.

    1. ideal          | every accelerator is busy equally long: T* = 1 / sum over n of 1 / T^n
    2. inter-layer    | whole layers, the slowest stage as fast as can be
    3. coarse-grained | the same with only those cuts at which the link carries what crosses within
       a stage's time
    4. memory         | layers at the boundaries move to neighbours with room
    5. intra-layer    | the layers at the boundaries are split so that all are busy equally long
       (FPGA)

Source: Zhao et al. 2020, BaPipe (arXiv 2012.12544), as LITERATURE 4.3 has it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from penstock.errors import PlanError
from penstock.search.planners.layer_costs import before

#: By accelerator, then by layer.
Seconds = Sequence[Sequence[float]]


def ideal_seconds(totals: Sequence[float]) -> float:
    """T*: what a stage takes if accelerators that need so long for the whole model share it
    ideally.

    >>> ideal_seconds((4.0, 4.0)), ideal_seconds((2.0, 6.0))
    (2.0, 1.5)
    """
    return 1 / sum(1 / total for total in totals) if all(totals) else 0.0


def fractional_cut(seconds: Seconds) -> tuple[float, tuple[float, ...]]:
    """Seconds of every stage when layers may be split, and how many layers lie before the end of
    each.

    A part of a layer takes its share of the layer's seconds. It is T* where one accelerator is as
    many times faster than another at every layer.

    >>> seconds, ends = fractional_cut([[1.0, 1.0, 4.0], [1.0, 1.0, 4.0]])
    >>> round(seconds, 6), [round(end, 6) for end in ends]
    (3.0, [2.25, 3.0])
    """
    sums = [before(tuple(row)) for row in seconds]
    layers = len(seconds[0])

    def ends(each: float) -> list[float]:
        found, at = [], 0.0
        for row in sums:
            start = float(np.interp(at, np.arange(layers + 1), row))
            # The last place where so much is done: layers that take no time go with the stage
            # before.
            done = start + each
            at = float(layers) if done >= row[-1] else _place(row, done)
            found.append(at)
        return found

    low, high = 0.0, max(float(row[-1]) for row in sums)
    for _ in range(100):
        middle = (low + high) / 2
        if ends(middle)[-1] >= layers:
            high = middle
        else:
            low = middle
    return high, tuple(ends(high))


def _place(sums: np.ndarray[tuple[int], np.dtype[np.float64]], done: float) -> float:
    after = int(np.searchsorted(sums, done, side="right"))
    return float(after - 1 + (done - sums[after - 1]) / (sums[after] - sums[after - 1]))


def balanced_lengths(seconds: Seconds, allowed: Sequence[bool] | None = None) -> tuple[int, ...]:
    """The cut in whole layers whose slowest stage is fastest, accelerators in the given order; of
    equals the one cut earliest.

    Args:
        seconds: of every layer on every accelerator; as many stages as accelerators.
        allowed: for every layer but the last, whether the chain may be cut behind it; all, if not
        given.

    Raises:
        PlanError: there are fewer places to cut than are needed.
    """
    stages, layers = len(seconds), len(seconds[0])
    may = np.ones(layers + 1, bool)
    if allowed is not None:
        may[1:layers] = np.asarray(allowed[: layers - 1], bool)
    if may[1:layers].sum() < stages - 1:
        raise PlanError(
            f"{stages} stages need {stages - 1} cuts, and there are {int(may[1:layers].sum())} places to cut"
        )
    best = np.full(layers + 1, np.inf)
    best[0] = 0.0
    cuts: list[np.ndarray[tuple[int], np.dtype[np.intp]]] = []
    for row in seconds:
        sums = before(tuple(row))
        stage = sums[None, :] - sums[:, None]  # [start, stop]
        stage[np.tril_indices(layers + 1)] = np.inf
        found = np.maximum(best[:, None], stage)
        found[:, ~may] = np.inf
        cuts.append(found.argmin(axis=0))
        best = found.min(axis=0)
    ends = [layers]
    for cut in reversed(cuts):
        ends.append(int(cut[ends[-1]]))
    return tuple(int(stop - start) for start, stop in zip(ends[:0:-1], ends[-2::-1], strict=True))


def coarse_boundaries(hops_s: Sequence[float], stage_s: float, cuts: int) -> list[bool]:
    """Which boundaries a link may have: those that it carries within a stage's time, or where they
    are too few for so many cuts, the quickest.

    Args:
        hops_s: seconds of a micro-batch over every boundary.
        stage_s: seconds of a stage for it.
        cuts: how many are needed.
    """
    bound = max(stage_s, sorted(hops_s)[cuts - 1]) if cuts else stage_s
    return [hop <= bound for hop in hops_s]


def fine_tuned(
    lengths: Sequence[int], excess: Callable[[Sequence[int]], Sequence[float]]
) -> tuple[int, ...]:
    """The cut after boundary layers have moved to neighbours, one by one, for as long as the stages
    together hold less too much.

    A layer leaves the stage that holds most too much, for whichever stage makes least of it; the
    stages between pass on a layer each. That ends where nothing is gained, or where no stage has
    room.

    Args:
        lengths: layers in every stage.
        excess: by how many bytes each stage of a cut holds too much, 0 if it fits.
    """
    own = tuple(lengths)
    over = list(excess(own))
    while sum(over) > 0 and (min(over) == 0 or len(own) == 1):
        full = max(
            (stage for stage in range(len(own)) if own[stage] > 1),
            key=lambda stage: over[stage],
            default=0,
        )
        moved = [
            _moved(own, full, other) for other in range(len(own)) if own[full] > 1 and other != full
        ]
        rated = [(sum(excess(each)), each) for each in moved]
        least, each = min(rated, default=(sum(over), own))
        if least >= sum(over):
            break
        own, over = each, list(excess(each))
    return own


def _moved(lengths: tuple[int, ...], one: int, other: int) -> tuple[int, ...]:
    """One layer fewer in stage `one`, and one more in stage `other`, all between them shifted by
    it.
    """
    new = list(lengths)
    new[one] -= 1
    new[other] += 1
    return tuple(new)
