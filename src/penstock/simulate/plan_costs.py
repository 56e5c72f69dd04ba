"""From a profile, a cut and a cluster to the costs of every stage."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from penstock.cluster.cluster import Cluster
from penstock.cluster.device import Link
from penstock.errors import PlanError
from penstock.event import Timeline
from penstock.partition.catalogue import check_lengths
from penstock.plan.plan import Plan
from penstock.profile.paced import Profiles, profiles_of, with_optimizer_states
from penstock.profile.profile import Phase, Profile
from penstock.schedule.lower import partners_of
from penstock.schedule.op import Schedule
from penstock.simulate.costs import Costs
from penstock.simulate.device_costs import on_devices
from penstock.simulate.host_costs import with_host_work
from penstock.simulate.selective import with_selection
from penstock.simulate.simulate import simulate_schedule
from penstock.simulate.stage_seconds import largest_part, parts_of, stage_seconds, update_seconds
from penstock.simulate.versions import versions_held
from penstock.weights.catalogue import WeightRule
from penstock.weights.choice import rule_of

#: On CPUs the core that sends gradients to another copy is the one that takes that copy's and adds
#: them, through memory that is in no
#: cache: that takes so many times as long as one way of the link, and at least so many seconds per
#: byte. Measured on two cores, sums
#: included: VGG-11, 114 MB, 87 ms; ResNet-18, 45 MB, 27; an MLP, 36 MB, 23; GPT, 11 MB, 10; where
#: the link said 2 to 4.5 GB/s
#: (benchmarks/fidelity).
BOTH_WAYS, BOTH_WAYS_S_PER_BYTE = 1.4, 7e-10


def stage_costs(
    profile: Profile,
    lengths: Sequence[int],
    micro_batch: float,
    cluster: Cluster,
    *,
    micro_batches: int,
    optimizer_states: float | None = None,
) -> Costs:
    """What every op of every stage costs, stage s standing on rank s (`place_costs` when it stands
    elsewhere).

    Seconds are those of the mean micro-batch. Bytes that are held are those of the largest: of a
    batch cut into nearly equal parts, memory has to hold the one that got the odd sample. Updates
    are those of SGD with momentum, whatever the optimizer.

    Args:
        profile: costs of the layers, in order.
        lengths: layers in every stage.
        micro_batch: samples in the mean micro-batch, batch / micro_batches; need not be whole.
        cluster: whose links carry what crosses.
        micro_batches: parts of a batch.
        optimizer_states: numbers that the optimizer keeps for each parameter: 0 for SGD, 2 for
        Adam; None is what the profile says.

    Raises:
        PartitionError: the lengths do not fit the profile.
        PlanError: there is less than one micro-batch, or one has no samples.
    """
    stages = check_lengths(lengths, len(profile), None)
    if micro_batches < 1 or not 0 < micro_batch < math.inf:
        raise PlanError(
            f"{micro_batches} micro-batches of {micro_batch} samples: both must be above 0"
        )
    largest = largest_part(micro_batch, micro_batches)
    states = profile.optimizer_states if optimizer_states is None else optimizer_states
    seconds = stage_seconds(profile, stages, micro_batch)
    layers = [profile.layers[part] for part in parts_of(stages)]
    out = [each[-1].output_bytes_per_sample for each in layers[:-1]]
    return Costs(
        forward=seconds["forward"],
        backward=seconds["backward"],
        input_grad=seconds["input_grad"],
        weight_grad=seconds["weight_grad"],
        activation_bytes=[
            largest
            * (
                each[0].entry_bytes_per_sample
                + sum(layer.activation_bytes_per_sample for layer in each)
            )
            for each in layers
        ],
        update=update_seconds(profile, stages),
        input_bytes=[largest * per_sample for per_sample in (profile.input_bytes_per_sample, *out)],
        # More stages than ranks go round them, until `place_costs` says where they really stand.
        transfer=[
            cluster.transfer_seconds(
                micro_batch * per_sample, stage % cluster.ranks, (stage + 1) % cluster.ranks
            )
            for stage, per_sample in enumerate(out)
        ],
        weight_bytes=[
            sum(layer.parameter_bytes * (2 + states) + layer.buffer_bytes for layer in each)
            for each in layers
        ],
        gradient_bytes=[sum(layer.parameter_bytes for layer in each) for each in layers],
        optimizer_bytes=[sum(layer.parameter_bytes * states for layer in each) for each in layers],
        boundary_bytes=[micro_batch * per_sample for per_sample in out],
        # planners choose by `peak_memory`, which has none: a prediction must be what was chosen by
        boundary_buffers=False,
    )


def place_costs(
    costs: Costs, schedule: Schedule, cluster: Cluster, rule: WeightRule | None = None
) -> Costs:
    """`costs` with the transfers that the schedule's placement makes.

    Activations that are handed to a partner take that link's time. The update of a stage with
    copies takes what it takes them to add up their gradients, besides: each owns a piece, gets it
    from every other, and sends every other the sum; two send each other all. Where copies meet once
    in a wave, each update takes its share of that.

    With a weight rule, stages hold the versions that it keeps in a stream.

    Raises:
        PlanError: the schedule has more ranks than the cluster.
    """
    if schedule.ranks > cluster.ranks:
        raise PlanError(
            f"{schedule.name} runs on {schedule.ranks} ranks, cluster {cluster.name} has {cluster.ranks}"
        )
    crossing = costs.spread("boundary_bytes", schedule.stages - 1) or ()
    seconds = [
        _crossing_seconds(schedule, stage, count, cluster) for stage, count in enumerate(crossing)
    ]
    update = costs.spread("update", schedule.stages) or (0.0,) * schedule.stages
    gradients = costs.spread("gradient_bytes", schedule.stages) or (0.0,) * schedule.stages
    waves = None if schedule.stream is None else schedule.stream.waves
    met = [
        own + meeting_seconds(ranks, held, cluster) / (1 if waves is None else waves.length)
        for own, ranks, held in zip(update, schedule.ranks_of_stage, gradients, strict=True)
    ]
    held = costs.spread("activation_bytes", schedule.stages) or (0.0,) * schedule.stages
    handed = [0.0] * schedule.stages
    for op, partner in partners_of(schedule).items():
        pair = schedule.placement[op.stage, op.micro_batch], partner
        handed[op.stage] = max(handed[op.stage], cluster.transfer_seconds(held[op.stage], *pair))
    placed = replace(
        costs, transfer=seconds, update=met, evict=handed, links=_medium(schedule, cluster)
    )
    return placed if rule is None else _with_trained_versions(placed, schedule, rule)


def _crossing_seconds(
    schedule: Schedule, stage: int, count: float, cluster: Cluster
) -> float | list[float]:
    """What `count` bytes take from a stage to the next one; by micro-batch where that differs.

    A slice takes its share of what stands there, so that this much is right for it; of its ways the
    slowest counts.
    """
    pairs = [
        (schedule.placement[stage, m], schedule.placement[stage + 1, m])
        for m in range(schedule.slices)
    ]
    if schedule.slicing is not None:
        counts = [len(row) for row in schedule.slicing.shares]
        return [
            parts * max(cluster.transfer_seconds(count / parts, *pair) for pair in set(pairs))
            for parts in counts
        ]
    seconds = {pair: cluster.transfer_seconds(count, *pair) for pair in dict.fromkeys(pairs)}
    return (
        seconds[pairs[0]] if len(set(seconds.values())) == 1 else [seconds[pair] for pair in pairs]
    )


def _medium(schedule: Schedule, cluster: Cluster) -> str:
    """Whether all that crosses goes through one medium ("shared"), or not ("duplex"). Every node's
    inside is one of its own: only where one node's is all that is used, or what is between them,
    the simulator can say so.
    """
    pairs = {
        (schedule.placement[stage, m], schedule.placement[stage + 1, m])
        for stage in range(schedule.stages - 1)
        for m in range(schedule.slices)
    }
    links = {cluster.link(*pair) for pair in pairs if pair[0] != pair[1]}
    nodes = {(cluster.node(a), cluster.node(b)) for a, b in pairs if a != b}
    one = len(nodes) == 1 or all(a != b for a, b in nodes)
    return "shared" if one and len(links) == 1 and next(iter(links)).shared else "duplex"


def _with_trained_versions(costs: Costs, schedule: Schedule, rule: WeightRule) -> Costs:
    """`costs` with the versions that a rule keeps in a stream: of what is trained, which is as
    large as its gradients. Buffers, such as batch norm's statistics, have no versions.
    """
    parts = [
        costs.spread(name, schedule.stages)
        for name in ("weight_bytes", "gradient_bytes", "optimizer_bytes")
    ]
    if schedule.stream is None or None in parts:
        return costs
    held = versions_held(schedule, rule)
    rows = zip(held, *(part or () for part in parts), strict=True)
    versions = [
        1 + (kept - 1) * trained / (whole - trained - state) if trained else 1.0
        for kept, whole, trained, state in rows
    ]
    return replace(costs, weight_versions=versions)


def slice_costs(
    costs: Costs,
    schedule: Schedule,
    profiles: Sequence[Profile],
    lengths: Sequence[int],
    micro_batch: float,
) -> Costs:
    """`costs` with the seconds that slices really take where they stand: each call's fixed cost is
    not cut with its micro-batch.

    Slices of one micro-batch are taken for equally long, and stand on one rank. Unchanged where
    micro-batches are whole.
    """
    if schedule.slicing is None:
        return costs
    rows = list(zip(schedule.slicing.shares, schedule.slicing.first_of, strict=True))
    counts = {len(row) for row, _ in rows}
    at = {
        (id(each), count): stage_seconds(each, lengths, micro_batch / count)
        for each in {id(each): each for each in profiles}.values()
        for count in counts
    }

    def seconds(phase: Phase) -> list[list[float]]:
        return [
            [
                len(row)
                * at[id(profiles[schedule.placement[stage, first]]), len(row)][phase][stage]
                for row, first in rows
            ]
            for stage in range(len(lengths))
        ]

    return replace(
        costs,
        forward=seconds("forward"),
        backward=seconds("backward"),
        input_grad=seconds("input_grad"),
        weight_grad=seconds("weight_grad"),
    )


def meeting_seconds(ranks: Sequence[int], gradient_bytes: float, cluster: Cluster) -> float:
    """How long copies of a stage on these ranks take to add up their gradients, over the slowest of
    their links.

    Where all ranks of a node share the link to other nodes, all pieces of all of them go through
    it.
    """
    if len(ranks) < 2:
        return 0.0
    rounds = 1 if len(ranks) == 2 else 2 * (len(ranks) - 1)  # two send each other all
    piece = gradient_bytes if len(ranks) == 2 else gradient_bytes / len(ranks)
    much, least = 1.0, 0.0
    if any(cluster.devices[rank].kind == "cpu" for rank in ranks):
        much, least = BOTH_WAYS, BOTH_WAYS_S_PER_BYTE * piece
    return rounds * max(
        max(link.transfer_seconds(much * piece * (users if link.shared else 1)), least)
        for link, users in _links_among(ranks, cluster)
    )


def _links_among(ranks: Sequence[int], cluster: Cluster) -> list[tuple[Link, int]]:
    """Every different link between two of these ranks, with the number of ranks of a node that use
    it.
    """
    nodes: dict[int, list[int]] = {}
    for rank in ranks:
        nodes.setdefault(cluster.node(rank), []).append(rank)
    found = [(cluster.link(*own[:2]), len(own)) for own in nodes.values() if len(own) > 1]
    firsts = [own[0] for own in nodes.values()]
    if len(firsts) > 1:
        found.append((cluster.link(*firsts[:2]), max(map(len, nodes.values()))))
    return found


def simulate_plan(plan: Plan, profiles: Profiles, cluster: Cluster) -> Timeline:
    """When every op and transfer of one step of `plan` starts and ends on `cluster`; if it is
    asynchronous, of its whole stretch of the stream, which fills and drains (`steady` says what a
    batch takes between).

    Raises:
        PlanError: the profile is of another model, or the cluster has fewer ranks than the plan.
    """
    return simulate_schedule(
        plan.schedule, costs_of_plan(plan, profiles, cluster), recompute=plan.recompute
    )


def costs_of_plan(plan: Plan, profiles: Profiles, cluster: Cluster) -> Costs:
    """What every op of `plan` costs on `cluster`; `profiles` as `profiles_of` takes them.

    Raises:
        PlanError: the profile is of another model, or the cluster has fewer ranks than the plan.
    """
    own = with_optimizer_states(profiles_of(profiles, cluster), plan.optimizer_states)
    if own[0].fingerprint != plan.fingerprint:
        raise PlanError(
            f"the plan is for a chain with fingerprint {plan.fingerprint}, the profile is of "
            f"{own[0].fingerprint}: profile that model, or plan anew"
        )
    devices = plan.devices or tuple(range(plan.ranks))
    if plan.ranks > cluster.ranks:
        raise PlanError(
            f"{plan.schedule_name} runs on {plan.ranks} ranks, cluster {cluster.name} has {cluster.ranks}"
        )
    if max(devices) >= cluster.ranks:
        raise PlanError(
            f"the plan is on device {max(devices)} of its cluster, {cluster.name} has devices 0 to {cluster.ranks - 1}: "
            "plan anew"
        )
    rule, kinds = rule_of(plan.schedule, plan.weights), [own[rank] for rank in devices]
    costs = schedule_costs(
        plan.schedule, kinds, plan.lengths, cluster.on(devices), plan.batch, rule
    )
    if plan.recompute != "selective":
        return costs
    return with_selection(
        costs, plan.schedule, kinds, plan.lengths, plan.batch / plan.micro_batches, plan.selection
    )


def schedule_costs(
    schedule: Schedule,
    profiles: Sequence[Profile],
    lengths: Sequence[int],
    cluster: Cluster,
    batch: float,
    rule: WeightRule,
) -> Costs:
    """What every op of a schedule costs.

    Args:
        schedule: of as many stages as there are lengths.
        profiles: per rank; ranks alike share one object.
        lengths: layers in every stage.
        cluster: rank r of the schedule is its rank r.
        batch: samples in a batch.
        rule: which versions of the weights are kept.
    """
    micro_batch = batch / schedule.micro_batches
    costs = stage_costs(
        profiles[0], lengths, micro_batch, cluster, micro_batches=schedule.micro_batches
    )
    placed = place_costs(
        on_devices(costs, schedule, profiles, lengths, micro_batch), schedule, cluster, rule
    )
    return with_host_work(
        slice_costs(placed, schedule, profiles, lengths, micro_batch), schedule, profiles, cluster
    )
