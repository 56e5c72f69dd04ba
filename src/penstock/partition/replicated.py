"""Partitioning into stages on several ranks each (data parallelism inside a pipeline).

Every search is exact over a table of the seconds of every possible stage; `replicated` computes
that table from costs of layers.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from typing import TypedDict, Unpack

import numpy as np

from penstock.errors import PartitionError
from penstock.partition.replica_search import Chain, Stage, chain_of
from penstock.partition.validation import Floats, Ints, check_costs, check_number

#: Entries of the largest table: 1 GiB.
LARGEST_TABLE = 2**27


class Limits(TypedDict, total=False):
    """Keyword arguments of the searches over a table.

    stages: number of stages; None, the default, is any number.
    exactly: whether all ranks must be used (the default), or some may stay idle.
    most_ranks: shape of the table: the most ranks that a stage and all after it may have together,
        for the stage to fit in memory. In 1F1B a rank of a stage on k ranks has ceil(that number /
        k) micro-batches in flight, which is how memory limits it.
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
    """Minimise the slowest stage or link over stages and their numbers of ranks.

    Ties, if ranks may stay idle, are broken by the fewest stages, then by the fewest ranks.

    >>> work = [3, 3, 1, 1]
    >>> table = table_of(lambda first, end, k: sum(work[first:end]) / k, layers=4, ranks=4)
    >>> replicated_table(table)
    [(4, 4)]
    >>> replicated_table(table, stages=4)
    [(1, 1), (1, 1), (1, 1), (1, 1)]
    >>> replicated_table(table, boundary=[9, 9, 0])
    [(4, 4)]

    Args:
        table: shape (layers + 1, layers + 1, ranks + 1): entry [a, b, k] is the seconds per
            micro-batch of a stage of the layers a .. b - 1 on k ranks; infinite if it does not fit.
            Entries with k = 0 or b <= a are not read.
        boundary: shape (layers - 1,): seconds of the cut after a layer. None is free. Costs of
            links that depend on the numbers of ranks belong in the table: a link from k to l ranks
            that carries 1 / min(k, l) of the bytes on each connection takes the longer of the times
            of the k and of the l.
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
    chain = _chain(table, boundary, limits)
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

    >>> table = table_of(lambda first, end, k: (end - first) / k**0.5, layers=4, ranks=4)
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
    chain = _chain(table, None, limits)
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
        if sum_at_middle < np.inf and first < middle:
            lower_before = sum_at_middle + factor * float(bounds[first])
            heapq.heappush(queue, (lower_before, first, middle, sum_at_middle))
        if sum_at_middle > sum_at_end and middle + 1 < end:
            lower_after = sum_at_end + factor * float(bounds[middle + 1])
            heapq.heappush(queue, (lower_after, middle + 1, end, sum_at_end))
    return best


def _chain(table: Floats, boundary: Sequence[float] | Floats | None, limits: Limits) -> Chain:
    """Validate the arguments of a search over a table."""
    stages = limits.get("stages")
    if stages is not None and stages < 1:
        raise PartitionError(
            f"stages is {stages!r}; it must be 1 or more, or None for any number of stages"
        )
    return chain_of(table, boundary, limits.get("most_ranks"), limits.get("most_stages"))


def table_of(stage_time: Callable[[int, int, int], float], layers: int, ranks: int) -> Floats:
    """Compute the table of `replicated_table` by calling a function for every possible stage.

    Args:
        stage_time: returns the seconds of the stage (first layer, end, ranks), infinity if it does
            not fit. It is called layers x (layers + 1) / 2 x ranks times.
        layers: number of layers.
        ranks: number of ranks.
    """
    table = np.full((layers + 1, layers + 1, ranks + 1), np.inf)
    for first in range(layers):
        for end in range(first + 1, layers + 1):
            table[first, end, 1:] = [
                stage_time(first, end, replicas) for replicas in range(1, ranks + 1)
            ]
    return table


class Options(TypedDict, total=False):
    """Keyword arguments of `replicated`.

    micro_batches: per batch, after which the gradients are summed once; no stage gets more ranks
        than that. None, the default, is an endless stream.
    latency_s: of a message, 0 by default.
    sync_bandwidth_bytes_per_s: of the gradient all-reduce; that of the links by default.
    overlap: whether all-reduce and messages overlap computation (the default, as in PipeDream's
        paper), or add to it (as in its code).
    stages, exactly: see `Limits`.
    fixed_bytes, saved_bytes: bytes of a layer, and those it saves per micro-batch in flight; none
        by default.
    limit: bytes of a rank, infinite by default. A rank of a stage on k ranks has ceil(r / k)
        micro-batches in flight, where r is the number of ranks of its stage and all after it, as in
        1F1B with a stage's ranks in turn, but at most ceil(M / k).
    """

    micro_batches: int | None
    latency_s: float
    sync_bandwidth_bytes_per_s: float
    overlap: bool
    stages: int | None
    exactly: bool
    fixed_bytes: Sequence[float] | Floats | None
    saved_bytes: Sequence[float] | Floats | None
    limit: float


def replicated(
    seconds: Sequence[float] | Floats,
    weight_bytes: Sequence[float] | Floats,
    output_bytes: Sequence[float] | Floats,
    ranks: int,
    bandwidth_bytes_per_s: float,
    **options: Unpack[Options],
) -> list[Stage] | None:
    """Minimise the slowest stage or link over stages on one or more of `ranks` equal ranks.

    A stage on k ranks gives each of them every k-th micro-batch, so that of M micro-batches the
    busiest has the share ceil(M / k) / M. Per micro-batch the stage takes the longest of

        share x seconds
        all-reduce of its gradients over k ranks: 2 (k - 1) / k x weights / bandwidth, / M
        share x (latency + bytes in / bandwidth)
        share x (latency + bytes out / bandwidth)

    In an endless stream, whose gradients are summed whenever all k ranks have computed one, the
    share is 1 / k, and 1 / M becomes 1 / k.

    >>> replicated([9, 3, 1, 1], [0, 0, 1000, 1000], [1] * 4, ranks=4, bandwidth_bytes_per_s=100)
    [(2, 3), (2, 1)]

    Args:
        seconds: forward and backward seconds of a micro-batch per layer.
        weight_bytes: bytes of the gradients per layer.
        output_bytes: bytes of a micro-batch's output per layer; the last layer's may be omitted.
        ranks: number of ranks.
        bandwidth_bytes_per_s: of each rank's link, in each direction.
        options: see `Options`.

    Returns:
        (layers, ranks) of every stage, or None if no solution exists; see `replicated_table`.

    Raises:
        PartitionError: numbers are out of range or inconsistent, or layers^2 x ranks is above 2^27.

    Source: Narayanan et al. 2019, PipeDream, section 3.1, without its levels.
    """
    layer_seconds = check_costs(seconds, "seconds")
    layers = len(layer_seconds)
    micro_batches = options.get("micro_batches")
    _check_sizes(layers, ranks, micro_batches)
    latency = check_number("latency_s", options.get("latency_s", 0.0), zero=True)
    bandwidth = check_number("bandwidth_bytes_per_s", bandwidth_bytes_per_s)
    sizes = check_costs(output_bytes, "output_bytes")
    if len(sizes) not in {layers - 1, layers}:
        raise PartitionError(f"output_bytes: has {len(sizes)} entries, but {layers} are needed")
    links = np.zeros(layers + 1)
    links[1:-1] = latency + sizes[: layers - 1] / bandwidth
    sync = check_number(
        "sync_bandwidth_bytes_per_s", options.get("sync_bandwidth_bytes_per_s", bandwidth)
    )
    sync_seconds = check_costs(weight_bytes, "weight_bytes", layers) / sync
    table = _table(layer_seconds, sync_seconds, links, ranks, options)
    most_ranks = _ranks_in_memory(
        layers, ranks, np.inf if micro_batches is None else micro_batches, options
    )
    return replicated_table(
        table,
        stages=options.get("stages"),
        exactly=options.get("exactly", True),
        most_ranks=most_ranks,
    )


def _check_sizes(layers: int, ranks: int, micro_batches: int | None) -> None:
    """Raise an error if a number is invalid or the table would be too large."""
    if not (isinstance(ranks, (int, np.integer)) and ranks >= 1 and layers):
        raise PartitionError(
            f"{layers} layers on {ranks!r} ranks: there must be at least one of each"
        )
    size = (layers + 1) ** 2 * (ranks + 1)
    if size > LARGEST_TABLE:
        raise PartitionError(
            f"{layers} layers on {ranks} ranks need a table of {size} stages, more than "
            f"{LARGEST_TABLE}: merge layers first"
        )
    if micro_batches is not None and (
        not isinstance(micro_batches, (int, np.integer)) or micro_batches < 1
    ):
        raise PartitionError(
            f"micro_batches is {micro_batches!r}; it must be a whole number of 1 or more"
        )


def _table(
    seconds: Floats, sync_seconds: Floats, links: Floats, ranks: int, options: Options
) -> Floats:
    """Return the seconds of every possible stage; shape as in `replicated_table`.

    Args:
        seconds: of a micro-batch, per layer.
        sync_seconds: time for a layer's gradients to cross a link once.
        links: seconds of the cut before every layer.
        ranks: number of ranks.
        options: of `replicated`.
    """
    layers, micro_batches = len(seconds), options.get("micro_batches")
    replicas = np.maximum(np.arange(ranks + 1.0), 1.0)
    # In an endless stream the gradients are summed after one micro-batch per replica.
    batch = replicas if micro_batches is None else np.full(ranks + 1, float(micro_batches))
    share = np.ceil(batch / replicas) / batch
    prefix_seconds = np.concatenate(([0.0], np.cumsum(seconds)))
    prefix_sync = np.concatenate(([0.0], np.cumsum(sync_seconds)))
    # A ring all-reduce sends 2 (k - 1) / k of the bytes over every link, once per batch.
    crossings = 2 * (replicas - 1) / replicas / batch
    combine = np.maximum.reduce if options.get("overlap", True) else np.add.reduce
    table = np.full((layers + 1, layers + 1, ranks + 1), np.inf)
    for first in range(layers):
        compute = (prefix_seconds - prefix_seconds[first])[first + 1 :, None]
        sync = (prefix_sync - prefix_sync[first])[first + 1 :, None]
        incoming = np.broadcast_to(links[first] * share, (layers - first, ranks + 1))
        outgoing = links[first + 1 :, None] * share
        table[first, first + 1 :] = combine([compute * share, sync * crossings, outgoing, incoming])
    if micro_batches is not None:
        table[:, :, micro_batches + 1 :] = np.inf
    return table


def _ranks_in_memory(
    layers: int, ranks: int, micro_batches: float, options: Options
) -> Ints | None:
    """Return the most ranks that a stage and all later ones may have; None without a limit."""
    limit = options.get("limit", np.inf)
    if limit == np.inf:
        return None
    fixed = _prefix_bytes(options.get("fixed_bytes"), "fixed_bytes", layers)
    saved = _prefix_bytes(options.get("saved_bytes"), "saved_bytes", layers)
    replicas = np.maximum(np.arange(ranks + 1), 1)
    # Rows: first layer; columns: end of the stage.
    free_bytes = limit - (fixed - fixed[:, None])
    saved_bytes = saved - saved[:, None]
    # A stage that saves nothing has any number of micro-batches in flight.
    without_saving = np.where(free_bytes >= 0, np.inf, 0)
    with np.errstate(divide="ignore", invalid="ignore"):
        fitting = np.floor(free_bytes / saved_bytes)
        in_flight = np.where(saved_bytes > 0, fitting, without_saving)
    in_flight = np.where(free_bytes < 0, 0.0, in_flight)[:, :, None]
    whole_batch_fits = in_flight >= np.ceil(micro_batches / replicas)
    most_ranks = np.where(whole_batch_fits, ranks, np.minimum(in_flight * replicas, ranks))
    return most_ranks.astype(np.int64)


def _prefix_bytes(layer_bytes: Sequence[float] | Floats | None, what: str, layers: int) -> Floats:
    """Return the prefix sums of bytes per layer; None is 0 bytes."""
    numbers = check_costs([0.0] * layers if layer_bytes is None else layer_bytes, what, layers)
    return np.concatenate(([0.0], np.cumsum(numbers)))
