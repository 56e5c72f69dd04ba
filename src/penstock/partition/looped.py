"""The cut for ranks that have several stages each, handed out in turn: interleaved schedules. For a
V see `folded`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain as chain_of
from itertools import combinations
from math import comb
from typing import NamedTuple, Unpack

import numpy as np

from penstock.errors import PartitionError
from penstock.partition.bottleneck import ROUNDING, minimax
from penstock.partition.checks import Costs, Floats
from penstock.partition.compiled import run
from penstock.partition.folded import folded
from penstock.partition.loops import Held, Placed, share
from penstock.partition.placed import PlacedOptions, Placement, placement
from penstock.partition.uniform import partition_uniform

__all__ = ["Looped", "folded", "looped", "looped_with_bound"]

#: Up to so many cuts are simply all tried.
FEW_CUTS = 30_000

#: The ways to make one stage: one, without a cut.
NO_CUT = np.empty((1, 0), np.int64)

#: How often the search goes over all stages at most, and how often it begins anew from a shaken
#: cut.
SWEEPS, SHAKES = 30, 6

#: Layers x stages from which on the search is long enough without that.
MANY = 30_000

#: What evenness of stages weighs beside evenness of ranks.
STAGES = 1e-6

#: Below this, squares leave the range of floats.
SMALLEST = 1e-150


class Looped(NamedTuple):
    """The lengths of the stages, the seconds of the busiest rank or link, and what no cut can
    undercut.
    """

    lengths: list[int]
    bottleneck: float
    lower_bound: float


def looped(
    seconds: Costs, ranks: int, rounds: int, **options: Unpack[PlacedOptions]
) -> list[int] | None:
    """Stage lengths of the interleaved placement, stage s on rank s mod `ranks`, whose busiest rank
    (or link) is fastest.

        stages   0  1  2  3  4  5        3 ranks, 2 rounds: rank 0 has the stages 0 and 3,
        ranks    0  1  2  0  1  2        rank 1 has 1 and 4, rank 2 has 2 and 5

    Of those the one with the smallest largest stage. Exact where there are at most 30,000 cuts.
    Beyond that a search: of every `ranks` stages in a row, which are on as many ranks, the best cut
    is found exactly, all else left as it is, again and again; and from some shaken cuts anew.
    `looped_with_bound` says how far the bottleneck can be from the least. Layers that are all alike
    it cuts exactly; random ones within some percent of the least, the more of them there are for
    each stage the closer.

    >>> looped([1] * 10, ranks=2, rounds=2)
    [2, 2, 3, 3]

    Args:
        seconds: of a micro-batch, forward and backward, per layer; or a row of them per rank.
        ranks: how many there are.
        rounds: how many stages each has.
        options: see `PlacedOptions`.

    Returns:
        The number of layers of every stage. None if no cut was found that fits; none exists where
        all were tried.

    Raises:
        PartitionError: fewer layers than stages, or numbers that do not fit each other.

    Source: our own. On one shared core 100 layers on 8 ranks take 70 ms in 2 rounds, 200 in 4, and
    3 where they are alike; 1,000 on 64 take some seconds.
    """
    found = looped_with_bound(seconds, ranks, rounds, **options)
    return None if found is None else found.lengths


def looped_with_bound(
    seconds: Costs, ranks: int, rounds: int, **options: Unpack[PlacedOptions]
) -> Looped | None:
    """What `looped` finds, with its bottleneck and a lower bound for it; arguments as there.

    The lower bound is the bottleneck itself where all cuts were tried. Else it is the greatest of:
    an even share of all work, and for every k the k cheapest of the (k - 1) x ranks + 1 dearest
    layers, since of so many some rank has k.
    """
    for name, value in (("ranks", ranks), ("rounds", rounds)):
        if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 1:
            raise PartitionError(f"{name} is {value!r}; it must be a whole number of 1 or more")
    chain = placement(seconds, [*range(ranks)] * rounds, options)
    few = comb(chain.layers - 1, chain.stages - 1) <= FEW_CUTS
    ends = _tried(chain) if few else _searched(chain)
    if ends is None:
        return None
    bottleneck = chain.bottleneck(ends)
    return Looped(_lengths(ends), bottleneck, bottleneck if few else min(_least(chain), bottleneck))


def _lengths(ends: Sequence[int]) -> list[int]:
    return [int(length) for length in np.diff([0, *ends])]


def _least(chain: Placement) -> float:
    """A lower bound for the busiest rank."""
    each = np.diff(chain.costs.seconds, axis=1).min(axis=0)
    dearest = np.sort(each)[::-1]
    sums = np.concatenate(([0.0], np.cumsum(dearest)))
    counts = np.arange(1, (chain.layers - 1) // chain.ranks + 2)
    last = (counts - 1) * chain.ranks + 1
    return max(float(each.sum()) / chain.ranks, float((sums[last] - sums[last - counts]).max()))


def _tried(chain: Placement) -> list[int] | None:
    """The best of all cuts."""
    inner, layers = chain.stages - 1, chain.layers
    cuts = (
        np.fromiter(
            chain_of.from_iterable(combinations(range(1, layers), inner)), np.int64
        ).reshape(-1, inner)
        if inner
        else NO_CUT
    )
    ends = np.concatenate(
        (np.zeros((len(cuts), 1), np.int64), cuts, np.full((len(cuts), 1), layers)), axis=1
    )
    number = np.arange(chain.stages)
    stages, need = (
        rows[number, ends[:, 1:]] - rows[number, ends[:, :-1]]
        for rows in (chain.costs.seconds, chain.costs.memory)
    )
    busiest = np.zeros(len(cuts))
    fits = np.ones(len(cuts), bool)
    for rank in range(chain.ranks):
        own = [stage for stage, other in enumerate(chain.ranks_of) if other == rank]
        busiest = np.maximum(busiest, stages[:, own].sum(axis=1))
        fits &= need[:, own].sum(axis=1) <= chain.costs.limits[rank]
    for link in {link for link in chain.link_of if link >= 0}:
        own = [cut for cut, other in enumerate(chain.link_of) if other == link]
        busiest = np.maximum(busiest, chain.costs.links[cuts[:, own]].sum(axis=1))
    if not fits.any():
        return None
    most = busiest[fits].min() * (1 + chain.slack) * (1 + ROUNDING)
    best = int(np.argmin(np.where(fits & (busiest <= most), stages.max(axis=1), np.inf)))
    found: list[int] = ends[best, 1:].tolist()
    return found


def _searched(chain: Placement) -> list[int] | None:
    """The best cut of a search from several beginnings."""
    least, found = _least(chain), []
    for start in _beginnings(chain):
        ends = _improved(chain, _fitted(chain, start))
        if not chain.fits(ends):
            continue
        found.append(ends)
        if chain.bottleneck(ends) <= least * (1 + ROUNDING):
            break
    best = chain.best(found)
    if best is None:
        return None
    most = min(map(chain.bottleneck, found)) * (1 + chain.slack) * (1 + ROUNDING)
    return chain.best([best, *([_smoothed(chain, best, most)])])


def _beginnings(chain: Placement) -> Iterator[list[int]]:
    """Cuts to begin with: of even stages, of even counts, and these shaken, always in the same
    ways.
    """
    each = np.diff(chain.costs.seconds, axis=1).min(axis=0)
    yield np.cumsum(minimax(each, chain.stages)).tolist()
    yield np.cumsum(partition_uniform(chain.layers, chain.stages)).tolist()
    rng = np.random.default_rng(0)
    for _ in range(SHAKES if chain.layers * chain.stages <= MANY else 0):
        yield np.cumsum(minimax(each * rng.uniform(0.7, 1.3, chain.layers), chain.stages)).tolist()


def _fitted(chain: Placement, ends: list[int]) -> list[int]:
    """The cut changed until it fits, or as nearly as can be: the bytes above the limits are then
    the work to share.
    """
    if chain.fits(ends):
        return ends
    spare = (
        chain.costs.limits.max() - chain.costs.limits
        if np.isfinite(chain.costs.limits).all()
        else np.zeros(chain.ranks)
    )
    memory, nothing = chain.costs.memory, np.zeros_like(chain.costs.memory)
    costs = Placed(memory, nothing, np.zeros(chain.layers + 1), np.full(chain.ranks, np.inf))
    return _improved(Placement(costs, chain.ranks_of, chain.link_of), ends, spare)


def _improved(chain: Placement, ends: list[int], held: Floats | None = None) -> list[int]:
    """The cut after as many sweeps as help; `held` is what every rank has to do besides."""
    besides = np.zeros(chain.ranks) if held is None else held

    def worst(ends: list[int]) -> float:
        return float(
            max(
                (chain.of_ranks(ends, chain.costs.seconds) + besides).max(),
                chain.of_links(ends).max(),
            )
        )

    def squares(ends: list[int]) -> float:
        return float(np.square((chain.of_ranks(ends, chain.costs.seconds) + besides) / unit).sum())

    unit = worst(ends) or 1.0
    state = (worst(ends), squares(ends))
    for _ in range(SWEEPS):
        for first in (
            *range(chain.stages - chain.ranks + 1),
            *range(chain.stages - chain.ranks - 1, 0, -1),
        ):
            ends = _shared(chain, ends, first, besides)
        now = (worst(ends), squares(ends))
        if now[0] >= state[0] and now[1] >= state[1] * (1 - 1e-9):
            break
        state = now
    return ends


def _smoothed(chain: Placement, ends: list[int], most: float) -> list[int]:
    """The cut with its stages as even as ranks and links within `most` allow."""
    for _ in range(SWEEPS):
        before = ends
        for first in range(chain.stages - chain.ranks + 1):
            ends = _shared(chain, ends, first, np.zeros(chain.ranks), most)
        if ends == before:
            break
    return ends


def _shared(
    chain: Placement, ends: list[int], first: int, besides: Floats, most: float | None = None
) -> list[int]:
    """The cut with the layers of the stages from `first` on, as many as there are ranks, cut anew
    and no worse.

    The ranks' loads are made as even as can be; or, where `most` says what a rank may take, those
    of the stages are.
    """
    count, costs = chain.ranks, chain.costs
    start, stop = ends[first - 1] if first else 0, ends[first + count - 1]
    if stop - start == count or count == 1:
        return ends
    ranks = np.asarray(chain.ranks_of[first : first + count])
    own, own_bytes = (chain.of_stages(ends, rows) for rows in (costs.seconds, costs.memory))
    links, crossing = np.full(count, -np.inf), chain.of_links(ends)
    for number, link in enumerate(chain.link_of[first : first + count - 1]):
        if link >= 0:
            links[number] = crossing[link] - costs.links[ends[first + number]]
    seconds = (
        chain.of_ranks(ends, costs.seconds)[ranks] + besides[ranks] - own[first : first + count]
    )
    held = Held(
        seconds, chain.of_ranks(ends, costs.memory)[ranks] - own_bytes[first : first + count], links
    )
    rows = slice(first, first + count)
    window = Placed(costs.seconds[rows], costs.memory[rows], costs.links, costs.limits[ranks])
    loads = seconds + own[rows]
    bound = float(max(loads.max(), crossing.max())) * (1 + ROUNDING)

    def cut(goal: tuple[float, float, float]) -> tuple[float, list[int]]:
        values = np.full((count + 1, chain.layers + 1), np.inf)
        choices = np.zeros((count + 1, chain.layers + 1), np.int64)
        turns = 1000 * (stop - start) ** 2 / count
        run(share, turns, window, held, (start, stop), goal, values, choices)
        found = [stop]
        for stage in range(count, 1, -1):
            found.append(int(choices[stage, found[-1]]))
        return float(values[count, stop]), found[::-1]

    least = cut((0.0, 0.0, bound))[0] if most is None else most
    if least == np.inf:
        return ends
    unit = max(least, SMALLEST) ** -2
    value, inner = cut(
        (unit, unit * STAGES, least * (1 + ROUNDING)) if most is None else (0.0, unit, most)
    )
    if value == np.inf:
        return ends
    return [*ends[:first], *inner, *ends[first + count :]]
