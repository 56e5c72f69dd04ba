"""Piper's planner: stages, devices for each and recomputation, so that the slowest stage's time per
sample is least.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from penstock.errors import PlanError
from penstock.partition.replicated import replicated_table
from penstock.plan.plan import Plan, Recompute
from penstock.search.catalogue import register
from penstock.search.planners.layer_costs import LayerCosts, Numbers
from penstock.search.planners.scope import check_alike, check_scope, quickest
from penstock.search.planners.shared_stages import (
    Ranges,
    check_size,
    least_memory,
    likely_counts,
    packed,
    slowest_bandwidth,
)
from penstock.search.proposal import Objective, Proposal
from penstock.search.request import PlanRequest
from penstock.search.score import best_of

#: Entries of the tables, layers^2 x devices: of one, and of all that are searched together.
MOST_ENTRIES, ENTRIES_IN_ALL = 5e6, 1.2e7


@register(
    "piper", source="Tarnawski et al. 2021, Piper, section 4; github.com/msr-fiddle/piper, algo.cpp"
)
def piper(request: PlanRequest) -> Plan:
    """The stages with the least TPS (time per sample) of the slowest, each on as many devices as it
    likes, if it fits the memory there.

    Piper's sample is a micro-batch here, and there is no tensor parallelism, so a stage's layers a
    .. b - 1 on d devices take

        TPS = (compute + (2 (bytes in + bytes out) + 4 (d - 1) weights / N) / bandwidth) / d

    for N micro-batches, of which d is a divisor; 2 for activations and their gradients, 4 for
    summing gradients around a ring and back. The bandwidth is that of the slowest link. With s
    stages from this one to the last, ceil(s / d) micro-batches are in flight on each device. With
    recomputation the forward counts twice, and what is kept is the stage's input; it is one choice
    for the whole plan here, for the runtime has no other. All numbers of micro-batches are
    searched, with recomputation and without, and the best few are simulated under "1f1b".

    Raises:
        PlanError: another cut or schedule is asked for, devices are of several kinds, the search is
        too large, or nothing fits.
    """
    check_scope(request, "piper", "1f1b")
    check_alike(request, "piper")
    entries = (len(request.profile) + 1) ** 2 * request.cluster.ranks
    check_size("piper", entries, MOST_ENTRIES, "layers^2 x devices")
    found = sorted(_proposals(request, entries), key=lambda each: each[0])
    if not found:
        raise PlanError(
            f"piper finds no way to put {len(request.profile)} layers on the devices of {request.cluster.name}: no stages "
            f"fit memory of {least_memory(request)} bytes with these numbers of micro-batches"
        )
    return best_of(request, quickest([proposal for _, proposal in found]))


def _proposals(request: PlanRequest, entries: float) -> Iterator[tuple[float, Proposal]]:
    """One for each number of micro-batches and recomputation, with a guess of a step's seconds."""
    tried: tuple[Recompute, ...] = ("never", "always")
    if request.recompute != "auto":
        tried = (request.recompute,)
    for count in likely_counts(request, entries * len(tried), ENTRIES_IN_ALL):
        costs = LayerCosts.of(request.profile, request.batch / count)
        for recompute in tried:
            table, most_stages = tables(request, costs, count, recompute=recompute != "never")
            found = replicated_table(
                table, exactly=False, stages=request.stages, most_stages=most_stages
            )
            if found is None:
                continue
            lengths, copies = (tuple(numbers) for numbers in zip(*found, strict=True))
            ends = np.cumsum(lengths)
            slowest = max(
                float(table[end - n, end, d])
                for end, n, d in zip(ends, lengths, copies, strict=True)
            )
            yield (
                count * slowest + sum(costs.seconds),
                Proposal(
                    lengths,
                    "1f1b",
                    count,
                    () if set(copies) == {1} else (("replicas", copies),),
                    recompute=recompute,
                    devices=packed(request.cluster, copies),
                    objective=Objective("slowest stage's time per micro-batch", slowest, "s"),
                ),
            )


def tables(
    request: PlanRequest, costs: LayerCosts, count: int, *, recompute: bool
) -> tuple[Numbers, NDArray[np.int64]]:
    """TPS of every stage on 1, 2, … devices, and how many stages it and those after it may be, for
    its memory to suffice.

    Returns:
        Two arrays of shape (layers + 1, layers + 1, devices + 1), as `replicated_table` takes them.
    """
    ranges, bandwidth = Ranges(costs), slowest_bandwidth(request.cluster)
    layers, ranks = len(costs), request.cluster.ranks
    work = ranges.seconds + ranges.forward_s if recompute else ranges.seconds
    crossing = 2 * (ranges.input_bytes[:, None] + ranges.input_bytes[None, :])
    first = np.array(
        [request.batch / count * request.profile.input_bytes_per_sample, *costs.output_bytes]
    )
    kept = np.broadcast_to(first[:, None], work.shape) if recompute else ranges.activation_bytes
    # What is recomputed is whole for one micro-batch at a time.
    working = ranges.activation_bytes if recompute else np.zeros_like(work)
    room = (
        least_memory(request) - request.held_per_parameter_byte * ranges.parameter_bytes - working
    )
    in_flight = np.floor(
        np.where(
            kept > 0, room / np.where(kept > 0, kept, 1.0), np.where(room >= 0, math.inf, -1.0)
        )
    )
    table: Numbers = np.full((layers + 1, layers + 1, ranks + 1), np.inf)
    most_stages: NDArray[np.int64] = np.zeros(table.shape, np.int64)
    for copies in range(1, min(ranks, request.copies_allowed, count) + 1):
        if count % copies:
            continue
        synced = 4 * (copies - 1) * ranges.parameter_bytes / count
        table[:, :, copies] = (work + (crossing + synced) / bandwidth) / copies
        most_stages[:, :, copies] = np.clip(copies * in_flight, 0, layers)
    table[np.tril_indices(layers + 1)] = np.inf
    return table, most_stages
