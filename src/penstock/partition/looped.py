"""Partitioning for the looped placement (stage s on rank s mod ranks) of interleaved schedules.

For the V placement see `folded`.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain as chain_of
from itertools import combinations
from math import comb
from typing import NamedTuple, Unpack

import numpy as np

from penstock.compiled import run
from penstock.errors import PartitionError
from penstock.partition.bottleneck import ROUNDING, minimax
from penstock.partition.dp_loops import Placed, RankLoads, share
from penstock.partition.folded import folded
from penstock.partition.placement_costs import PlacedOptions, Placement, placement
from penstock.partition.uniform import partition_uniform
from penstock.partition.validation import Costs, Floats

__all__ = ["Looped", "folded", "looped", "looped_with_bound"]

#: Largest number of cuts for which all are enumerated.
FEW_CUTS = 30_000

#: The inner cuts of a single stage: one row without entries.
NO_CUT = np.empty((1, 0), np.int64)

#: Maximum number of sweeps over all windows of stages, and number of restarts from a randomly
#: perturbed cut.
SWEEPS, RESTARTS = 30, 6

#: Number of windows that a search cuts, about.
WINDOWS = 1000

#: Layers x stages above which there are no restarts, because the search takes long without them.
NO_RESTARTS_ABOVE = 30_000

#: Weight of even stages relative to even ranks.
STAGE_EVENNESS = 1e-6

#: Below this, squares leave the range of floats.
SMALLEST = 1e-150


class Looped(NamedTuple):
    """A cut with its bottleneck.

    lengths: the number of layers of every stage.
    bottleneck: seconds of the busiest rank or link.
    lower_bound: of the bottleneck of any cut, in seconds.
    """

    lengths: list[int]
    bottleneck: float
    lower_bound: float


def looped(
    seconds: Costs, ranks: int, rounds: int, **options: Unpack[PlacedOptions]
) -> list[int] | None:
    """Minimise the busiest rank or link for stage s on rank s mod `ranks`.

        stages   0  1  2  3  4  5        3 ranks, 2 rounds: rank 0 has the stages 0 and 3,
        ranks    0  1  2  0  1  2        rank 1 has 1 and 4, rank 2 has 2 and 5

    Ties are broken by the smallest largest stage. The result is exact if there are at most 30,000
    cuts. Otherwise it is a local search: for every window of `ranks` consecutive stages, which are
    on different ranks, the best cut is computed exactly with all else fixed, repeatedly, and from
    some randomly perturbed cuts. `looped_with_bound` returns how far the bottleneck can be from the
    optimum. Identical layers are cut exactly; random ones within some percent of the optimum, and
    closer with more layers per stage.

    >>> looped([1] * 10, ranks=2, rounds=2)
    [2, 2, 3, 3]

    Args:
        seconds: forward and backward seconds of a micro-batch per layer; or a row of them per rank.
        ranks: number of ranks.
        rounds: number of stages per rank.
        options: see `PlacedOptions`.

    Returns:
        The number of layers of every stage. None if the search met no cut that fits; if all cuts
        were enumerated, none exists.

    Raises:
        PartitionError: fewer layers than stages, or inconsistent shapes.

    Source: our own. On one shared core 100 layers on 8 ranks take 70 ms in 2 rounds, 200 in 4, and
    3 where they are alike; 1,000 on 64 take some seconds.
    """
    result = looped_with_bound(seconds, ranks, rounds, **options)
    return None if result is None else result.lengths


def looped_with_bound(
    seconds: Costs, ranks: int, rounds: int, **options: Unpack[PlacedOptions]
) -> Looped | None:
    """Return the cut of `looped` with its bottleneck and a lower bound; arguments as there.

    The lower bound is the bottleneck itself if all cuts were enumerated. Otherwise it is the
    maximum of the average load of a rank and, for every k, the sum of the k cheapest of the
    (k - 1) x ranks + 1 dearest layers: by the pigeonhole principle some rank holds k of those.
    """
    for name, value in (("ranks", ranks), ("rounds", rounds)):
        if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 1:
            raise PartitionError(f"{name} is {value!r}; it must be a whole number of 1 or more")
    chain = placement(seconds, [*range(ranks)] * rounds, options)
    exact = comb(chain.layers - 1, chain.stages - 1) <= FEW_CUTS
    ends = _enumerate_cuts(chain) if exact else _search_cuts(chain)
    if ends is None:
        return None
    lengths = [int(length) for length in np.diff([0, *ends])]
    bottleneck = chain.bottleneck(ends)
    lower_bound = bottleneck if exact else min(_lower_bound(chain), bottleneck)
    return Looped(lengths, bottleneck, lower_bound)


def _lower_bound(chain: Placement) -> float:
    """Return a lower bound of the busiest rank's seconds; see `looped_with_bound`."""
    layer_seconds = np.diff(chain.costs.seconds, axis=1).min(axis=0)
    dearest = np.sort(layer_seconds)[::-1]
    sums = np.concatenate(([0.0], np.cumsum(dearest)))
    counts = np.arange(1, (chain.layers - 1) // chain.ranks + 2)
    last = (counts - 1) * chain.ranks + 1
    average = float(layer_seconds.sum()) / chain.ranks
    return max(average, float((sums[last] - sums[last - counts]).max()))


def _enumerate_cuts(chain: Placement) -> list[int] | None:
    """Return the stage ends of the best of all cuts; None if none fits."""
    cuts = _all_cuts(chain.stages - 1, chain.layers)
    first, last = np.zeros((len(cuts), 1), np.int64), np.full((len(cuts), 1), chain.layers)
    ends = np.concatenate((first, cuts, last), axis=1)
    stage = np.arange(chain.stages)
    stage_seconds, stage_bytes = (
        rows[stage, ends[:, 1:]] - rows[stage, ends[:, :-1]]
        for rows in (chain.costs.seconds, chain.costs.memory)
    )
    busiest = np.zeros(len(cuts))
    fits = np.ones(len(cuts), bool)
    ranks_of, link_of = np.asarray(chain.ranks_of), np.asarray(chain.link_of, np.int64)
    for rank in range(chain.ranks):
        stages = np.flatnonzero(ranks_of == rank)
        busiest = np.maximum(busiest, stage_seconds[:, stages].sum(axis=1))
        fits &= stage_bytes[:, stages].sum(axis=1) <= chain.costs.limits[rank]
    for link in range(int(link_of.max(initial=-1)) + 1):
        crossings = np.flatnonzero(link_of == link)
        busiest = np.maximum(busiest, chain.costs.links[cuts[:, crossings]].sum(axis=1))
    if not fits.any():
        return None
    cutoff = busiest[fits].min() * (1 + chain.slack) * (1 + ROUNDING)
    largest = stage_seconds.max(axis=1)
    best = int(np.argmin(np.where(fits & (busiest <= cutoff), largest, np.inf)))
    best_ends: list[int] = ends[best, 1:].tolist()
    return best_ends


def _all_cuts(inner: int, layers: int) -> np.ndarray:
    """Return all increasing choices of `inner` boundaries, shape (cuts, inner)."""
    if not inner:
        return NO_CUT
    boundaries = chain_of.from_iterable(combinations(range(1, layers), inner))
    return np.fromiter(boundaries, np.int64).reshape(-1, inner)


def _search_cuts(chain: Placement) -> list[int] | None:
    """Return the stage ends of the best cut of a local search from several starts."""
    lower_bound, candidates = _lower_bound(chain), []
    for start in _initial_cuts(chain):
        ends = _improve(chain, _reduce_excess(chain, start))
        if not chain.fits(ends):
            continue
        candidates.append(ends)
        if chain.bottleneck(ends) <= lower_bound * (1 + ROUNDING):
            break
    best = chain.best(candidates)
    if best is None:
        return None
    cutoff = min(map(chain.bottleneck, candidates)) * (1 + chain.slack) * (1 + ROUNDING)
    return chain.best([best, _even_stages(chain, best, cutoff)])


def _initial_cuts(chain: Placement) -> Iterator[list[int]]:
    """Yield the cuts to start from: even loads, even counts, and random perturbations.

    The perturbations are the same in every call, so that results can be reproduced.
    """
    layer_seconds = np.diff(chain.costs.seconds, axis=1).min(axis=0)
    yield np.cumsum(minimax(layer_seconds, chain.stages)).tolist()
    yield np.cumsum(partition_uniform(chain.layers, chain.stages)).tolist()
    # A fixed seed, so that the same costs give the same cut.
    rng = np.random.default_rng(0)
    restarts = RESTARTS if chain.layers * chain.stages <= NO_RESTARTS_ABOVE else 0
    for _ in range(restarts):
        perturbed = layer_seconds * rng.uniform(0.7, 1.3, chain.layers)
        yield np.cumsum(minimax(perturbed, chain.stages)).tolist()


def _reduce_excess(chain: Placement, ends: list[int]) -> list[int]:
    """Change the cut until it fits in memory, or exceeds it as little as the search achieves.

    It runs the same search with bytes in place of seconds; a rank with a smaller limit starts with
    the difference as its load.
    """
    if chain.fits(ends):
        return ends
    limits, memory = chain.costs.limits, chain.costs.memory
    extra_load = limits.max() - limits if np.isfinite(limits).all() else np.zeros(chain.ranks)
    free_links = np.zeros(chain.layers + 1)
    no_limits = np.full(chain.ranks, np.inf)
    costs = Placed(memory, np.zeros_like(memory), free_links, no_limits)
    return _improve(Placement(costs, chain.ranks_of, chain.link_of), ends, extra_load)


def _improve(chain: Placement, ends: list[int], extra_load: Floats | None = None) -> list[int]:
    """Sweep over all windows of stages until neither the bottleneck nor the evenness improves.

    Args:
        chain: costs and placement.
        ends: of the cut to improve.
        extra_load: per rank, load in addition to its stages; None is none.
    """
    extra = np.zeros(chain.ranks) if extra_load is None else extra_load

    def worst(ends: list[int]) -> float:
        """Return the load of the busiest rank or link."""
        loads = chain.of_ranks(ends, chain.costs.seconds) + extra
        return float(max(loads.max(), chain.of_links(ends).max()))

    unit = worst(ends) or 1.0

    def squares(ends: list[int]) -> float:
        """Return the sum of squares of the ranks' loads, relative to `unit`."""
        loads = chain.of_ranks(ends, chain.costs.seconds) + extra
        return float(np.square(loads / unit).sum())

    score = (worst(ends), squares(ends))
    last_window = chain.stages - chain.ranks
    for _ in range(SWEEPS):
        for first in (*range(last_window + 1), *range(last_window - 1, 0, -1)):
            ends = _cut_window(chain, ends, first, extra)
        new_score = (worst(ends), squares(ends))
        if new_score[0] >= score[0] and new_score[1] >= score[1] * (1 - 1e-9):
            break
        score = new_score
    return ends


def _even_stages(chain: Placement, ends: list[int], cutoff: float) -> list[int]:
    """Make the stages as even as ranks and links within `cutoff` seconds allow."""
    for _ in range(SWEEPS):
        before = ends
        for first in range(chain.stages - chain.ranks + 1):
            ends = _cut_window(chain, ends, first, np.zeros(chain.ranks), cutoff)
        if ends == before:
            break
    return ends


def _cut_window(
    chain: Placement,
    ends: list[int],
    first: int,
    extra: Floats,
    cutoff: float | None = None,
) -> list[int]:
    """Cut the layers of a window of stages anew; the result is no worse.

    The window starts at stage `first` and has one stage per rank. It makes the ranks' loads as even
    as possible, or, if `cutoff` gives the most seconds of a rank or link, those of the stages.
    """
    count, costs = chain.ranks, chain.costs
    start, stop = ends[first - 1] if first else 0, ends[first + count - 1]
    if stop - start == count or count == 1:
        return ends
    window = slice(first, first + count)
    ranks = np.asarray(chain.ranks_of[window])
    stage_seconds = chain.of_stages(ends, costs.seconds)
    crossing = chain.of_links(ends)
    other_loads = _loads_outside(chain, ends, first, extra)
    placed = Placed(costs.seconds[window], costs.memory[window], costs.links, costs.limits[ranks])
    loads = other_loads.seconds + stage_seconds[window]
    bound = float(max(loads.max(), crossing.max())) * (1 + ROUNDING)

    def best_cut(goal: tuple[float, float, float]) -> tuple[float, list[int]]:
        """Return the value and the stage ends of the best cut; `goal` as in `share`."""
        values = np.full((count + 1, chain.layers + 1), np.inf)
        choices = np.zeros((count + 1, chain.layers + 1), np.int64)
        work = (stop - start) ** 2 / count
        arguments = (placed, other_loads, (start, stop), goal, values, choices)
        run(share, work, *arguments, calls=WINDOWS)
        stage_ends = [stop]
        for stage in range(count, 1, -1):
            stage_ends.append(int(choices[stage, stage_ends[-1]]))
        return float(values[count, stop]), stage_ends[::-1]

    least = best_cut((0.0, 0.0, bound))[0] if cutoff is None else cutoff
    if least == np.inf:
        return ends
    unit = max(least, SMALLEST) ** -2
    if cutoff is None:
        goal = (unit, unit * STAGE_EVENNESS, least * (1 + ROUNDING))
    else:
        goal = (0.0, unit, cutoff)
    value, inner = best_cut(goal)
    if value == np.inf:
        return ends
    return [*ends[:first], *inner, *ends[first + count :]]


def _loads_outside(chain: Placement, ends: list[int], first: int, extra: Floats) -> RankLoads:
    """Return the loads of ranks and links without the stages of the window from `first` on."""
    count, costs = chain.ranks, chain.costs
    window = slice(first, first + count)
    ranks = np.asarray(chain.ranks_of[window])
    links, crossing = np.full(count, -np.inf), chain.of_links(ends)
    for index, link in enumerate(chain.link_of[first : first + count - 1]):
        if link >= 0:
            links[index] = crossing[link] - costs.links[ends[first + index]]
    stage_seconds = chain.of_stages(ends, costs.seconds)
    stage_bytes = chain.of_stages(ends, costs.memory)
    rank_seconds = chain.of_ranks(ends, costs.seconds)[ranks] + extra[ranks]
    rank_bytes = chain.of_ranks(ends, costs.memory)[ranks]
    return RankLoads(rank_seconds - stage_seconds[window], rank_bytes - stage_bytes[window], links)
