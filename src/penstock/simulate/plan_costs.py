"""Costs of every stage from a profile, a cut and a cluster."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from penstock.cluster.cluster import Cluster
from penstock.cluster.groups import group_devices
from penstock.errors import PlanError
from penstock.event import Timeline
from penstock.partition.catalogue import check_lengths
from penstock.plan.plan import Plan
from penstock.plan.sharding import Sharding
from penstock.profile.device_profiles import (
    Profiles,
    busy_profiles,
    profiles_of,
    with_optimizer,
)
from penstock.profile.profile import LayerProfile, Profile
from penstock.schedule.lower import partners_of
from penstock.schedule.op import Schedule
from penstock.schedule.recompute import Recompute
from penstock.simulate.costs import Costs
from penstock.simulate.device_costs import on_devices
from penstock.simulate.gradient_sync import all_reduce_seconds, in_buckets, sum_copies
from penstock.simulate.host_costs import with_host_work
from penstock.simulate.overlapped_sums import with_overlapped_sums
from penstock.simulate.rank_memory import StoredParameters
from penstock.simulate.selective_recompute import with_selective_recompute
from penstock.simulate.simulate import simulate_schedule
from penstock.simulate.slice_costs import slice_costs
from penstock.simulate.stage_seconds import (
    largest_part,
    micro_batch_sizes,
    parts_of,
    stage_seconds,
    update_seconds,
)
from penstock.simulate.uneven_costs import costs_by_size
from penstock.simulate.weight_versions import versions_per_stage
from penstock.simulate.zero import with_zero
from penstock.weights.catalogue import WeightRule


def stage_costs(
    profile: Profile,
    lengths: Sequence[int],
    micro_batch: float,
    cluster: Cluster,
    *,
    micro_batches: int,
    optimizer_states: float | None = None,
) -> Costs:
    """Return the costs of all stages, stage s being on rank s (for others see `place_costs`).

    Seconds are those of the mean micro-batch. Bytes in memory are those of the largest: if a batch
    is not divisible, memory has to hold the micro-batch with the additional sample. Updates are
    those of SGD with momentum, whatever the optimizer.

    Args:
        profile: costs of the layers, in order.
        lengths: layers in every stage.
        micro_batch: samples in the mean micro-batch, batch / micro_batches; may be fractional.
        cluster: its links carry what crosses.
        micro_batches: micro-batches of a batch.
        optimizer_states: optimizer state per parameter: 0 for SGD, 2 for Adam; None is that of the
            profile.

    Raises:
        PartitionError: the lengths do not fit the profile.
        PlanError: there is less than one micro-batch, or it has no samples.
    """
    stages = check_lengths(lengths, len(profile), None)
    if micro_batches < 1 or not 0 < micro_batch < math.inf:
        raise PlanError(
            f"{micro_batches} micro-batches of {micro_batch} samples: both must be above 0"
        )
    largest = largest_part(micro_batch, micro_batches)
    states = profile.optimizer_states if optimizer_states is None else optimizer_states
    seconds = stage_seconds(profile, stages, micro_batch)
    layers_of_stage = [profile.layers[part] for part in parts_of(stages)]
    output_bytes = [layers[-1].output_bytes_per_sample for layers in layers_of_stage[:-1]]
    boundaries = [profile.boundary_replicas * size for size in output_bytes]
    input_bytes = [profile.input_bytes_per_sample, *boundaries]
    return Costs(
        forward=seconds["forward"],
        backward=seconds["backward"],
        input_grad=seconds["input_grad"],
        weight_grad=seconds["weight_grad"],
        activation_bytes=[largest * _activation_bytes(layers) for layers in layers_of_stage],
        update=update_seconds(profile, stages),
        input_bytes=[largest * per_sample for per_sample in input_bytes],
        transfer=_looped_transfers([micro_batch * size for size in output_bytes], cluster),
        weight_bytes=[_weight_bytes(layers, states) for layers in layers_of_stage],
        gradient_bytes=[_parameter_bytes(layers) for layers in layers_of_stage],
        optimizer_bytes=[_parameter_bytes(layers, states) for layers in layers_of_stage],
        boundary_bytes=[micro_batch * per_sample for per_sample in output_bytes],
        # Planners choose by `peak_memory`, which excludes buffers; the prediction for a plan must
        # be the number by which it was chosen.
        boundary_buffers=False,
    )


def _looped_transfers(boundary_bytes: Sequence[float], cluster: Cluster) -> list[float]:
    """Return the seconds of every boundary with stage s on rank s modulo the ranks.

    More stages than ranks are assumed to loop, until `place_costs` sets the real placement.
    """
    seconds = []
    for stage, message_bytes in enumerate(boundary_bytes):
        sender, receiver = stage % cluster.ranks, (stage + 1) % cluster.ranks
        seconds.append(cluster.transfer_seconds(message_bytes, sender, receiver))
    return seconds


def _activation_bytes(layers: Sequence[LayerProfile]) -> float:
    """Return the bytes that a stage saves for one sample."""
    saved = sum(layer.activation_bytes_per_sample for layer in layers)
    return layers[0].entry_bytes_per_sample + saved


def _parameter_bytes(layers: Sequence[LayerProfile], multiple: float = 1) -> float:
    """Return a multiple of the bytes of a stage's parameters."""
    return sum(layer.parameter_bytes * multiple for layer in layers)


