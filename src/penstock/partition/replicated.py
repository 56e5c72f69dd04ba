"""Partitioning into stages on several ranks each (data parallelism inside a pipeline).

Every search is exact over a table of the seconds of every possible stage. The planner that calls it
computes the table, since what replicas cost differs by planner.
"""

from __future__ import annotations

import heapq
from typing import TypedDict, Unpack

import numpy as np

from penstock.errors import PartitionError
from penstock.partition.replica_search import Chain, Stage, chain_of
from penstock.partition.validation import Floats, Ints, check_number


class Limits(TypedDict, total=False):
    """Keyword arguments of the searches over a table.

    stages: number of stages; None, the default, is any number.
    exactly: whether all ranks must be used (the default), or some may stay idle.
    most_stages: shape of the table: the most stages from a stage to the last, itself included, for
        the stage to fit in memory (Alpa's and Piper's count). In 1F1B that is the number of
        micro-batches in flight, which is how memory limits it.
    """

    stages: int | None
    exactly: bool
    most_stages: Ints | None


def replicated_table(table: Floats, **limits: Unpack[Limits]) -> list[Stage] | None:
    """Minimise the slowest stage over stages and their numbers of ranks.

    Ties, if ranks may stay idle, are broken by the fewest stages, then by the fewest ranks.

    >>> work = np.cumsum([0, 3, 3, 1, 1])
    >>> table = (work - work[:, None])[:, :, None] / np.maximum(np.arange(5), 1)
    >>> replicated_table(table)
    [(4, 4)]
    >>> replicated_table(table, stages=4)
    [(1, 1), (1, 1), (1, 1), (1, 1)]

    Args:
        table: shape (layers + 1, layers + 1, ranks + 1): entry [a, b, k] is the seconds per
            micro-batch of a stage of the layers a .. b - 1 on k ranks; infinite if it does not fit.
            Entries with k = 0 or b <= a are not read. Costs of links belong in the table: a link
            from k to l ranks that carries 1 / min(k, l) of the bytes on each connection takes the
            longer of the times of the k and of the l.
        limits: see `Limits`.

    Returns:
        (layers, ranks) of every stage, or None if no solution exists.

    Raises:
        PartitionError: shapes are wrong, or numbers are negative or NaN.

    Source: one level of PipeDream's dynamic program (Narayanan et al. 2019, section 3.1), inverted:
    for a bound on the slowest stage, the fewest ranks that keep it, in O(layers^2 x ranks) instead
    of O(layers^2 x ranks^2), and a search over bounds. Idle ranks then go to the stages where they
    reduce the sum of squares most. If that does not place them all, the dynamic program itself
    runs. 100 layers on 64 ranks take 10 to 30 ms on one shared core, on 1,024 ranks 0.2 s, and some
    seconds if the dynamic program must run; Numba takes 0.4 s to load at the first call of a
    process, and some seconds to compile at the first on a machine.
    """
    chain = _chain(table, limits)
    tightest = chain.search(limits.get("stages"))
    if tightest is None:
        return None
    bound, stages = tightest
    used_ranks = sum(ranks for _, ranks in stages)
    if not limits.get("exactly", True) or used_ranks == chain.ranks:
        return stages
    on_all_ranks = chain.spread_ranks(stages, bound)
    if on_all_ranks:
        return on_all_ranks
    return chain.least(bound=np.inf, sums=False, stages=limits.get("stages"), exactly=True)


def replicated_sum(
    table: Floats, bound_factor: float, **limits: Unpack[Limits]
) -> list[Stage] | None:
    """Minimise the sum of stage seconds + bound_factor x the slowest stage.

    With bound_factor = B - 1 that is the time of B micro-batches through the pipeline.

    >>> layers = np.arange(5)
    >>> table = (layers - layers[:, None])[:, :, None] / np.sqrt(np.maximum(np.arange(5), 1))
    >>> replicated_sum(table, bound_factor=0)
    [(4, 4)]
    >>> replicated_sum(table, bound_factor=15)
    [(1, 1), (1, 1), (1, 1), (1, 1)]

    Args:
        table: as in `replicated_table`.
        bound_factor: weight of the slowest stage in addition to its part of the sum, 0 or more.
        limits: see `Limits`.

    Returns:
        (layers, ranks) of every stage, or None if no solution exists.

    Raises:
        PartitionError: as `replicated_table`.

    Source: Alpa (Zheng et al., OSDI 2022, section 5.2): for every t_max, the least sum with no
    stage above it. Alpa tries the values one after another, 1e-6 apart; this skips intervals of
    values whose lower bound is no better than the incumbent, which is exact and faster: 100 layers
    on 64 ranks take 0.1 s on one shared core, and with limits of `most_stages` that bind 0.7 s.
    """
    factor = check_number("bound_factor", bound_factor, zero=True)
    chain = _chain(table, limits)
    exactly, stage_count = limits.get("exactly", True), limits.get("stages")
    best: list[Stage] | None = None
    best_value = np.inf

    def least_sum(bound: float) -> float:
        """Return the least sum with no stage above `bound`; update the incumbent."""
        nonlocal best, best_value
        stages = chain.least(bound=bound, sums=True, stages=stage_count, exactly=exactly)
        if stages is None:
            return np.inf
        times = chain.seconds(stages)
        value = sum(times) + factor * max(times)
        if value < best_value:
            best, best_value = stages, value
        return sum(times)

    unbounded_sum = least_sum(np.inf)
    if best is None:
        return None
    # No better solution has a slowest stage above (incumbent - least sum) / factor, and bounds at
    # or above the incumbent's slowest stage do not reduce the sum.
    highest = max(chain.seconds(best))
    highest = min(highest, (best_value - unbounded_sum) / factor if factor else 0.0)
    entries = chain.entries()
    bounds = np.unique(entries[entries < highest])
    # Intervals of bounds: (lower bound of the objective, first, end, least sum at the end).
    queue = [(unbounded_sum, 0, len(bounds), unbounded_sum)]
    while queue:
        lower, first, end, sum_at_end = heapq.heappop(queue)
        if first >= end or lower >= best_value:
            continue
        middle = (first + end) // 2
        sum_at_middle = least_sum(float(bounds[middle]))
        # Sums fall as the bound rises: below the middle none is less than the middle's.
        if sum_at_middle < np.inf and first < middle:
            lower_before = sum_at_middle + factor * float(bounds[first])
            heapq.heappush(queue, (lower_before, first, middle, sum_at_middle))
        # If the end's sum is no less than the middle's, a bound between them gains nothing.
        if sum_at_middle > sum_at_end and middle + 1 < end:
            lower_after = sum_at_end + factor * float(bounds[middle + 1])
            heapq.heappush(queue, (lower_after, middle + 1, end, sum_at_end))
    return best


def _chain(table: Floats, limits: Limits) -> Chain:
    """Validate the arguments of a search over a table."""
    stages = limits.get("stages")
    if stages is not None and stages < 1:
        raise PartitionError(
            f"stages is {stages!r}; it must be 1 or more, or None for any number of stages"
        )
    return chain_of(table, limits.get("most_stages"))
