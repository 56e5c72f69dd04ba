"""Costs of ZeRO: replicas of a stage that share its state.

Source: Rajbhandari et al. 2020, "ZeRO: memory optimizations toward training trillion parameter
models" (arXiv 1910.02054). With d replicas of a stage, and A the seconds of the all-reduce of its
gradients, of which a reduce-scatter or an all-gather takes half:

    level | a replica stores 1/d of           | messages
    0     | nothing                           | A at the update
    1     | optimizer state                   | A at the update
    2     | and gradients                     | A/2 per backward of a micro-batch, A/2 at the update
    3     | and parameters                    | A/2 per forward, A per backward

Messages of levels 2 and 3 overlap with the computation of the op but for those of its first layer.
The update of a replica is that of its share. At level 1 that is of whole parameters, as the runtime
divides them, and the stage waits for the replica with the largest share.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from penstock.cluster.cluster import Cluster
from penstock.plan.sharding import check_zero
from penstock.simulate.costs import Costs
from penstock.simulate.gradient_sync import all_reduce_seconds


def with_zero(
    costs: Costs,
    replicas: Sequence[Sequence[int]],
    cluster: Cluster,
    lengths: Sequence[int],
    zero: int,
    largest_shares: Sequence[float] | None = None,
) -> Costs:
    """Return `costs` with the all-reduce of gradients among replicas, at a level of ZeRO.

    Args:
        costs: of stages without the all-reduce; of whole micro-batches.
        replicas: per stage, the ranks of `cluster` that hold it.
        cluster: of these ranks.
        lengths: layers in every stage.
        zero: level, 0 to 3.
        largest_shares: per stage, the part of the optimizer state that is on one replica, of those
            with the most; by default all have equal parts.

    Raises:
        PlanError: there is no such level.
    """
    check_zero(zero)
    stages = len(lengths)
    gradients = costs.spread_or_zeros("gradient_bytes", stages)
    sync_s = [
        all_reduce_seconds(ranks, size, cluster)
        for ranks, size in zip(replicas, gradients, strict=True)
    ]
    update = costs.spread_or_zeros("update", stages)
    counts = [len(ranks) if zero else 1 for ranks in replicas]
    shares = [1 / count for count in counts] if largest_shares is None else largest_shares
    # By level, the part of the all-reduce that is left at the update; see the table above.
    at_update = (1.0, 1.0, 0.5, 0.0)[zero]
    shared = replace(
        costs,
        update=[
            seconds * share + at_update * sync
            for seconds, share, sync in zip(update, shares, sync_s, strict=True)
        ],
    )
    shared = _with_shared_memory(shared, counts, shares, lengths, zero)
    if zero < 2:
        return shared
    # Gradients are reduced with W. At level 3 parameters are gathered for F, and again for I or B.
    per_backward = 0.5 if zero == 2 else 1.0
    return replace(
        shared,
        forward=_overlapped(costs, "forward", sync_s, lengths, 0.5 if zero == 3 else 0.0),
        backward=_overlapped(costs, "backward", sync_s, lengths, per_backward),
        input_grad=_overlapped(costs, "input_grad", sync_s, lengths, per_backward - 0.5),
        weight_grad=_overlapped(costs, "weight_grad", sync_s, lengths, 0.5),
    )


def _with_shared_memory(
    costs: Costs,
    counts: Sequence[int],
    shares: Sequence[float],
    lengths: Sequence[int],
    zero: int,
) -> Costs:
    """Return `costs` with the bytes that a replica stores.

    What is gathered or not yet reduced are up to two layers: the current one and the next.
    """
    stages = len(counts)
    if zero == 0 or costs.weight_bytes is None:
        return costs
    total = costs.spread("weight_bytes", stages) or ()
    gradients = costs.spread_or_zeros("gradient_bytes", stages)
    states = costs.spread_or_zeros("optimizer_bytes", stages)
    rows = zip(total, gradients, states, counts, shares, lengths, strict=True)
    weight_bytes, gradient_bytes, optimizer_bytes = [], [], []
    for whole, gradient, state, count, share, length in rows:
        weights = whole - gradient - state
        in_use = min(1.0, 2 / length) if count > 1 else 0.0
        state_share = state * share
        gradient_share, weight_share = gradient, weights
        if zero >= 2:
            gradient_share = gradient * min(1.0, 1 / count + in_use)
        if zero == 3:
            weight_share = weights * min(1.0, 1 / count + in_use)
        weight_bytes.append(weight_share + gradient_share + state_share)
        gradient_bytes.append(gradient_share)
        optimizer_bytes.append(state_share)
    return replace(
        costs,
        weight_bytes=weight_bytes,
        gradient_bytes=gradient_bytes,
        optimizer_bytes=optimizer_bytes,
    )


def _overlapped(
    costs: Costs, name: str, sync_s: Sequence[float], lengths: Sequence[int], share: float
) -> list[float | list[float]]:
    """Return the seconds of one phase per stage, with its messages beside its computation; per
    micro-batch where their sizes differ.
    """
    seconds = getattr(costs, name)
    if not isinstance(seconds, tuple):
        seconds = costs.spread_or_zeros(name, len(lengths))
    rows: list[float | list[float]] = []
    for compute_s, sync, length in zip(seconds, sync_s, lengths, strict=True):
        messages_s = share * sync
        exposed_s = messages_s / length
        if isinstance(compute_s, tuple):
            rows.append([max(s, messages_s - exposed_s) + exposed_s for s in compute_s])
        else:
            rows.append(max(compute_s, messages_s - exposed_s) + exposed_s)
    return rows