def _weight_bytes(layers: Sequence[LayerProfile], states: float) -> float:
    """Return the bytes of a stage's weights, gradients, optimizer state and buffers."""
    return sum(layer.parameter_bytes * (2 + states) + layer.buffer_bytes for layer in layers)


def place_costs(
    costs: Costs, schedule: Schedule, cluster: Cluster, rule: WeightRule | None = None
) -> Costs:
    """Return `costs` with the transfers of the schedule's placement.

    Activations moved to a partner take that link's time. The update of a stage with replicas also
    takes the all-reduce of their gradients: each replica owns a piece, receives it from every other
    one, and sends the sum to every other one; two replicas send each other all. If replicas
    synchronise once in a wave, each update takes its share of that.

    With a weight rule, stages store its versions in a stream.

    Raises:
        PlanError: the schedule has more ranks than the cluster.
    """
    if schedule.ranks > cluster.ranks:
        raise PlanError(
            f"{schedule.name} runs on {schedule.ranks} ranks, "
            f"but cluster {cluster.name} has {cluster.ranks}"
        )
    crossing = costs.spread_or_zeros("boundary_bytes", schedule.stages - 1)
    placed = replace(
        costs,
        transfer=[
            _crossing_seconds(schedule, stage, boundary_bytes, cluster)
            for stage, boundary_bytes in enumerate(crossing)
        ],
        update=_synchronised_updates(costs, schedule, cluster),
        offload=_move_seconds(costs, schedule, cluster),
        links=_medium(schedule, cluster),
    )
    return placed if rule is None else _with_trained_versions(placed, schedule, rule)


def _synchronised_updates(costs: Costs, schedule: Schedule, cluster: Cluster) -> list[float]:
    """Return the seconds of every stage's update, including the all-reduce of its gradients."""
    update = costs.spread_or_zeros("update", schedule.stages)
    gradients = costs.spread_or_zeros("gradient_bytes", schedule.stages)
    waves = None if schedule.stream is None else schedule.stream.waves
    # With waves, copies exchange weights once per wave, and every update bears its part.
    updates_per_sync = 1 if waves is None else waves.length
    return [
        seconds + all_reduce_seconds(ranks, gradient_bytes, cluster) / updates_per_sync
        for seconds, ranks, gradient_bytes in zip(
            update, schedule.ranks_of_stage, gradients, strict=True
        )
    ]


def _move_seconds(costs: Costs, schedule: Schedule, cluster: Cluster) -> list[float]:
    """Return per stage the seconds to move a micro-batch's activations to its slowest partner."""
    activations = costs.spread_or_zeros("activation_bytes", schedule.stages)
    seconds = [0.0] * schedule.stages
    for op, partner in partners_of(schedule).items():
        rank = schedule.placement[op.stage, op.micro_batch]
        move_s = cluster.transfer_seconds(activations[op.stage], rank, partner)
        seconds[op.stage] = max(seconds[op.stage], move_s)
    return seconds


def _crossing_seconds(
    schedule: Schedule, stage: int, boundary_bytes: float, cluster: Cluster
) -> float | list[float]:
    """Return the seconds of a message to the next stage; per micro-batch if these differ.

    A slice takes its share of its micro-batch's entry, so the entry is that of its slowest slice
    times their number.
    """
    pairs = schedule.boundary_ranks(stage)
    if schedule.slicing is not None:
        by_micro_batch = []
        rows = zip(schedule.slicing.first_of, schedule.slicing.shares, strict=True)
        for first, shares in rows:
            slices = len(shares)
            slice_bytes = boundary_bytes / slices
            used = set(pairs[first : first + slices])
            slowest = max(cluster.transfer_seconds(slice_bytes, *pair) for pair in used)
            by_micro_batch.append(slices * slowest)
        return by_micro_batch
    seconds = {pair: cluster.transfer_seconds(boundary_bytes, *pair) for pair in set(pairs)}
    if len(set(seconds.values())) == 1:
        return seconds[pairs[0]]
    return [seconds[pair] for pair in pairs]


