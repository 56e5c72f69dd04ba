"""The plan of what was chosen, with all that is told of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import numpy as np

from penstock.plan.plan import Option, Plan, Prediction, Remedy, Traffic
from penstock.search.laid import Scored
from penstock.search.request import PlanRequest
from penstock.simulate.memory import Changes
from penstock.simulate.plan_costs import meeting_seconds
from penstock.simulate.simulate import simulate_schedule, tables_of

#: Rows of the table that explains the plan.
ROWS = 12


def plan_of(
    request: PlanRequest,
    chosen: Scored,
    weighed: Sequence[Scored] = (),
    lower_bound_s: float = 0.0,
    remedies: Sequence[Remedy] = (),
) -> Plan:
    """The plan that runs `chosen`.

    Args:
        request: what was asked.
        chosen: fits, and was simulated.
        weighed: what to tell besides, best first.
        lower_bound_s: no way that could have been chosen is faster; 0 if nobody knows.
        remedies: what would help, best first.
    """
    laid = chosen.laid
    made, proposal = laid.made, laid.proposal
    told = [chosen, *(each for each in weighed if each is not chosen)][:ROWS]
    return Plan(
        fingerprint=request.profile.fingerprint,
        layer_names=tuple(layer.name for layer in request.profile),
        lengths=proposal.lengths,
        schedule_name=made.name,
        schedule_options=cast("tuple[tuple[str, Option], ...]", made.options),
        synchronous=made.synchronous,
        programs=made.lines,
        slicing=made.slicing,
        stream=made.stream,
        micro_batches=made.micro_batches,
        batch=request.batch,
        recompute=chosen.recompute,
        recomputed=() if laid.selection is None else laid.selection.recomputed,
        segment_starts=() if laid.selection is None else laid.selection.starts,
        weights=laid.rule.name,
        weights_options=request.weights_options,
        cluster=request.cluster.name,
        cluster_ranks=request.cluster.ranks,
        predicted=prediction(request, chosen, lower_bound_s),
        candidates=tuple(each.candidate for each in told),
        devices=()
        if proposal.devices[: made.ranks] == tuple(range(made.ranks))
        else proposal.devices[: made.ranks],
        torch_version=request.profile.torch_version,
        objective=proposal.objective,
        remedies=tuple(remedies),
        optimizer=request.optimizer or "",
        optimizer_states=request.profile.optimizer_states,
        memory_limits=tuple(laid.request.memory_bytes(rank) for rank in range(made.ranks)),
    )


def prediction(request: PlanRequest, chosen: Scored, lower_bound_s: float) -> Prediction:
    """What is expected of a way that was simulated."""
    made, costs, found = chosen.laid.made, chosen.laid.costs, chosen.found
    timeline = (
        found.timeline
        if found is not None and made.stream is None
        else simulate_schedule(made, costs, recompute=chosen.recompute)
    )
    parts = tuple(tuple(holders.items()) for holders in timeline.memory_holders or ())
    return Prediction(
        step_s=chosen.step_s,
        bubble_ratio=found.bubble_ratio if found is not None else 0.0,
        peak_memory=chosen.memory,
        samples_per_s=request.batch / chosen.step_s if chosen.step_s else 0.0,
        one_device_s=one_device_s(request),
        data_parallel_s=data_parallel_s(request),
        lower_bound_s=min(lower_bound_s, chosen.step_s),
        memory_parts=parts,
        traffic=_traffic(chosen),
        **_of_recompute(chosen),
    )


def _of_recompute(chosen: Scored) -> dict[str, float]:
    """How much more work there is than without, and how much less is kept, as shares."""
    if chosen.recompute == "never":
        return {}
    made, costs = chosen.laid.made, chosen.laid.costs
    plain, own = (tables_of(made, costs, recompute) for recompute in ("never", chosen.recompute))
    work, more = (float(each.seconds[0][each.op_entry].sum()) for each in (plain, own))
    kept, less = (float(Changes.of(each).kept_at_start.sum()) for each in (plain, own))
    return {
        "more_work": more / work - 1 if work else 0.0,
        "less_kept": max(1 - less / kept, 0.0) if kept else 0.0,
    }


def _traffic(chosen: Scored) -> tuple[Traffic, ...]:
    if chosen.found is None:
        return ()
    timeline, batches = chosen.found.timeline, chosen.found.batches
    ops, moves = timeline.log.ops, timeline.log.moves
    if moves is None:
        return ()
    crossing = np.flatnonzero(moves.link >= 0)
    keys = (
        ops.rank[crossing].astype(np.int64) * timeline.ranks + moves.to_rank[moves.link[crossing]]
    )
    counts = np.bincount(keys, weights=moves.sizes[moves.place[crossing]]) / batches
    return tuple(
        Traffic(*divmod(int(key), timeline.ranks), round(float(counts[key])))
        for key in np.flatnonzero(counts)
    )


def one_device_s(request: PlanRequest) -> float:
    """A step of plain training on the fastest device: the whole batch at once, and an update."""
    profiles = {id(each): each for each in map(request.profile_of, range(request.cluster.ranks))}
    parameter_bytes = sum(layer.parameter_bytes for layer in request.profile)
    return min(
        sum(each.step_seconds(request.batch)) + parameter_bytes * each.update_s_per_byte
        for each in profiles.values()
    )


def data_parallel_s(request: PlanRequest) -> float | None:
    """A step of data parallelism on all devices, as if they had the memory: each computes its share
    of the batch at once, then all add up their gradients and update.
    """
    ranks = request.cluster.ranks
    if not 1 < ranks <= request.batch:
        return None
    profiles = {id(each): each for each in map(request.profile_of, range(ranks))}
    parameter_bytes = sum(layer.parameter_bytes for layer in request.profile)
    own = max(
        sum(each.step_seconds(request.batch / ranks)) + parameter_bytes * each.update_s_per_byte
        for each in profiles.values()
    )
    return own + meeting_seconds(range(ranks), parameter_bytes, request.cluster)
