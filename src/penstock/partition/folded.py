"""The exact cut of a V: the first rank has the first stage and the last, and so on inwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Unpack

import numpy as np

from penstock.errors import PartitionError
from penstock.partition.bottleneck import ROUNDING
from penstock.partition.checks import Costs
from penstock.partition.compiled import run
from penstock.partition.loops import fold, peel
from penstock.partition.placed import PlacedOptions, Placement, placement

#: A range this narrow, relatively, is as narrow as rounded sums are exact; and what is narrow
#: enough for the largest stage.
NARROW, ABOUT = 3e-13, 1e-6

#: By how much a bound that no cut keeps is raised, relatively, and then twice as much; where it is
#: 0, what that is a part of.
FIRST_STEP, TINY = 0.01, 1e-6


def folded(seconds: Costs, ranks: int, **options: Unpack[PlacedOptions]) -> list[int] | None:
    """Stage lengths of a V with the least possible load of the busiest rank (or link), and of those
    the smallest largest stage.

        stages   0  1  2  3  4  5        rank 0 has the stages 0 and 5,
        ranks    0  1  2  2  1  0        rank 1 has 1 and 4, rank 2 has 2 and 3

    The first is exact to 1 part in 10^12, the second to 1 in 10^6, with `slack` too.

    >>> folded([1, 2, 3, 4, 5, 6, 7, 8], ranks=2)
    [4, 2, 1, 1]
    >>> folded([1, 1, 1, 1, 1, 1], ranks=2, kept=[1] * 6, in_flight=[3, 1, 1, 1], limits=[5, 5])
    [1, 2, 1, 2]

    Args:
        seconds: of a micro-batch, forward and backward, per layer; or a row of them per rank.
        ranks: how many there are; the stages are twice as many.
        options: see `PlacedOptions`.

    Returns:
        The number of layers of every stage; None if no cut fits.

    Raises:
        PartitionError: fewer layers than stages, or numbers that do not fit each other.

    Source: our own. Ranks are peeled off from outside: of a bound, and of the layers that the ranks
    so far have in front, only the most that they can have behind counts. That bounds the bottleneck
    from below in O(ranks x layers x longest stage) per bound. Whether every stage can then have a
    layer, and links keep the bound, is decided over pairs of layers (in front, behind), of which
    only those are looked at whose middle the other ranks can do within the bound. One such pass is
    enough where the lower bound can be kept. On one shared core 100 layers on 8 ranks take 5 to 15
    ms, 1,000 on 64 take 3 to 7 s.
    """
    if isinstance(ranks, bool) or not isinstance(ranks, (int, np.integer)) or ranks < 1:
        raise PartitionError(f"ranks is {ranks!r}; it must be a whole number of 1 or more")
    chain = placement(seconds, [*range(ranks), *range(ranks - 1, -1, -1)], options)
    limit = float(chain.costs.seconds[:, -1].max()) * 2 + float(chain.costs.links.max()) * 2
    if not _possible(chain, limit, limit):
        return None
    even = _least(
        lambda bound: _possible(chain, bound, limit),
        lambda bound: _cut(chain, bound, limit),
        (limit, NARROW),
    )
    if even is None:
        return None
    bound = chain.bottleneck(even) * (1 + chain.slack) * (1 + ROUNDING)
    ends = _least(
        lambda largest: _possible(chain, bound, largest),
        lambda largest: _cut(chain, bound, largest),
        (bound, ABOUT),
    )
    return [int(length) for length in np.diff([0, *(ends or even)])]


def _least(
    possible: Callable[[float], bool],
    cut: Callable[[float], list[int] | None],
    search: tuple[float, float],
) -> list[int] | None:
    """The cut of the least value that has one; `possible` is true for that and for all above.

    None if the upper end of the search, which comes with how narrow its range must become, has
    none.
    """
    limit, narrow = search
    low = _bisected(possible, limit, 0.0, narrow)
    high, found = low * (1 + ROUNDING), cut(low * (1 + ROUNDING))
    if found is not None:
        return found
    # Far above the least there are far more ways to look at.
    step = FIRST_STEP
    while found is None and high < limit:
        low, high, step = high, min(low * (1 + step) + step * TINY * limit, limit), step * 2
        found = cut(high)
    return (
        None
        if found is None
        else cut(_bisected(lambda value: cut(value) is not None, high, low, narrow))
    )


def _bisected(holds: Callable[[float], bool], high: float, low: float, narrow: float) -> float:
    """The least value above `low` for which something holds that holds for `high`, and for all that
    are larger.
    """
    while high - low > narrow * high:
        middle = (low + high) / 2
        if not low < middle < high:
            break
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


def _turns(chain: Placement) -> float:
    return 50 * chain.layers * (chain.layers + chain.ranks)


def _possible(chain: Placement, bound: float, largest: float) -> bool:
    work = np.empty((2, chain.layers + 1), np.int64)
    return bool(run(peel, _turns(chain), chain.costs, bound, largest, work[0], work[1]))


def _cut(chain: Placement, bound: float, largest: float) -> list[int] | None:
    """The ends of the stages of some V within the bounds; None if there is none."""
    size, costs = chain.layers + 1, chain.costs
    reached = np.zeros((chain.ranks + 1, size, size), np.uint8)
    fastest = np.concatenate(([0.0], np.cumsum(np.diff(costs.seconds, axis=1).min(axis=0))))
    if not run(
        fold, _turns(chain), costs, fastest, bound, largest, np.empty(size, np.int64), reached
    ):
        return None
    middles = np.flatnonzero(np.diagonal(reached[-1]))
    stop = low = int(middles[len(middles) // 2])
    ends = [stop]
    for rank in range(chain.ranks - 1, -1, -1):
        start, end = _outer(chain, rank, (stop, low), (bound, largest), reached[rank])
        ends = [start, *ends, end] if rank else [*ends, end]
        stop, low = start, end
    return ends


def _outer(
    chain: Placement,
    rank: int,
    inner: tuple[int, int],
    bounds: tuple[float, float],
    reached: np.ndarray,
) -> tuple[int, int]:
    """Where the ranks before can stop and begin, if this one ends at `inner`: of all choices the
    one whose loads are evenest.
    """
    (stop, low), (bound, largest) = inner, bounds
    seconds, memory, _, limits = chain.costs
    starts, ends = np.arange(stop)[:, None], np.arange(low + 1, chain.layers + 1)
    behind = 2 * chain.ranks - 1 - rank
    front, back = (
        seconds[rank, stop] - seconds[rank, starts],
        seconds[behind, ends] - seconds[behind, low],
    )
    need = (memory[rank, stop] - memory[rank, starts]) + (
        memory[behind, ends] - memory[behind, low]
    )
    can = (
        (reached[:stop, low + 1 :] == 1)
        & (np.maximum(front, back) <= largest)
        & (need <= limits[rank])
    )
    can &= front + back <= bound * (1 + NARROW)
    assert can.any()
    flat = int(np.argmin(np.where(can, np.maximum(front, back), np.inf)))
    start, end = np.unravel_index(flat, can.shape)
    return int(start), int(end) + low + 1