def _medium(schedule: Schedule, cluster: Cluster) -> str:
    """Return "shared" if all that crosses uses one shared medium, else "duplex".

    Every node has its own internal medium. The simulator can represent sharing only if a single
    node's, or only the network between nodes, is used.
    """
    pairs: set[tuple[int, int]] = set()
    for stage in range(schedule.stages - 1):
        pairs.update(schedule.boundary_ranks(stage))
    links = {cluster.link(*pair) for pair in pairs if pair[0] != pair[1]}
    nodes = {(cluster.node(a), cluster.node(b)) for a, b in pairs if a != b}
    single_medium = len(nodes) == 1 or all(a != b for a, b in nodes)
    return "shared" if single_medium and len(links) == 1 and next(iter(links)).shared else "duplex"


def _with_trained_versions(costs: Costs, schedule: Schedule, rule: WeightRule) -> Costs:
    """Return `costs` with the versions that a rule stores in a stream.

    Versions are of trained weights, which are as large as their gradients. Buffers, such as batch
    norm's statistics, have no versions.
    """
    parts = [
        costs.spread(name, schedule.stages)
        for name in ("weight_bytes", "gradient_bytes", "optimizer_bytes")
    ]
    if schedule.stream is None or None in parts:
        return costs
    rows = zip(versions_per_stage(schedule, rule), *(part or () for part in parts), strict=True)
    # `Costs` multiplies all weights, buffers included, by the versions: scale the number down.
    versions = [
        1 + (count - 1) * trained / (total - trained - state) if trained else 1.0
        for count, total, trained, state in rows
    ]
    return replace(costs, weight_versions=versions)


def simulate_plan(plan: Plan, profiles: Profiles, cluster: Cluster) -> Timeline:
    """Compute when every op and transfer of one step of `plan` on `cluster` starts and ends.

    For an asynchronous plan that is its whole stretch of the stream, including filling and
    draining; `steady` returns the time of a batch in between.

    Raises:
        PlanError: the profile is of a different model, or the cluster has fewer ranks than the
            plan.
    """
    return simulate_schedule(
        plan.schedule, costs_of_plan(plan, profiles, cluster), recompute=plan.recompute
    )


def costs_of_plan(plan: Plan, profiles: Profiles, cluster: Cluster) -> Costs:
    """Return the costs of every op of `plan` on `cluster`; `profiles` as for `profiles_of`.

    Raises:
        PlanError: the profile is of a different model, or the cluster has fewer ranks than the
            plan.
    """
    if plan.tensor_parallel > 1:
        profiles = width_profile(profiles, plan.sharding)
        cluster = group_devices(cluster, plan.tensor_parallel)
    rank_profiles = with_optimizer(
        profiles_of(profiles, cluster), plan.optimizer, plan.optimizer_states, plan.optimizer_fused
    )
    if rank_profiles[0].fingerprint != plan.fingerprint:
        raise PlanError(
            f"the plan is for a chain with fingerprint {plan.fingerprint}, the profile is of "
            f"{rank_profiles[0].fingerprint}: profile that model, or make a new plan"
        )
    devices = plan.devices or tuple(range(plan.ranks))
    if plan.ranks > cluster.ranks:
        raise PlanError(
            f"{plan.schedule_name} runs on {plan.ranks} ranks, "
            f"but cluster {cluster.name} has {cluster.ranks}"
        )
    if max(devices) >= cluster.ranks:
        raise PlanError(
            f"the plan uses device {max(devices)} of its cluster, but {cluster.name} has devices "
            f"0 to {cluster.ranks - 1}: make a new plan"
        )
    plan_profiles = busy_profiles([rank_profiles[rank] for rank in devices], cluster, devices)
    plan_cluster, micro_batch = cluster.on(devices), plan.batch / plan.micro_batches
    costs = schedule_costs(
        plan.schedule, plan_profiles, plan.lengths, plan_cluster, plan.batch, plan.rule
    )
    if plan.zero:
        costs = with_plan_zero(
            costs, plan.schedule, plan_profiles[0], plan.lengths, plan_cluster, plan.zero
        )
    else:
        costs = with_overlapped_sums(
            costs, plan.schedule, plan_profiles, plan.lengths, micro_batch, plan_cluster
        )
    if plan.recompute is not Recompute.SELECTIVE:
        return costs
    return with_selective_recompute(
        costs,
        plan.schedule,
        plan_profiles,
        plan.lengths,
        micro_batch_sizes(plan.batch, plan.schedule),
        plan.selection,
    )


