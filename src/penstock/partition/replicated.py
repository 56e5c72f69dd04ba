"""Stages that several ranks share, each with all of the stage's weights: how many layers, and how
many ranks, each gets.

Everything here is exact over a table of what every possible stage would take; `replicated` makes
that table from plain costs.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from typing import TypedDict, Unpack

import numpy as np

from penstock.errors import PartitionError
from penstock.partition.checks import Floats, check_costs, check_number
from penstock.partition.copies import Chain, Ints, Stage, chain_of

#: Entries of the largest table: 1 GiB.
LARGEST_TABLE = 2**27


class Limits(TypedDict, total=False):
    """What the searches over a table take besides it.

    stages: how many stages to make; None, the default, is any number.
    exactly: whether all ranks must be used (the default), or some may be left over.
    most_ranks: shape of the table: how many ranks a stage and all after it may have together at
    most, for it to fit. In 1F1B a
        stage on k ranks has ceil(those / k) micro-batches in flight on each, so that memory says
        how many.
    most_stages: likewise for the number of stages from this one to the last, itself included
    (Alpa's and Piper's count).
    """

    stages: int | None
    exactly: bool
    most_ranks: Ints | None
    most_stages: Ints | None


def replicated_table(
    table: Floats, boundary: Sequence[float] | Floats | None = None, **limits: Unpack[Limits]
) -> list[Stage] | None:
    """The stages whose slowest, or the slowest link between them, is fastest.

    Among those, if ranks may be left over, the ones that are fewest, and of these the ones on the
    fewest ranks.

    >>> work = [3, 3, 1, 1]
    >>> table = table_of(lambda first, end, copies: sum(work[first:end]) / copies, layers=4, ranks=4)
    >>> replicated_table(table), replicated_table(table, stages=4), replicated_table(table, boundary=[9, 9, 0])
    ([(4, 4)], [(1, 1), (1, 1), (1, 1), (1, 1)], [(4, 4)])

    Args:
        table: shape (layers + 1, layers + 1, ranks + 1): entry [a, b, k] is what a stage of the
        layers a .. b - 1 takes on k
            ranks for a micro-batch, in seconds; infinite if it does not fit. Entries of k = 0 or b
            <= a are not read.
        boundary: shape (layers - 1,): seconds of the cut after a layer. None is free. What depends
        on the copies on either
            side belongs into the table: a link from k to l ranks that carries 1 / min(k, l) of the
            bytes on each of its lanes takes the longer of what the k and the l take.
        limits: see `Limits`.

    Returns:
        (layers, ranks) of every stage, or None if there is no way.

    Raises:
        PartitionError: the shapes are not so, or numbers are below 0 or NaN.

    Source: the level of PipeDream's dynamic program (Narayanan et al. 2019, section 3.1), turned
    round: of a bound on the slowest, the fewest ranks that keep it, in O(layers^2 x ranks) instead
    of O(layers^2 x ranks^2), and a search over bounds. Ranks left over go to the stages where they
    help most. Where that does not place them all, the dynamic program itself runs. 100 layers on 64
    ranks take 10 to 30 ms on one shared core, on 1,024 ranks 0.2 s, and some seconds where that
    must run; Numba takes 0.4 s to load at the first call of a process, and some seconds to compile
    at the first on a machine.
    """
    chain = _chain(table, boundary, limits)
    tightest = chain.search(limits.get("stages"))
    if tightest is None:
        return None
    bound, found = tightest
    if not limits.get("exactly", True) or sum(copies for _, copies in found) == chain.ranks:
        return found
    return chain.topped_up(found, bound) or chain.least(
        bound=np.inf, sums=False, stages=limits.get("stages"), exactly=True
    )


def replicated_sum(
    table: Floats, bound_factor: float, **limits: Unpack[Limits]
) -> list[Stage] | None:
    """The stages with the least sum of times + bound_factor x slowest time: of B micro-batches in a
    row, with B - 1.

    >>> table = table_of(lambda first, end, copies: (end - first) / copies ** 0.5, layers=4, ranks=4)
    >>> replicated_sum(table, bound_factor=0), replicated_sum(table, bound_factor=15)
    ([(4, 4)], [(1, 1), (1, 1), (1, 1), (1, 1)])

    Args:
        table: as of `replicated_table`.
        bound_factor: what the slowest stage counts for besides its part of the sum, 0 or more.
        limits: see `Limits`.

    Returns:
        (layers, ranks) of every stage, or None if there is no way.

    Raises:
        PartitionError: as `replicated_table`.

    Source: Alpa (Zheng et al., OSDI 2022, section 5.2): for every t_max, the least sum with no
    stage above it. Alpa tries the values one after another, 1e-6 apart; here intervals of values
    whose lower bound is no better than what is found are skipped, so that it is exact and faster:
    100 layers on 64 ranks take 0.1 s on one shared core, and with `most_stages` that bind 0.7 s.
    """
    factor = check_number("bound_factor", bound_factor, zero=True)
    chain, exactly, stages = (
        _chain(table, None, limits),
        limits.get("exactly", True),
        limits.get("stages"),
    )
    best, value = None, np.inf

    def at(bound: float) -> float:
        """The least sum with no stage above `bound`; remembers the best whole."""
        nonlocal best, value
        found = chain.least(bound=bound, sums=True, stages=stages, exactly=exactly)
        if found is None:
            return np.inf
        times = chain.seconds(found)
        if sum(times) + factor * max(times) < value:
            best, value = found, sum(times) + factor * max(times)
        return sum(times)

    floor = at(np.inf)
    if best is None:
        return None
    # Less than the least sum plus the slowest nothing can be; and what is at or above the slowest
    # of that has no less a sum.
    highest = min(max(chain.seconds(best)), (value - floor) / factor if factor else 0.0)
    entries = chain.entries()
    bounds = np.unique(entries[entries < highest])
    waiting = [(floor, 0, len(bounds), floor)]
    while waiting:
        lower, low, high, above = heapq.heappop(waiting)
        if low >= high or lower >= value:
            continue
        middle = (low + high) // 2
        here = at(float(bounds[middle]))
        if here < np.inf and low < middle:
            heapq.heappush(waiting, (here + factor * float(bounds[low]), low, middle, here))
        if here > above and middle + 1 < high:
            heapq.heappush(
                waiting, (above + factor * float(bounds[middle + 1]), middle + 1, high, above)
            )
    return best


def _chain(table: Floats, boundary: Sequence[float] | Floats | None, limits: Limits) -> Chain:
    stages = limits.get("stages")
    if stages is not None and stages < 1:
        raise PartitionError(
            f"stages is {stages!r}; a model is cut into 1 or more, or None for any number"
        )
    return chain_of(table, boundary, limits.get("most_ranks"), limits.get("most_stages"))


def table_of(stage_time: Callable[[int, int, int], float], layers: int, ranks: int) -> Floats:
    """The table of `replicated_table`, from a function of (first layer, end, ranks) that gives the
    seconds of that stage.

    It is called layers x (layers + 1) / 2 x ranks times; infinity says that the stage does not fit.
    """
    table = np.full((layers + 1, layers + 1, ranks + 1), np.inf)
    for first in range(layers):
        for end in range(first + 1, layers + 1):
            table[first, end, 1:] = [
                stage_time(first, end, copies) for copies in range(1, ranks + 1)
            ]
    return table


class Options(TypedDict, total=False):
    """What `replicated` takes besides its numbers.

    micro_batches: how many a batch has, for which the gradients are added up once; no stage gets
    more ranks than that. None, the
        default, is an endless stream.
    latency_s: of a message, 0 if not given.
    sync_bandwidth_bytes_per_s: of the gradients' sum, if not that of the links.
    overlap: whether sums and messages run beside the work (if not given, as in PipeDream's paper),
    or add to it (as in its code). stages, exactly: see `Limits`. holds, kept: bytes that a layer
    takes, and that it keeps for a micro-batch in flight; none if not given. limit: bytes of a rank,
    infinite if not given. A rank of a stage on k ranks has ceil(r / k) micro-batches in flight, r =
    the
        ranks of its stage and all after it together, as in 1F1B with a stage's ranks in turn, but
        at most ceil(M / k).
    """

    micro_batches: int | None
    latency_s: float
    sync_bandwidth_bytes_per_s: float
    overlap: bool
    stages: int | None
    exactly: bool
    holds: Sequence[float] | Floats | None
    kept: Sequence[float] | Floats | None
    limit: float


def replicated(
    seconds: Sequence[float] | Floats,
    weight_bytes: Sequence[float] | Floats,
    output_bytes: Sequence[float] | Floats,
    ranks: int,
    bandwidth_bytes_per_s: float,
    **options: Unpack[Options],
) -> list[Stage] | None:
    """The stages, each on one or more of `ranks` like ranks, whose slowest stage or link is
    fastest; see `replicated_table`.

    A stage of k ranks gives each of them every k-th micro-batch, so that of M micro-batches the
    busiest has the share ceil(M / k) / M. Per micro-batch the stage takes the longest of

        share x seconds  |  its gradients' sum over k ranks, 2 (k - 1) / k x weights / bandwidth, /
                         M
        share x (latency + bytes in / bandwidth)  |  share x (latency + bytes out / bandwidth)

    In an endless stream, whose gradients are added up whenever all k ranks have had one, the share
    is 1 / k and so is 1 / M.

    >>> replicated([9, 3, 1, 1], [0, 0, 1000, 1000], [1, 1, 1, 1], ranks=4, bandwidth_bytes_per_s=100)
    [(2, 3), (2, 1)]

    Args:
        seconds: of a micro-batch, forward and backward, per layer.
        weight_bytes: of the gradients, per layer.
        output_bytes: of a micro-batch, per layer; the last layer's may be left out.
        ranks: how many there are.
        bandwidth_bytes_per_s: of each rank's link, in each direction.
        options: see `Options`.

    Raises:
        PartitionError: numbers are out of range or do not fit each other, or layers^2 x ranks is
        above 2^27.

    Source: Narayanan et al. 2019, PipeDream, section 3.1, without its levels.
    """
    work = check_costs(seconds, "seconds")
    layers = len(work)
    if not (isinstance(ranks, (int, np.integer)) and ranks >= 1 and layers):
        raise PartitionError(
            f"{layers} layers on {ranks!r} ranks: there must be at least one of each"
        )
    if (layers + 1) ** 2 * (ranks + 1) > LARGEST_TABLE:
        raise PartitionError(
            f"{layers} layers on {ranks} ranks need a table of {(layers + 1) ** 2 * (ranks + 1)} stages, more than "
            f"{LARGEST_TABLE}: join layers to fewer first"
        )
    count = options.get("micro_batches")
    if count is not None and (not isinstance(count, (int, np.integer)) or count < 1):
        raise PartitionError(f"micro_batches is {count!r}; it must be a whole number of 1 or more")
    latency = check_number("latency_s", options.get("latency_s", 0.0), zero=True)
    bandwidth = check_number("bandwidth_bytes_per_s", bandwidth_bytes_per_s)
    sizes = check_costs(output_bytes, "output_bytes")
    if len(sizes) not in {layers - 1, layers}:
        raise PartitionError(f"output_bytes: has {len(sizes)} entries, and {layers} are needed")
    links = np.zeros(layers + 1)
    links[1:-1] = latency + sizes[: layers - 1] / bandwidth
    sync = check_number(
        "sync_bandwidth_bytes_per_s", options.get("sync_bandwidth_bytes_per_s", bandwidth)
    )
    summed = check_costs(weight_bytes, "weight_bytes", layers) / sync
    table = _table(work, summed, links, ranks, options)
    most = _room(layers, ranks, np.inf if count is None else count, options)
    return replicated_table(
        table, stages=options.get("stages"), exactly=options.get("exactly", True), most_ranks=most
    )


def _table(work: Floats, summed: Floats, links: Floats, ranks: int, options: Options) -> Floats:
    """What every stage takes: of its seconds, of those that its weights take to cross a link once,
    and of the cuts before layers.
    """
    layers, count = len(work), options.get("micro_batches")
    copies = np.maximum(np.arange(ranks + 1.0), 1.0)
    batch = copies if count is None else np.full(ranks + 1, float(count))
    share = np.ceil(batch / copies) / batch
    done, owed = (np.concatenate(([0.0], np.cumsum(each))) for each in (work, summed))
    crossings = 2 * (copies - 1) / copies / batch
    join = np.maximum.reduce if options.get("overlap", True) else np.add.reduce
    table = np.full((layers + 1, layers + 1, ranks + 1), np.inf)
    for first in range(layers):
        load, weights = (
            (done - done[first])[first + 1 :, None],
            (owed - owed[first])[first + 1 :, None],
        )
        into = np.broadcast_to(links[first] * share, (layers - first, ranks + 1))
        table[first, first + 1 :] = join(
            [load * share, weights * crossings, links[first + 1 :, None] * share, into]
        )
    if count is not None:
        table[:, :, count + 1 :] = np.inf
    return table


def _room(layers: int, ranks: int, micro_batches: float, options: Options) -> Ints | None:
    """How many ranks a stage and those after it may have together, by memory; None if there is no
    limit.
    """
    limit = options.get("limit", np.inf)
    if limit == np.inf:
        return None
    holds, kept = (
        np.concatenate(
            ([0.0], np.cumsum(check_costs([0.0] * layers if each is None else each, name, layers)))
        )
        for name, each in (("holds", options.get("holds")), ("kept", options.get("kept")))
    )
    copies = np.maximum(np.arange(ranks + 1), 1)
    spare = limit - (holds - holds[:, None])
    with np.errstate(divide="ignore", invalid="ignore"):
        flying = np.where(
            kept > kept[:, None],
            np.floor(spare / (kept - kept[:, None])),
            np.where(spare >= 0, np.inf, 0),
        )
    flying = np.where(spare < 0, 0.0, flying)[:, :, None]
    all_of_them = flying >= np.ceil(micro_batches / copies)
    return np.where(all_of_them, ranks, np.minimum(flying * copies, ranks)).astype(np.int64)
