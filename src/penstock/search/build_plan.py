"""Build the plan of the chosen candidate, with its prediction and the table that explains it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import numpy as np

from penstock.cluster.machines import Cluster
from penstock.plan.plan import Option, Plan
from penstock.plan.prediction import Prediction, Remedy, Traffic
from penstock.profile.profile import Phase
from penstock.schedule.recompute import Recompute
from penstock.search.instantiate import Evaluated, cached_schedule
from penstock.search.request import PlanRequest
from penstock.simulate.gradient_sync import all_reduce_seconds
from penstock.simulate.memory_curves import Changes
from penstock.simulate.overlapped_sums import hidden_sum_seconds
from penstock.simulate.simulate import simulate_schedule, tables_of
from penstock.simulate.stage_seconds import PHASE_OF_KIND, stage_seconds

#: Maximum number of rows in the plan's table of candidates.
ROWS = 12


def build_plan(
    request: PlanRequest,
    chosen: Evaluated,
    candidates: Sequence[Evaluated] = (),
    lower_bound_s: float = 0.0,
    suggestions: Sequence[Remedy] = (),
) -> Plan:
    """Return the plan that runs `chosen`.

    Args:
        request: the request.
        chosen: the candidate to run; it fits and was simulated.
        candidates: further candidates for the table, best first.
        lower_bound_s: lower bound of the step over the search space; 0 if unknown.
        suggestions: changes that would make it faster, best first.
    """
    placed = chosen.placed
    schedule, proposal = placed.schedule, placed.proposal
    others = [candidate for candidate in candidates if candidate is not chosen]
    table = [chosen, *others][:ROWS]
    devices = proposal.devices[: schedule.ranks]
    # Left out, so that plans with rank r on device r are equal however they were made.
    if devices == tuple(range(schedule.ranks)):
        devices = ()
    return Plan(
        fingerprint=request.profile.fingerprint,
        layer_names=tuple(layer.name for layer in request.profile),
        lengths=proposal.lengths,
        schedule_name=schedule.name,
        schedule_options=cast("tuple[tuple[str, Option], ...]", schedule.options),
        synchronous=schedule.synchronous,
        programs=schedule.lines,
        slicing=schedule.slicing,
        stream=schedule.stream,
        micro_batches=schedule.micro_batches,
        batch=request.batch,
        recompute=chosen.recompute,
        recomputed=() if placed.selection is None else placed.selection.recomputed,
        segment_starts=() if placed.selection is None else placed.selection.starts,
        weights=placed.rule.name,
        weights_options=request.weights_options,
        cluster=request.cluster.name,
        cluster_ranks=request.cluster.ranks * request.sharding.tensor_parallel,
        predicted=prediction(request, chosen, lower_bound_s),
        candidates=tuple(candidate.candidate for candidate in table),
        devices=devices,
        cluster_devices=cluster_devices(request.cluster),
        torch_version=request.profile.torch_version,
        objective=proposal.objective,
        remedies=tuple(suggestions),
        optimizer=request.optimizer or "",
        optimizer_states=request.profile.optimizer_states,
        optimizer_fused=request.optimizer_fused,
        tensor_parallel=request.sharding.tensor_parallel,
        sequence_parallel=request.sharding.sequence_parallel,
        zero=request.sharding.zero,
        memory_limits=tuple(placed.request.memory_bytes(rank) for rank in range(schedule.ranks)),
    )


def cluster_devices(cluster: Cluster) -> tuple[tuple[str, str], ...]:
    """Return host and kind of every device of a cluster; empty if it names no hosts."""
    if not cluster.hosts:
        return ()
    return tuple(
        (cluster.hosts[cluster.node(rank)], device.name)
        for rank, device in enumerate(cluster.devices)
    )


def prediction(request: PlanRequest, chosen: Evaluated, lower_bound_s: float) -> Prediction:
    """Return the predicted time, memory and traffic of a simulated candidate."""
    schedule, costs, steady_state = (
        chosen.placed.schedule,
        chosen.placed.costs,
        chosen.steady_state,
    )
    # The timeline of a steady state leaves out how a stream fills, and so a part of its memory.
    if steady_state is not None and schedule.stream is None:
        timeline = steady_state.timeline
    else:
        timeline = simulate_schedule(schedule, costs, recompute=chosen.recompute)
    parts = tuple(tuple(holders.items()) for holders in timeline.memory_holders or ())
    return Prediction(
        step_s=chosen.step_s,
        bubble_ratio=0.0 if steady_state is None else steady_state.bubble_ratio,
        peak_memory=chosen.memory,
        samples_per_s=request.batch / chosen.step_s if chosen.step_s else 0.0,
        one_device_s=one_device_s(request),
        data_parallel_s=data_parallel_s(request),
        lower_bound_s=min(lower_bound_s, chosen.step_s),
        memory_parts=parts,
        traffic=_traffic(chosen),
        busy_s=_busy_seconds(chosen),
        **_recompute_effect(chosen),
    )


def _busy_seconds(chosen: Evaluated) -> tuple[float, ...]:
    """Return by rank the seconds of its ops by the profile of its device; see `Prediction`."""
    placed, schedule = chosen.placed, chosen.placed.schedule
    if schedule.stream is not None or chosen.recompute is not Recompute.NEVER:
        return ()
    samples = placed.request.batch / schedule.slices
    busy: list[float] = []
    seconds_of_profile: dict[int, dict[Phase, list[float]]] = {}
    for rank, program in enumerate(schedule.programs):
        profile = placed.request.profile_of(rank)
        # Devices of one kind share a profile.
        if id(profile) not in seconds_of_profile:
            lengths = placed.proposal.lengths
            seconds_of_profile[id(profile)] = stage_seconds(profile, lengths, samples)
        seconds = seconds_of_profile[id(profile)]
        total_s = 0.0
        for op in program:
            if op.kind in PHASE_OF_KIND:
                total_s += seconds[PHASE_OF_KIND[op.kind]][op.stage]
        busy.append(total_s)
    return tuple(busy)


def _recompute_effect(chosen: Evaluated) -> dict[str, float]:
    """Return the work that recompute adds and the activation bytes that it saves, as shares of
    those without it; empty without recompute.
    """
    if chosen.recompute is Recompute.NEVER:
        return {}
    schedule, costs = chosen.placed.schedule, chosen.placed.costs
    without = tables_of(schedule, costs, Recompute.NEVER)
    with_recompute = tables_of(schedule, costs, chosen.recompute)
    base_s = float(without.seconds[0][without.op_entry].sum())
    work_s = float(with_recompute.seconds[0][with_recompute.op_entry].sum())
    base_bytes = float(Changes.of(without).saved_at_start.sum())
    saved_bytes = float(Changes.of(with_recompute).saved_at_start.sum())
    return {
        "more_work": work_s / base_s - 1 if base_s else 0.0,
        "less_kept": max(1 - saved_bytes / base_bytes, 0.0) if base_bytes else 0.0,
    }


def _traffic(chosen: Evaluated) -> tuple[Traffic, ...]:
    """Return the bytes per batch that each pair of ranks exchanges, in each direction."""
    if chosen.steady_state is None:
        return ()
    timeline, batches = chosen.steady_state.timeline, chosen.steady_state.batches
    ops, moves = timeline.log.ops, timeline.log.moves
    if moves is None:
        return ()
    crossing = np.flatnonzero(moves.link >= 0)
    from_rank = ops.rank[crossing].astype(np.int64)
    keys = from_rank * timeline.ranks + moves.to_rank[moves.link[crossing]]
    counts = np.bincount(keys, weights=moves.sizes[moves.place[crossing]]) / batches
    return tuple(
        Traffic(*divmod(int(key), timeline.ranks), round(float(counts[key])))
        for key in np.flatnonzero(counts)
    )


def one_device_s(request: PlanRequest) -> float:
    """Return the seconds of a step of plain training on the fastest device: the whole batch at
    once, and an update.
    """
    return _step_s_range(request, request.batch)[0]


def data_parallel_s(request: PlanRequest) -> float | None:
    """Return the seconds of a data-parallel step on all devices, ignoring memory: every device
    computes its share of the batch at once, then all sync their gradients and update. None if there
    is one device, or fewer samples than devices.
    """
    ranks = request.cluster.ranks
    if not 1 < ranks <= request.batch:
        return None
    busy, samples = request.busy_on(range(ranks)), request.batch / ranks
    _, slowest = _step_s_range(busy, samples)
    layers = len(request.profile)
    sum_s = all_reduce_seconds(range(ranks), request.profile.parameter_bytes, request.cluster)
    one_stage = cached_schedule("1f1b", 1, 1, ())
    # Unlike devices hide different amounts: the one that hides least counts.
    hidden_s = [
        hidden_sum_seconds(one_stage, [range(ranks)], [profile], [layers], samples, request.cluster)
        for profile in busy.different_profiles(range(ranks))
    ]
    return slowest + sum_s - min(hidden_s)[0]


def _step_s_range(request: PlanRequest, samples: float) -> tuple[float, float]:
    """Return the seconds in which the fastest and the slowest device process `samples` at once and
    update.
    """
    parameter_bytes = request.profile.parameter_bytes
    seconds = [
        sum(profile.step_seconds(samples)) + profile.update_seconds(parameter_bytes)
        for profile in request.different_profiles(range(request.cluster.ranks))
    ]
    return min(seconds), max(seconds)
