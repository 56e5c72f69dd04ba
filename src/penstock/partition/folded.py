"""Exact partitioning of a V: the first rank has the first and the last stage, and so on inwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Unpack

import numpy as np

from penstock.compiled import run
from penstock.errors import PartitionError
from penstock.partition.bottleneck import ROUNDING
from penstock.partition.dp_loops import fold, peel
from penstock.partition.placement_costs import PlacedOptions, Placement, placement
from penstock.partition.validation import Costs

#: Relative precision of the least bottleneck, about that of rounded sums, and of the largest stage.
BOTTLENECK_PRECISION, STAGE_PRECISION = 3e-13, 1e-6

#: Relative increase of a bound that no cut keeps, doubled in every step; and the fraction of the
#: limit that is added so that a bound of 0 grows too.
FIRST_STEP, TINY = 0.01, 1e-6

#: Number of bounds that a search tries, about.
BOUNDS = 50


def folded(seconds: Costs, ranks: int, **options: Unpack[PlacedOptions]) -> list[int] | None:
    """Minimise the busiest rank (or link) of a V, then the largest stage.

        stages   0  1  2  3  4  5        rank 0 has the stages 0 and 5,
        ranks    0  1  2  2  1  0        rank 1 has 1 and 4, rank 2 has 2 and 3

    The first is exact to 1 part in 10^12, the second to 1 in 10^6, also with `slack`.

    >>> folded([1, 2, 3, 4, 5, 6, 7, 8], ranks=2)
    [4, 2, 1, 1]
    >>> folded([1] * 6, ranks=2, saved_bytes=[1] * 6, in_flight=[3, 1, 1, 1], limits=[5, 5])
    [1, 2, 1, 2]

    Args:
        seconds: forward and backward seconds of a micro-batch per layer; or a row of them per rank.
        ranks: number of ranks; there are twice as many stages.
        options: see `PlacedOptions`.

    Returns:
        The number of layers of every stage; None if no cut fits.

    Raises:
        PartitionError: fewer layers than stages, or inconsistent shapes.

    Source: our own. Ranks are peeled off from outside: for a bound, and for the layers that the
    ranks so far have in front, only the most that they can have in back matters. That gives a lower
    bound of the bottleneck in O(ranks x layers x longest stage) per bound. Whether every stage can
    have a layer, and links stay within the bound, is decided over pairs of layers (front, back),
    restricted to those whose middle the other ranks can compute within the bound. One such pass is
    enough if the lower bound can be attained. On one shared core 100 layers on 8 ranks take 5 to 15
    ms, 1,000 on 64 take 3 to 7 s.
    """
    if isinstance(ranks, bool) or not isinstance(ranks, (int, np.integer)) or ranks < 1:
        raise PartitionError(f"ranks is {ranks!r}; it must be a whole number of 1 or more")
    chain = placement(seconds, [*range(ranks), *range(ranks - 1, -1, -1)], options)
    # Above any rank with its two stages, and any link with its two crossings.
    limit = float(chain.costs.seconds[:, -1].max()) * 2 + float(chain.costs.links.max()) * 2
    if not _may_exist(chain, limit, limit):
        return None
    even_ranks = _cut_of_least_value(
        lambda bound: _may_exist(chain, bound, limit),
        lambda bound: _cut(chain, bound, limit),
        limit,
        BOTTLENECK_PRECISION,
    )
    if even_ranks is None:
        return None
    bound = chain.bottleneck(even_ranks) * (1 + chain.slack) * (1 + ROUNDING)
    even_stages = _cut_of_least_value(
        lambda largest: _may_exist(chain, bound, largest),
        lambda largest: _cut(chain, bound, largest),
        bound,
        STAGE_PRECISION,
    )
    ends = even_stages or even_ranks
    return [int(length) for length in np.diff([0, *ends])]


def _cut_of_least_value(
    possible: Callable[[float], bool],
    cut: Callable[[float], list[int] | None],
    limit: float,
    precision: float,
) -> list[int] | None:
    """Return the cut of the least value for which one exists.

    Args:
        possible: a necessary condition for a cut of that value; true for all larger values too.
        cut: returns a cut of that value, or None if there is none.
        limit: upper end of the search.
        precision: relative width at which the bisection stops.

    Returns:
        The ends of its stages; None if there is no cut at the limit.
    """
    low = _bisect(possible, limit, 0.0, precision)
    high = low * (1 + ROUNDING)
    candidate = cut(high)
    if candidate is not None:
        return candidate
    # Step up from below rather than bisect the whole range: far above the least value `cut` has
    # far more pairs of layers to search.
    step = FIRST_STEP
    while candidate is None and high < limit:
        low = high
        high = min(low * (1 + step) + step * TINY * limit, limit)
        step *= 2
        candidate = cut(high)
    if candidate is None:
        return None
    return cut(_bisect(lambda value: cut(value) is not None, high, low, precision))


def _bisect(holds: Callable[[float], bool], high: float, low: float, precision: float) -> float:
    """Return the least value above `low` for which a monotonic condition holds.

    It must hold for `high`; `precision` is relative.
    """
    while high - low > precision * high:
        middle = (low + high) / 2
        if not low < middle < high:
            break
        if holds(middle):
            high = middle
        else:
            low = middle
    return high


def _iterations(chain: Placement) -> float:
    """Return the approximate number of innermost iterations of one call of `peel` or `fold`."""
    return chain.layers * (chain.layers + chain.ranks)


def _may_exist(chain: Placement, bound: float, largest: float) -> bool:
    """Return whether a V within the bounds may exist; False is certain."""
    work = np.empty((2, chain.layers + 1), np.int64)
    arguments = (chain.costs, bound, largest, work[0], work[1])
    return bool(run(peel, _iterations(chain), *arguments, calls=BOUNDS))


def _cut(chain: Placement, bound: float, largest: float) -> list[int] | None:
    """Return the stage ends of some V within the bounds; None if there is none."""
    size, costs = chain.layers + 1, chain.costs
    reached = np.zeros((chain.ranks + 1, size, size), np.uint8)
    # A lower bound of what a middle costs: every layer where it is fastest.
    fastest = np.concatenate(([0.0], np.cumsum(np.diff(costs.seconds, axis=1).min(axis=0))))
    arguments = (costs, fastest, bound, largest, np.empty(size, np.int64), reached)
    if not run(fold, _iterations(chain), *arguments, calls=BOUNDS):
        return None
    middles = np.flatnonzero(np.diagonal(reached[-1]))
    front_end = back_start = int(middles[len(middles) // 2])
    ends = [front_end]
    for rank in range(chain.ranks - 1, -1, -1):
        inner = (front_end, back_start)
        front_end, back_start = _trace_rank(chain, rank, inner, (bound, largest), reached[rank])
        # The front stage of rank 0 begins with layer 0, where no stage ends.
        ends = [front_end, *ends, back_start] if rank else [*ends, back_start]
    return ends


def _trace_rank(
    chain: Placement,
    rank: int,
    inner: tuple[int, int],
    bounds: tuple[float, float],
    reached: np.ndarray,
) -> tuple[int, int]:
    """Return the first layer of a rank's front stage and the end of its back stage.

    Among all choices it takes the one whose larger stage is smallest.

    Args:
        chain: costs and placement.
        rank: the rank.
        inner: the end of its front stage and the first layer of its back stage.
        bounds: the most seconds of a rank, and of a stage.
        reached: the rank's slice of the result of `fold`.
    """
    (front_end, back_start), (bound, largest) = inner, bounds
    seconds, memory, _, limits = chain.costs
    back_stage = 2 * chain.ranks - 1 - rank
    starts = np.arange(front_end)[:, None]
    ends = np.arange(back_start + 1, chain.layers + 1)
    front = seconds[rank, front_end] - seconds[rank, starts]
    back = seconds[back_stage, ends] - seconds[back_stage, back_start]
    front_bytes = memory[rank, front_end] - memory[rank, starts]
    back_bytes = memory[back_stage, ends] - memory[back_stage, back_start]
    allowed = (
        (reached[:front_end, back_start + 1 :] == 1)
        & (np.maximum(front, back) <= largest)
        & (front_bytes + back_bytes <= limits[rank])
        & (front + back <= bound * (1 + BOTTLENECK_PRECISION))
    )
    assert allowed.any()
    best = int(np.argmin(np.where(allowed, np.maximum(front, back), np.inf)))
    start, end = np.unravel_index(best, allowed.shape)
    return int(start), int(end) + back_start + 1