def width_profile(profiles: Profiles, sharding: Sharding) -> Profile:
    """Return the profile of one device of a tensor-parallel group.

    Raises:
        PlanError: there are several profiles, or none of that width.
    """
    if not isinstance(profiles, Profile):
        raise PlanError("tensor parallelism is planned for one kind of device: give one profile")
    layout = sharding.tensor_parallel, sharding.sequence_parallel
    for profile in (profiles, *profiles.widths):
        if (profile.tensor_parallel, profile.sequence_parallel) == layout:
            return profile
    widths = sorted({profile.tensor_parallel for profile in (profiles, *profiles.widths)})
    raise PlanError(
        f"the profile has no costs for {sharding.words or 'single devices'}, only for layers on "
        f"{', '.join(map(str, widths))} devices: make it with transformer_profile(widths=…)"
    )


def with_plan_zero(
    costs: Costs,
    schedule: Schedule,
    profile: Profile,
    lengths: Sequence[int],
    cluster: Cluster,
    zero: int,
) -> Costs:
    """Return the costs of a schedule, which include the all-reduce at U, at a level of ZeRO.

    Raises:
        PlanError: the schedule is asynchronous.
    """
    if schedule.stream is not None:
        raise PlanError(f"zero is for synchronous schedules, and {schedule.name} is asynchronous")
    holders = schedule.ranks_of_stage
    copies = sum_copies(schedule, cluster)
    local = _without_gradient_sums(costs, schedule, cluster, copies)
    stored = StoredParameters(profile, lengths, holders, zero)
    shared = with_zero(local, holders, cluster, lengths, zero, stored.largest_shares())
    # Level 1 runs here, without buckets; the others are of devices that sum without further copies.
    further = [
        0 if zero > 1 or in_buckets(ranks, cluster) else count
        for ranks, count in zip(holders, copies, strict=True)
    ]
    return stored.add_to(_with_gradient_copies(shared, schedule, further))


def _without_gradient_sums(
    costs: Costs, schedule: Schedule, cluster: Cluster, copies: Sequence[int]
) -> Costs:
    """Return `costs` without the seconds of gradient sums, and without the bytes of their copies.

    `copies` is, per stage, how many copies of its gradients the sum stores.
    """
    # The costs count the gradients 1 + count times, of which one is left.
    costs = _with_gradient_copies(costs, schedule, [1 / (1 + count) - 1 for count in copies])
    updates = costs.spread_or_zeros("update", schedule.stages)
    gradients = costs.spread_or_zeros("gradient_bytes", schedule.stages)
    update_alone = [
        # The size may be rounded.
        max(0.0, seconds - all_reduce_seconds(ranks, size, cluster))
        for seconds, ranks, size in zip(updates, schedule.ranks_of_stage, gradients, strict=True)
    ]
    return replace(costs, update=update_alone)


def schedule_costs(
    schedule: Schedule,
    profiles: Sequence[Profile],
    lengths: Sequence[int],
    cluster: Cluster,
    batch: float | Sequence[float],
    rule: WeightRule,
) -> Costs:
    """Return the costs of every op of a schedule.

    Args:
        schedule: with one stage per entry of `lengths`.
        profiles: per rank; equal ranks share one object.
        lengths: layers in every stage.
        cluster: rank r of the schedule is its rank r.
        batch: samples in a batch, or in each of its micro-batches, the largest first.
        rule: defines the stored versions of the weights.
    """
    sizes = batch if isinstance(batch, Sequence) else micro_batch_sizes(batch, schedule)

    def of_size(micro_batch: float) -> Costs:
        """Return the costs if all micro-batches have this many samples."""
        costs = stage_costs(
            profiles[0], lengths, micro_batch, cluster, micro_batches=schedule.micro_batches
        )
        # The order matters: host work is added to the seconds that the steps before replace.
        costs = on_devices(costs, schedule, profiles, lengths, micro_batch)
        costs = place_costs(costs, schedule, cluster, rule)
        costs = slice_costs(costs, schedule, profiles, lengths, micro_batch)
        return with_host_work(costs, schedule, profiles, cluster)

    costs = costs_by_size(of_size, sizes)
    costs = _with_gradient_copies(costs, schedule, sum_copies(schedule, cluster))
    if schedule.stream is not None:
        return costs
    return StoredParameters(profiles[0], lengths, schedule.ranks_of_stage).add_to(costs)


def _with_gradient_copies(costs: Costs, schedule: Schedule, copies: Sequence[float]) -> Costs:
    """Return `costs` with more copies of the gradients of every stage, or fewer if negative."""
    total = costs.spread("weight_bytes", schedule.stages)
    gradients = costs.spread("gradient_bytes", schedule.stages)
    if total is None or gradients is None or not any(copies):
        return costs
    further = [count * size for count, size in zip(copies, gradients, strict=True)]
    return replace(
        costs,
        weight_bytes=[size + more for size, more in zip(total, further, strict=True)],
        gradient_bytes=[size + more for size, more in zip(gradients, further, strict=True)],
    )
