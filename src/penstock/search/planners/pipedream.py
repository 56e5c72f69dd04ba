"""PipeDream's planner: the hierarchical partitioning, level by level of the cluster."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from math import lcm

from penstock.cluster.cluster import Cluster
from penstock.errors import PlanError
from penstock.plan.plan import Plan
from penstock.search.catalogue import register
from penstock.search.planners.layer_costs import LayerCosts
from penstock.search.planners.pipedream_cut import Level, Rules, hierarchical_cut, spread
from penstock.search.planners.scope import (
    check_alike,
    check_scope,
    likely,
    may_fit,
    nodes_of,
    quickest,
)
from penstock.search.proposal import Objective, Proposal
from penstock.search.request import PlanRequest
from penstock.search.score import best_of

#: Steps of the dynamic program, layers^2 x components^2: about as many as take 2 s, and as many as
#: all numbers of micro-batches may
#: take together.
MOST_STEPS, STEPS_IN_ALL = 5e9, 6e8


@register(
    "pipedream",
    source="Narayanan et al. 2019, PipeDream, section 3.1; optimizer_graph_hierarchical.py",
)
def pipedream(request: PlanRequest) -> Plan:
    """The cut with the least time of its slowest stage or link, each stage on as many devices as is
    best.

    A node is a component of the network, a device one of its node; where nodes have different
    numbers of devices, or a number of stages or of replicas is asked for, all devices are
    components of the slowest link. The paper's minibatch is a micro-batch here: its size is what
    the paper leaves to the user, so all sizes are cut for, and the best of them is simulated.

    With `asynchronous` the schedule is the paper's own, 1F1B-RR with stashed weights; a batch then
    has as many micro-batches as let every copy of a stage have equally many. Without, it is "1f1b"
    on the same stages and copies: a flush after every batch, and gradients are added up once in it,
    not after each micro-batch, as the cut supposes. Where nothing that was cut for time alone fits,
    all is cut again within memory.

    Raises:
        PlanError: devices are of different kinds; the search would take too long; or nothing fits.
    """
    check_scope(request, "pipedream", "pipedream" if request.asynchronous else "1f1b")
    check_alike(request, "pipedream")
    counts = request.micro_batch_counts(request.copies_allowed)
    levels, _ = _levels(request)
    steps = _check_size(request, levels)
    counts = counts[-max(1, int(STEPS_IN_ALL / steps)) :]
    found = [
        proposal for _, proposal in sorted(_proposals(request, counts), key=lambda each: each[0])
    ]
    if not any(may_fit(request, proposal) for proposal in found):
        with suppress(PlanError):  # the message about those without is the better one
            tight = sorted(
                _proposals(request, counts, within_memory=True), key=lambda each: each[0]
            )
            found += [proposal for _, proposal in tight]
    return best_of(request, quickest(likely(request, found)))


def _check_size(request: PlanRequest, levels: Sequence[Level]) -> float:
    """How many steps the search takes.

    Raises:
        PlanError: they are too many.
    """
    steps = float(len(request.profile) * max(level.components for level in levels)) ** 2
    if steps > MOST_STEPS:
        raise PlanError(
            f"pipedream's search takes layers^2 x devices^2 = {steps:.1e} steps on {request.cluster.name}, more than "
            f"{MOST_STEPS:.0e}: merge layers, or describe the devices as nodes of several"
        )
    return steps


def _proposals(
    request: PlanRequest, counts: Sequence[int], *, within_memory: bool = False
) -> Iterator[tuple[float, Proposal]]:
    """One for each number of micro-batches, with a guess of a step's seconds."""
    refusals: list[PlanError] = []
    for count in counts:
        try:
            seconds, proposal = _proposal(request, count, within_memory=within_memory)
        except PlanError as error:
            refusals.append(error)
            continue
        yield seconds, proposal
    if len(refusals) == len(counts):
        raise refusals[-1]


def _proposal(request: PlanRequest, count: int, *, within_memory: bool) -> tuple[float, Proposal]:
    costs = LayerCosts.of(request.profile, request.batch / count)
    most = min(count, request.copies_allowed)
    levels, components = _levels(request)
    limit = (
        min(request.memory_bytes(rank) for rank in range(request.cluster.ranks))
        if within_memory
        else None
    )
    rules = Rules()
    if (
        len(levels) == 1 or within_memory
    ):  # what a node's devices hold together says little of what each does
        components = list(range(_useful(request, most)))
        levels = [Level(len(components), _slowest(request.cluster))]
        rules = Rules(
            straight=most == 1,
            most_replicas=most,
            stages=request.stages,
            memory_bytes=limit,
            stash=request.asynchronous,
            besides=request.held_per_parameter_byte - 1,
        )
    _check_size(request, levels)
    found = hierarchical_cut(costs, levels, rules)
    stages = spread(found.parts, components)
    replicas = tuple(len(devices) for *_, devices in stages)
    if max(replicas) > most:
        raise PlanError(
            f"pipedream puts a stage on {max(replicas)} devices, and each needs one of the {count} micro-batches: give "
            f"more of them, or max_replicas={most}"
        )
    fill = sum(costs.seconds)
    name, total = "1f1b", count
    if request.asynchronous:
        every = lcm(*replicas)
        name, total, fill = "pipedream", -(-count // every) * every, 0.0
        if total > request.batch or (request.micro_batches is not None and total != count):
            raise PlanError(
                f"pipedream puts the stages on {', '.join(map(str, replicas))} devices, so that a batch needs a multiple of "
                f"{every} micro-batches: {count} of {request.batch} samples are not"
            )
    return total * found.slowest_s + fill, Proposal(
        tuple(stop - start for start, stop, _ in stages),
        name,
        total,
        () if set(replicas) == {1} else (("replicas", replicas),),
        devices=tuple(rank for *_, devices in stages for rank in devices),
        objective=Objective("slowest stage or link for a micro-batch", found.slowest_s, "s"),
    )


def _useful(request: PlanRequest, most: int) -> int:
    """Devices that so many stages with so many copies can use."""
    stages = len(request.profile) if request.stages is None else request.stages
    return min(request.cluster.ranks, stages * most)


def _levels(request: PlanRequest) -> tuple[list[Level], list[object]]:
    """The levels of the cluster, and the components of the highest with the ranks in them."""
    cluster = request.cluster
    nodes = nodes_of(cluster)
    sizes = {len(own) for own in nodes}
    free = request.stages is None and request.max_replicas is None
    if not free or len(nodes) == 1 or sizes == {1} or len(sizes) > 1:
        return [Level(cluster.ranks, _slowest(cluster))], list(range(cluster.ranks))
    inside = min(
        link.bandwidth_bytes_per_s
        for link in (cluster.inside, *(link for _, link in cluster.insides))
    )
    return [
        Level(sizes.pop(), inside),
        Level(len(nodes), cluster.between.bandwidth_bytes_per_s),
    ], list(nodes)


def _slowest(cluster: Cluster) -> float:
    """Bytes per second of the slowest link that is used."""
    links = (
        [cluster.inside, *(link for _, link in cluster.insides)]
        if cluster.nodes < cluster.ranks
        else []
    )
    links += [cluster.between] if cluster.nodes > 1 else []
    return min(link.bandwidth_bytes_per_s for link in links or [cluster.inside])
