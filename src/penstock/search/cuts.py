"""Where a way is cut: exactly, for the devices and links it stands on."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Literal

import numpy as np

from penstock.partition.catalogue import partition
from penstock.partition.folded import folded
from penstock.partition.limited import limited
from penstock.partition.looped import looped
from penstock.search.request import PlanRequest
from penstock.simulate.plan_costs import stage_costs

#: Ranks may be this much slower than they could, relatively, where that makes the largest of their
#: stages smaller.
SLACK = 0.02

#: What a cut evens out: the slowest stage or link; the slowest rank, where ranks have several
#: stages; the slowest stage within the
#: memory of every rank; or the stage that holds most.
Balance = Literal["time", "ranks", "limits", "memory"]


def cut(
    request: PlanRequest,
    places: Sequence[int],
    micro_batches: int,
    balance: Balance,
    in_flight: Sequence[float] = (),
) -> tuple[int, ...] | None:
    """The lengths of the stages; None if nothing fits.

    Args:
        request: about the devices of one pipeline.
        places: per stage, the rank it stands on.
        micro_batches: parts of a batch.
        balance: what to even out; a partition method that the request names does as it will.
        in_flight: per stage, micro-batches that it holds at once; needed for "limits".
    """
    profile, cluster, stages = request.profile, request.cluster, len(places)
    micro_batch = request.batch / micro_batches
    if request.by != "bottleneck":
        # "time" is the one method besides that asks for the size at which costs count.
        sized = {"micro_batch": micro_batch} if request.by == "time" else {}
        return tuple(partition(profile, stages, by=request.by, **sized))
    if balance == "memory":
        weights, kept = _bytes(request, micro_batches)
        held = min(stages, micro_batches)
        return tuple(
            partition(
                profile,
                stages,
                by="bottleneck",
                costs=[w + held * k for w, k in zip(weights, kept, strict=True)],
            )
        )
    alike = len({id(request.profile_of(rank)) for rank in places}) == 1
    if balance == "ranks":
        return _of_ranks(request, places, micro_batch)
    links = {cluster.link(a, b) if a != b else None for a, b in pairwise(places)}
    link = next(iter(links), cluster.inside)
    if balance == "time" and alike and len(links) <= 1 and link is not None:
        return tuple(
            partition(
                profile,
                stages,
                by="bottleneck",
                micro_batch=micro_batch,
                latency_s=link.latency_s,
                bandwidth_bytes_per_s=link.bandwidth_bytes_per_s,
            )
        )
    unlike = {id(each): each for each in map(request.profile_of, places)}
    rows = {key: each.step_seconds(micro_batch) for key, each in unlike.items()}
    seconds = np.array([rows[id(request.profile_of(rank))] for rank in places])
    sizes = micro_batch * np.array([layer.output_bytes_per_sample for layer in profile.layers[:-1]])
    transfer = np.array(
        [[cluster.transfer_seconds(size, a, b) for size in sizes] for a, b in pairwise(places)]
    )
    transfer = transfer.reshape(stages - 1, len(sizes))
    weights, kept = (
        _bytes(request, micro_batches)
        if balance == "limits"
        else ([0.0] * len(profile), [0.0] * len(profile))
    )
    limits = [float(request.memory_bytes(rank)) for rank in places]
    found = limited(
        seconds, transfer, np.array(weights), np.array(kept), in_flight or (1.0,) * stages, limits
    )
    return None if found is None else tuple(found)


def _of_ranks(
    request: PlanRequest, places: Sequence[int], micro_batch: float
) -> tuple[int, ...] | None:
    """The cut of a loop or a V whose busiest rank is least; None for other placements."""
    ranks, stages = max(places) + 1, len(places)
    seconds = [request.profile_of(rank).step_seconds(micro_batch) for rank in range(ranks)]
    link = request.cluster.link(0, ranks - 1)
    transfer = [
        link.transfer_seconds(micro_batch * layer.output_bytes_per_sample)
        for layer in request.profile.layers[:-1]
    ]
    if list(places) == [*range(ranks), *range(ranks - 1, -1, -1)]:
        found = folded(seconds, ranks, transfer=transfer, slack=SLACK)
    elif (
        ranks > 1
        and list(places) == [stage % ranks for stage in range(stages)]
        and stages % ranks == 0
        and stages > ranks
    ):
        found = looped(seconds, ranks, stages // ranks, transfer=transfer, slack=SLACK)
    else:
        found = None
    return None if found is None else tuple(found)


def _bytes(request: PlanRequest, micro_batches: int) -> tuple[list[float], list[float]]:
    """Per layer, what it holds always, and for each micro-batch in flight."""
    layers = len(request.profile)
    single = stage_costs(
        request.profile,
        [1] * layers,
        request.batch / micro_batches,
        request.cluster,
        micro_batches=micro_batches,
    )
    held, kept = (
        single.spread(name, layers) or () for name in ("weight_bytes", "activation_bytes")
    )
    return list(held), list(kept)
