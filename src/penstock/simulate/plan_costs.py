"""From a profile, a cut and a cluster to the costs of every stage."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from penstock.cluster.cluster import Cluster
from penstock.errors import PlanError
from penstock.event import Timeline
from penstock.partition.catalogue import check_lengths
from penstock.plan import Plan
from penstock.profile.profile import Phase, Profile
from penstock.schedule.op import Schedule
from penstock.simulate.costs import Costs
from penstock.simulate.simulate import simulate_schedule


def stage_costs(profile: Profile, lengths: Sequence[int], micro_batch: float, cluster: Cluster, *, micro_batches: int,
                optimizer_states: int = 1) -> Costs:  # fmt: skip
    """What every op of every stage costs, stage s standing on rank s (`place_costs` when it stands elsewhere).

    Seconds are those of the mean micro-batch. Bytes that are held are those of the largest: of a batch cut into nearly equal
    parts, memory has to hold the one that got the odd sample. Updates are those of SGD with momentum, whatever the optimizer.

    Args:
        profile: costs of the layers, in order.
        lengths: layers in every stage.
        micro_batch: samples in the mean micro-batch, batch / micro_batches; need not be whole.
        cluster: whose links carry what crosses.
        micro_batches: parts of a batch.
        optimizer_states: numbers that the optimizer keeps for each parameter: 0 for SGD, 1 with momentum, 2 for Adam.

    Raises:
        PartitionError: the lengths do not fit the profile.
        PlanError: there is less than one micro-batch, or one has no samples.
    """
    stages = check_lengths(lengths, len(profile), None)
    if micro_batches < 1 or not 0 < micro_batch < math.inf:
        raise PlanError(f"{micro_batches} micro-batches of {micro_batch} samples: both must be above 0")
    ends = [sum(stages[: s + 1]) for s in range(len(stages))]
    parts = [slice(end - length, end) for end, length in zip(ends, stages, strict=True)]
    largest = max(micro_batch, -(-round(micro_batch * micro_batches) // micro_batches))

    def seconds(phase: Phase) -> list[float]:
        layers = profile.seconds(phase, micro_batch)
        return [sum(layers[part]) for part in parts]

    layers = [profile.layers[part] for part in parts]
    out = [each[-1].output_bytes_per_sample for each in layers[:-1]]
    return Costs(
        forward=seconds("forward"),
        backward=seconds("backward"),
        input_grad=seconds("input_grad"),
        weight_grad=seconds("weight_grad"),
        activation_bytes=[largest * sum(layer.activation_bytes_per_sample for layer in each) for each in layers],
        update=[sum(layer.parameter_bytes for layer in each) * profile.update_s_per_byte for each in layers],
        input_bytes=[largest * per_sample for per_sample in (profile.input_bytes_per_sample, *out)],
        # More stages than ranks go round them, until `place_costs` says where they really stand.
        transfer=[
            cluster.transfer_seconds(micro_batch * per_sample, stage % cluster.ranks, (stage + 1) % cluster.ranks)
            for stage, per_sample in enumerate(out)
        ],
        weight_bytes=[
            sum(layer.parameter_bytes * (2 + optimizer_states) + layer.buffer_bytes for layer in each) for each in layers
        ],
        boundary_bytes=[micro_batch * per_sample for per_sample in out],
    )


def place_costs(costs: Costs, schedule: Schedule, cluster: Cluster) -> Costs:
    """`costs` with the transfers that the schedule's placement makes: where copies of a stage differ, the slowest counts.

    Raises:
        PlanError: the schedule has more ranks than the cluster.
    """
    if schedule.ranks > cluster.ranks:
        raise PlanError(f"{schedule.name} runs on {schedule.ranks} ranks, cluster {cluster.name} has {cluster.ranks}")
    pairs = [
        sorted({(schedule.placement[stage, m], schedule.placement[stage + 1, m]) for m in range(schedule.micro_batches)})
        for stage in range(schedule.stages - 1)
    ]
    crossing = costs.spread("boundary_bytes", schedule.stages - 1) or ()
    seconds = [
        max(cluster.transfer_seconds(count, *pair) for pair in found) for count, found in zip(crossing, pairs, strict=True)
    ]
    return replace(costs, transfer=seconds)


def simulate_plan(plan: Plan, profile: Profile, cluster: Cluster) -> Timeline:
    """When every op and transfer of one step of `plan` starts and ends on `cluster`.

    Raises:
        PlanError: the profile is of another model, or the cluster has fewer ranks than the plan.
    """
    if profile.fingerprint != plan.fingerprint:
        raise PlanError(f"the plan is for a chain with fingerprint {plan.fingerprint}, the profile is of "
                        f"{profile.fingerprint}: profile that model, or plan anew")  # fmt: skip
    micro_batch = plan.batch / plan.micro_batches
    costs = stage_costs(profile, plan.lengths, micro_batch, cluster, micro_batches=plan.micro_batches)
    placed = place_costs(costs, plan.schedule, cluster)
    return simulate_schedule(plan.schedule, placed, recompute=plan.recompute)
