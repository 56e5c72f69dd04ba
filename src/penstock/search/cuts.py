"""Where a model is cut into stages: exactly, for the devices and links that the stages are on."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Literal

import numpy as np

from penstock.cluster.device import Link
from penstock.partition.catalogue import partition
from penstock.partition.folded import folded
from penstock.partition.limited import limited
from penstock.partition.looped import looped
from penstock.search.request import PlanRequest
from penstock.simulate.plan_costs import stage_costs

#: Relative slowdown of a rank that is accepted where it makes the largest of its stages smaller.
SLACK = 0.02

#: What a cut balances:
#:
#: - "time": minimize the slowest stage or link;
#: - "ranks": minimize the slowest rank, where ranks have several stages;
#: - "limits": minimize the slowest stage within the memory of every rank;
#: - "memory": minimize the bytes of the stage that holds most.
Balance = Literal["time", "ranks", "limits", "memory"]


def cut(
    request: PlanRequest,
    places: Sequence[int],
    micro_batches: int,
    balance: Balance,
    in_flight: Sequence[float] = (),
) -> tuple[int, ...] | None:
    """Return the lengths of the stages, or None if no cut fits.

    Args:
        request: for the devices of one pipeline. A partition method that it names is used instead
            of `balance`.
        places: per stage, its rank.
        micro_batches: number of micro-batches in a batch.
        balance: what to balance.
        in_flight: per stage, micro-batches that it holds at once; needed for "limits".
    """
    micro_batch = request.batch / micro_batches
    if request.by != "bottleneck":
        # Of the other methods only "time" needs the micro-batch size, at which costs are taken.
        sized = {"micro_batch": micro_batch} if request.by == "time" else {}
        return tuple(partition(request.profile, len(places), by=request.by, **sized))
    if balance == "memory":
        return _balance_memory(request, len(places), micro_batches)
    if balance == "ranks":
        return _balance_ranks(request, places, micro_batch)
    link = _common_link(request, places)
    if balance == "time" and link is not None:
        lengths = partition(
            request.profile_of(places[0]),
            len(places),
            by="bottleneck",
            micro_batch=micro_batch,
            latency_s=link.latency_s,
            bandwidth_bytes_per_s=link.bandwidth_bytes_per_s,
        )
        return tuple(lengths)
    return _balance_stages(request, places, micro_batches, in_flight, within=balance == "limits")


def _common_link(request: PlanRequest, places: Sequence[int]) -> Link | None:
    """Return the link between all consecutive stages if it is the same for all and so are the
    devices; else None.
    """
    links = {request.cluster.link(a, b) if a != b else None for a, b in pairwise(places)}
    if len(request.different_profiles(places)) > 1 or len(links) > 1:
        return None
    return next(iter(links), request.cluster.inside)


def _balance_memory(request: PlanRequest, stages: int, micro_batches: int) -> tuple[int, ...]:
    """Return the cut whose largest stage, in bytes held, is smallest."""
    weights, activations = layer_bytes(request, micro_batches)
    # The most that a stage has under 1F1B, namely stage 0: this cut is tried where memory is short.
    in_flight = min(stages, micro_batches)
    costs = [w + in_flight * a for w, a in zip(weights, activations, strict=True)]
    return tuple(partition(request.profile, stages, by="bottleneck", costs=costs))


def _balance_stages(
    request: PlanRequest,
    places: Sequence[int],
    micro_batches: int,
    in_flight: Sequence[float],
    *,
    within: bool,
) -> tuple[int, ...] | None:
    """Return the cut whose slowest stage or link is fastest, on different devices and links; None
    if no cut fits. `within` says to respect the memory of every rank.
    """
    cluster, stages, layers = request.cluster, len(places), len(request.profile)
    micro_batch = request.batch / micro_batches
    rows = {
        id(profile): profile.step_seconds(micro_batch)
        for profile in request.different_profiles(places)
    }
    seconds = np.array([rows[id(request.profile_of(rank))] for rank in places])
    sizes = micro_batch * np.array(
        [layer.output_bytes_per_sample for layer in request.profile.layers[:-1]]
    )
    transfer = np.zeros((stages - 1, len(sizes)))
    for boundary, (rank, next_rank) in enumerate(pairwise(places)):
        transfer[boundary] = [cluster.transfer_seconds(size, rank, next_rank) for size in sizes]
    weights, activations = [0.0] * layers, [0.0] * layers
    if within:
        weights, activations = layer_bytes(request, micro_batches)
    limits = [float(request.memory_bytes(rank)) for rank in places]
    lengths = limited(
        seconds,
        transfer,
        np.array(weights),
        np.array(activations),
        in_flight or (1.0,) * stages,
        limits,
    )
    return None if lengths is None else tuple(lengths)


def _balance_ranks(
    request: PlanRequest, places: Sequence[int], micro_batch: float
) -> tuple[int, ...] | None:
    """Return the cut whose busiest rank is fastest, for a looped or a V placement; None for other
    placements.
    """
    ranks, stages = max(places) + 1, len(places)
    seconds = [request.profile_of(rank).step_seconds(micro_batch) for rank in range(ranks)]
    # Stands for all boundaries: it crosses nodes if any of them does.
    link = request.cluster.link(0, ranks - 1)
    transfer = [
        link.transfer_seconds(micro_batch * layer.output_bytes_per_sample)
        for layer in request.profile.layers[:-1]
    ]
    is_vee = list(places) == [*range(ranks), *range(ranks - 1, -1, -1)]
    is_loop = list(places) == [stage % ranks for stage in range(stages)] and stages % ranks == 0
    lengths = None
    if is_vee:
        lengths = folded(seconds, ranks, transfer=transfer, slack=SLACK)
    elif is_loop and 1 < ranks < stages:
        lengths = looped(seconds, ranks, stages // ranks, transfer=transfer, slack=SLACK)
    return None if lengths is None else tuple(lengths)


def layer_bytes(request: PlanRequest, micro_batches: int) -> tuple[list[float], list[float]]:
    """Return per layer the bytes that it always holds, and those per micro-batch in flight."""
    layers = len(request.profile)
    single_layers = stage_costs(
        request.profile,
        [1] * layers,
        request.batch / micro_batches,
        request.cluster,
        micro_batches=micro_batches,
    )
    weights = single_layers.spread("weight_bytes", layers) or ()
    activations = single_layers.spread("activation_bytes", layers) or ()
    return list(weights), list(activations)
