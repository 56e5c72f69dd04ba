"""PipeDream's planner: hierarchical partitioning, level by level of the cluster."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from itertools import chain
from math import lcm

from penstock.errors import PlanError
from penstock.plan.plan import Plan
from penstock.search.best_plan import best_plan
from penstock.search.catalogue import register
from penstock.search.planners.layer_costs import LayerCosts
from penstock.search.planners.pipedream_cut import Level, Rules, hierarchical_cut, spread
from penstock.search.planners.replicated_stages import least_memory, links_inside, slowest_bandwidth
from penstock.search.planners.scope import (
    check_alike,
    check_scope,
    likely,
    may_fit,
    quickest,
)
from penstock.search.proposal import Objective, Proposal, replica_options
from penstock.search.request import PlanRequest

#: Maximum number of steps of the dynamic program, layers^2 x components^2: of one search, about 2
#: s, and of the searches for all numbers of micro-batches together.
MOST_STEPS, STEPS_IN_ALL = 5e9, 6e8


@register(
    "pipedream",
    source="Narayanan et al. 2019, PipeDream, section 3.1; optimizer_graph_hierarchical.py",
)
def pipedream(request: PlanRequest) -> Plan:
    """Return the plan with the least time of its slowest stage or link, each stage on as many
    devices as is best.

    A node is a component of the network, a device one of its node. If nodes have different numbers
    of devices, or a number of stages or of replicas is requested, all devices are components of the
    slowest link. The paper's minibatch is a micro-batch here: the paper leaves its size to the
    user, so that all sizes are searched, and the best of them are simulated.

    With `asynchronous` the schedule is the paper's own, 1F1B-RR with stashed weights; a batch then
    has a number of micro-batches that gives every replica of a stage equally many. Without, it is
    "1f1b" on the same stages and replicas: a flush after every batch, and gradients are synced once
    per batch, not after each micro-batch, as the cut supposes. If no cut for time alone fits, all
    are searched again within memory.

    Raises:
        PlanError: devices are of different kinds; the search would take too long; or nothing fits.
    """
    check_scope(request, "pipedream", "pipedream" if request.asynchronous else "1f1b")
    check_alike(request, "pipedream")
    counts = request.micro_batch_counts(request.copies_allowed)
    levels, _ = _levels(request)
    steps = _check_size(request, levels)
    counts = counts[-max(1, int(STEPS_IN_ALL / steps)) :]
    proposals = _sorted_proposals(request, counts, within_memory=False)
    if not any(may_fit(request, proposal) for proposal in proposals):
        with suppress(PlanError):  # the error about the first proposals says more
            proposals += _sorted_proposals(request, counts, within_memory=True)
    return best_plan(request, quickest(likely(request, proposals)))


def _check_size(request: PlanRequest, levels: Sequence[Level]) -> float:
    """Return the number of steps that the search takes.

    Raises:
        PlanError: they are too many.
    """
    steps = float(len(request.profile) * max(level.components for level in levels)) ** 2
    if steps > MOST_STEPS:
        raise PlanError(
            f"pipedream's search takes layers^2 x devices^2 = {steps:.1e} steps on "
            f"{request.cluster.name}, more than {MOST_STEPS:.0e}: merge layers, or describe the "
            "devices as nodes of several"
        )
    return steps


def _sorted_proposals(
    request: PlanRequest, counts: Sequence[int], *, within_memory: bool
) -> list[Proposal]:
    """Return one proposal for each number of micro-batches, the least estimate of a step first.

    Raises:
        PlanError: none of them can be made; it is the reason of the last.
    """
    estimated: list[tuple[float, Proposal]] = []
    errors: list[PlanError] = []
    for count in counts:
        try:
            estimated.append(_proposal(request, count, within_memory=within_memory))
        except PlanError as error:
            # Other numbers of micro-batches may be possible.
            errors.append(error)
    if len(errors) == len(counts):
        raise errors[-1]
    estimated.sort(key=lambda candidate: candidate[0])
    return [proposal for _, proposal in estimated]


def _proposal(request: PlanRequest, count: int, *, within_memory: bool) -> tuple[float, Proposal]:
    """Return the best cut for a number of micro-batches, with an estimate of a step's seconds.

    Raises:
        PlanError: the cut needs more micro-batches than there are, or another number of them.
    """
    costs = LayerCosts.of(request.profile, request.batch / count)
    most = min(count, request.copies_allowed)
    levels, components = _levels(request)
    rules = Rules()
    # Only one level of single devices has rules: what the devices of a node hold together says
    # little about each of them.
    if len(levels) == 1 or within_memory:
        components = list(range(_useful_devices(request, most)))
        levels = [Level(len(components), slowest_bandwidth(request.cluster))]
        rules = _rules(request, most, within_memory=within_memory)
    _check_size(request, levels)
    cut = hierarchical_cut(costs, levels, rules)
    stages = spread(cut.parts, components)
    replicas = tuple(len(devices) for *_, devices in stages)
    if max(replicas) > most:
        raise PlanError(
            f"pipedream puts a stage on {max(replicas)} devices, and each needs one of the {count} "
            f"micro-batches: give more of them, or max_replicas={most}"
        )
    if request.asynchronous:
        name, total, fill_s = "pipedream", _even_count(request, count, replicas), 0.0
    else:
        name, total, fill_s = "1f1b", count, sum(costs.seconds)
    devices = tuple(chain.from_iterable(ranks for *_, ranks in stages))
    return total * cut.slowest_s + fill_s, Proposal(
        tuple(stop - start for start, stop, _ in stages),
        name,
        total,
        replica_options(replicas),
        devices=devices,
        objective=Objective("slowest stage or link for a micro-batch", cut.slowest_s, "s"),
    )


def _rules(request: PlanRequest, most: int, *, within_memory: bool) -> Rules:
    """Return the limits on a cut of a single level."""
    return Rules(
        straight=most == 1,
        most_replicas=most,
        stages=request.stages,
        memory_bytes=least_memory(request) if within_memory else None,
        stash=request.asynchronous,
        other_state_factor=request.state_per_parameter_byte - 1,
    )


def _even_count(request: PlanRequest, count: int, replicas: Sequence[int]) -> int:
    """Round a number of micro-batches up so that all replicas of every stage get equally many.

    Raises:
        PlanError: that exceeds the samples of the batch, or is not the requested number.
    """
    multiple = lcm(*replicas)
    total = -(-count // multiple) * multiple
    if total > request.batch or (request.micro_batches is not None and total != count):
        raise PlanError(
            f"pipedream puts the stages on {', '.join(map(str, replicas))} devices, so that a "
            f"batch needs a multiple of {multiple} micro-batches: {count} of {request.batch} "
            "samples are not"
        )
    return total


def _useful_devices(request: PlanRequest, most: int) -> int:
    """Return the number of devices that stages with at most `most` replicas can use."""
    stages = len(request.profile) if request.stages is None else request.stages
    return min(request.cluster.ranks, stages * most)


def _levels(request: PlanRequest) -> tuple[list[Level], list[object]]:
    """Return the levels of the cluster, and the components of the highest level: ranks, or lists of
    ranks.
    """
    cluster = request.cluster
    nodes = cluster.by_node(range(cluster.ranks))
    sizes = {len(ranks) for ranks in nodes}
    is_free = request.stages is None and request.max_replicas is None
    if not is_free or len(nodes) == 1 or sizes == {1} or len(sizes) > 1:
        return [Level(cluster.ranks, slowest_bandwidth(cluster))], list(range(cluster.ranks))
    inside = min(link.bandwidth_bytes_per_s for link in links_inside(cluster))
    between = cluster.between.bandwidth_bytes_per_s
    return [Level(sizes.pop(), inside), Level(len(nodes), between)], list(nodes)
