"""Exact partitioning: minimise the load of the slowest stage or link."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict, Unpack

import numpy as np

from penstock.errors import PartitionError
from penstock.partition.by_time import samples_of
from penstock.partition.catalogue import check_stages, register
from penstock.partition.chain_dp import MAXIMUM, SUM, at_starts, best_cut, stage_sums
from penstock.partition.uniform import partition_uniform
from penstock.partition.validation import (
    Floats,
    check_costs,
    check_number,
    links_of,
    refuse_unknown,
)
from penstock.profile.profile import Profile

#: Relative difference below which two bottlenecks count as equal: sums of floats that should be
#: equal differ by rounding.
ROUNDING = 1e-12

#: Weight of even layer counts relative to even loads, in the choice among cuts of equal bottleneck.
EVENNESS = 1e-9


def minimax(
    costs: Sequence[float],
    stages: int,
    transfer: Sequence[float] | None = None,
    overlap: bool = True,
) -> list[int]:
    """Minimise the bottleneck: the load of the busiest stage or link.

        layers       a    b  |  c    d    e    overlap: stages load a + b and c + d + e, the link t1
        transfers      t0    t1   t2   t3      no overlap: stages load a + b + t1 and t1 + c + d + e

    Among all cuts with that bottleneck (to 1 part in 10^12), take the one with the smallest sum of
    squared loads of stages and links, so that the others have as much slack as possible; among
    those that differ by less than about 10^-9 of the bottleneck's square, the one with the most
    even layer counts; among those, the one whose last stage is longest, and so on backwards.

    >>> minimax([1, 1, 1, 1, 1, 1, 1, 1, 20], 3)
    [4, 4, 1]
    >>> minimax([1, 1, 1, 1], 2, transfer=[0, 5, 5])
    [1, 3]

    Args:
        costs: one per layer, finite and not negative.
        stages: from 1 to the number of layers.
        transfer: cost of a cut after layer i, for every layer but the last; None is free.
        overlap: whether transfers overlap the stages' computation, or occupy the stages on both
            sides.

    Returns:
        The number of layers of every stage.

    Raises:
        PartitionError: the costs, the transfers or the number of stages are invalid.

    Source: the recurrence of PipeDream (Narayanan et al. 2019, section 3.1) without replication;
    the bound on the length of stages is our own. Time O(layers x stages x longest stage within a
    guess's bottleneck): 1,000 random layers in 64 stages take 15 ms on one shared core, and 0.2 s
    in the worst case, when one layer is dearer than all others together.
    """
    layers = check_costs(costs)
    links = links_of(transfer, len(layers))
    stages = check_stages(len(layers), stages)
    prefix = np.concatenate(([0.0], np.cumsum(layers)))
    bound = min(_bottleneck(prefix, links, ends, overlap) for ends in _guesses(prefix, stages))
    longest = _longest(prefix, stages, bound)
    loads, incoming = stage_sums(prefix, longest), at_starts(links, longest)
    busiest = busiest_of(loads, incoming, links[1:, None], overlap=overlap)
    least = best_cut(lambda _: busiest, stages, len(layers), MAXIMUM).value
    evened_loads = [loads, incoming] if overlap else [busiest]
    penalties = unevenness(busiest, evened_loads, least)
    return best_cut(lambda _: penalties, stages, len(layers), SUM).lengths


def busiest_of(load: Floats, incoming: Floats, outgoing: Floats, *, overlap: bool) -> Floats:
    """Return the seconds of stages or their links, whichever take longer; as arrays.

    With overlap a link counts once, for the stage behind it; without, for the stages on both sides.
    """
    return np.maximum(load, incoming) if overlap else load + incoming + outgoing


def unevenness(busiest: Floats, evened_loads: Sequence[Floats], least: float) -> Floats:
    """Return the table of a stage's part of the sum that breaks ties between equal bottlenecks.

    Args:
        busiest: the table of the stage's bottlenecks.
        evened_loads: loads of stages and links, whose squares are summed.
        least: the bottleneck; stages above it are impossible.
    """
    layers, longest = busiest.shape
    allowed = busiest <= least * (1 + ROUNDING)
    penalty = EVENNESS * np.square(np.arange(longest, 0, -1) / layers)
    for load in evened_loads:
        penalty = penalty + np.square(np.where(allowed, load, 0.0) / (least or 1.0))
    return np.where(allowed, penalty, np.inf)


def _bottleneck(prefix: Floats, links: Floats, ends: np.ndarray, overlap: bool) -> float:
    """Return the bottleneck of the cut with these ends."""
    starts = np.concatenate(([0], ends[:-1]))
    loads = prefix[ends] - prefix[starts]
    return float(np.max(busiest_of(loads, links[starts], links[ends], overlap=overlap)))


def _guesses(prefix: Floats, stages: int) -> list[np.ndarray]:
    """Return the stage ends of two heuristic cuts, equal counts and about equal loads.

    Their bottlenecks are upper bounds of the least one.
    """
    layers, index = len(prefix) - 1, np.arange(1, stages + 1)
    shares = np.searchsorted(prefix, prefix[-1] * index / stages)
    # Ends that rise by at least one layer each; `minimum` leaves one for every later stage.
    rising = np.maximum.accumulate(np.maximum(shares - index, 0)) + index
    return [
        np.cumsum(partition_uniform(layers, stages)),
        np.append(np.minimum(rising, layers - stages + index)[:-1], layers),
    ]


def _longest(prefix: Floats, stages: int, bound: float) -> int:
    """Return the most layers of a stage of load up to `bound`, with a margin for rounding."""
    first = np.searchsorted(prefix, prefix[1:] - bound * (1 + 1e-9))
    return min(int(np.max(np.arange(1, len(prefix)) - first)), len(prefix) - stages)


class Options(TypedDict, total=False):
    """Keyword arguments of `bottleneck`; its docstring describes them."""

    micro_batch: float | None
    bandwidth_bytes_per_s: float | None
    latency_s: float
    overlap: bool
    costs: Sequence[float] | None
    transfer: Sequence[float] | None


OPTIONS = tuple(Options.__annotations__)


@register(
    "bottleneck",
    options=OPTIONS,
    source="Penstock; the recurrence of Narayanan et al. 2019, PipeDream, section 3.1",
)
def bottleneck(profile: Profile, stages: int, **options: Unpack[Options]) -> list[int]:
    """Minimise the slowest stage or link with `minimax`.

    Costs are the layers' forward and backward seconds.

    Options:
        micro_batch: samples; None is the largest size that was measured.
        bandwidth_bytes_per_s: of the links between stages, in each direction: a micro-batch's
            output and the returning gradient do not share it. None makes transfers free.
        latency_s: of a transfer, 0 by default; only with a bandwidth.
        overlap: whether transfers overlap the stages' computation; True by default.
        costs: costs per layer that replace the measured ones, in the same unit as `transfer`.
        transfer: costs of the cut after every layer but the last, in place of those computed from
            the bandwidth.

    Raises:
        PartitionError: a number is out of range, a list has the wrong length, or two options
            contradict each other.
    """
    refuse_unknown("bottleneck", options, OPTIONS)
    overlap = options.get("overlap", True)
    if not isinstance(overlap, (bool, np.bool_)):
        raise PartitionError(f"overlap is {overlap!r}; it must be True or False")
    samples = samples_of(profile, options.get("micro_batch"))
    costs = options.get("costs")
    if costs is None:
        costs = profile.step_seconds(samples)
    layer_costs = check_costs(costs, "costs", len(profile)).tolist()
    return minimax(layer_costs, stages, transfer_of(profile, samples, options), bool(overlap))


def transfer_of(profile: Profile, samples: float, options: Options) -> Sequence[float] | None:
    """Return the cost of a cut after each layer but the last, from the link options; None is free.

    Raises:
        PartitionError: the link options contradict each other, or are out of range.
    """
    transfer, bandwidth = options.get("transfer"), options.get("bandwidth_bytes_per_s")
    latency = check_number("latency_s", options.get("latency_s", 0.0), zero=True)
    if transfer is not None and (bandwidth is not None or latency):
        raise PartitionError(
            "transfer already contains the links' costs; remove bandwidth_bytes_per_s and latency_s"
        )
    if bandwidth is None:
        if latency:
            raise PartitionError(
                f"latency_s is {latency!r}, but bandwidth_bytes_per_s is not set; "
                f"set it, since transfers are free without a bandwidth"
            )
        return transfer
    bytes_per_s = check_number("bandwidth_bytes_per_s", bandwidth)
    return [
        latency + layer.output_bytes_per_sample * samples / bytes_per_s
        for layer in profile.layers[:-1]
    ]
