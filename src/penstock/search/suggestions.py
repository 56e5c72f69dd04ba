"""Suggestions: the chosen plan simulated again with one improvement at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from penstock.cluster.cluster import Cluster
from penstock.cluster.device import Link
from penstock.errors import PenstockError
from penstock.plan.prediction import Remedy
from penstock.profile.device_profiles import scale_profile
from penstock.schedule.recompute import Recompute
from penstock.search.instantiate import Evaluated, instantiate, needs_costs, with_request
from penstock.search.plan_search import PlanSearch
from penstock.search.request import PlanRequest
from penstock.search.search_space import SearchSpace
from penstock.search.shapes import shapes
from penstock.simulate.steady_state import steady

#: Maximum number of suggestions, and the relative improvement that a suggestion must bring.
MOST, WORTH = 5, 0.005

#: Clusters of more ranks are not planned again with one more rank.
FEW_RANKS = 32

#: Ops simulated in the search for a plan with one more rank.
WORK = 120_000


def suggestions(request: PlanRequest, chosen: Evaluated) -> list[Remedy]:
    """Return the changes that make a step faster by half a percent or more, with its seconds then,
    best first.

    All but one keep the plan and change what it runs on. Only for one more rank a new plan is
    searched, with the same schedule.
    """
    changes = []
    for change, changed_request in _hardware_changes(request, chosen):
        placed = with_request(chosen.placed, changed_request)
        seconds = steady(placed.schedule, placed.costs, chosen.recompute).seconds_per_batch
        changes.append(Remedy(change, seconds))
    if chosen.recompute is not Recompute.NEVER:
        seconds = steady(chosen.placed.schedule, chosen.placed.costs).seconds_per_batch
        changes.append(Remedy("memory for all activations, so that nothing is recomputed", seconds))
    changes += _twice_the_batch(request, chosen) + _one_more_rank(request, chosen)
    worth = [change for change in changes if change.step_s < chosen.step_s * (1 - WORTH)]
    return sorted(worth, key=lambda change: change.step_s)[:MOST]


def _hardware_changes(request: PlanRequest, chosen: Evaluated) -> Iterator[tuple[str, PlanRequest]]:
    """Yield changes of links and devices, each with the request for the changed cluster."""
    yield from _faster_links(request)
    cluster = request.cluster
    profiles = {
        device.name: request.profile_of(rank) for rank, device in enumerate(cluster.devices)
    }
    faster_profiles = {name: scale_profile(profile, 0.5) for name, profile in profiles.items()}
    yield "devices twice as fast", replace(request, profiles=faster_profiles)
    busy = chosen.steady_state.timeline.busy if chosen.steady_state is not None else ()
    if len(busy) > 1:
        rank = max(range(len(busy)), key=lambda rank: busy[rank])
        index = chosen.placed.proposal.devices[rank] if chosen.placed.proposal.devices else rank
        device = cluster.devices[index]
        # A name of its own gives this one device its own profile.
        faster = replace(device, name=f"{device.name}, twice as fast")
        devices = (*cluster.devices[:index], faster, *cluster.devices[index + 1 :])
        yield (
            f"the device of rank {rank} twice as fast",
            replace(
                request,
                cluster=replace(cluster, devices=devices),
                profiles={**profiles, faster.name: scale_profile(request.profile_of(index), 0.5)},
            ),
        )


def _faster_links(request: PlanRequest) -> Iterator[tuple[str, PlanRequest]]:
    """Yield changes of the links inside nodes and between nodes, as far as the cluster has any."""
    cluster = request.cluster
    for where, place in (("inside", "inside a node"), ("between", "between nodes")):
        nodes_without_link = cluster.ranks if where == "inside" else 1
        if cluster.nodes == nodes_without_link:
            continue
        wide = _with_link(cluster, where, _twice_the_bandwidth)
        yield f"twice the bandwidth {place}", replace(request, cluster=wide)
        quick = _with_link(cluster, where, _no_latency)
        yield f"no latency {place}", replace(request, cluster=quick)


def _twice_the_bandwidth(link: Link) -> Link:
    """Return a link with twice the bandwidth."""
    return replace(link, bandwidth_bytes_per_s=2 * link.bandwidth_bytes_per_s)


def _no_latency(link: Link) -> Link:
    """Return a link without latency."""
    return replace(link, latency_s=0.0)


def _with_link(cluster: Cluster, where: str, change: Callable[[Link], Link]) -> Cluster:
    """Return a cluster with its links inside nodes, or between nodes, changed."""
    if where == "between":
        return cluster.with_links(between=change(cluster.between))
    insides = tuple((node, change(link)) for node, link in cluster.insides)
    return replace(cluster.with_links(inside=change(cluster.inside)), insides=insides)


def _twice_the_batch(request: PlanRequest, chosen: Evaluated) -> list[Remedy]:
    """Return the suggestion of twice the micro-batches of the same size, with which filling and
    draining count half.
    """
    if needs_costs(chosen.placed.proposal.schedule):
        return []
    proposal = replace(
        chosen.placed.proposal,
        recompute=chosen.recompute,
        micro_batches=2 * chosen.placed.proposal.micro_batches,
    )
    larger = replace(request, batch=2 * request.batch, micro_batches=None)
    try:
        placed = instantiate(larger, proposal).with_selective_recompute(chosen.placed.selection)
    except PenstockError:
        # A suggestion is an addition to the plan: one that cannot be evaluated is left out.
        return []
    seconds = steady(placed.schedule, placed.costs, chosen.recompute).seconds_per_batch / 2
    return [Remedy("twice the batch (time for as many samples)", seconds)]


def _one_more_rank(request: PlanRequest, chosen: Evaluated) -> list[Remedy]:
    """Return the suggestion of one more device of the last kind, in the last node."""
    cluster = request.cluster
    name = chosen.placed.proposal.schedule
    if cluster.ranks > FEW_RANKS or request.stages is not None:
        return []
    if chosen.placed.schedule.stream is not None or needs_costs(name):
        return []
    nodes = tuple(map(cluster.node, range(cluster.ranks)))
    larger = replace(
        cluster, devices=(*cluster.devices, cluster.devices[-1]), node_of=(*nodes, nodes[-1])
    )
    try:
        larger_request = replace(
            # A suggestion may take a tenth of the time of the search that it is about.
            request,
            cluster=larger,
            schedules=(name,),
            budget_s=request.budget_s / 10,
        )
        search = PlanSearch(larger_request, WORK)
        for configuration in SearchSpace(larger_request, shapes(larger_request)).configurations:
            if search.is_over:
                break
            search.evaluate_configuration(configuration)
    except PenstockError:
        # As above: left out.
        return []
    return [Remedy(f"one rank more (with {name})", search.best_s)] if search.feasible else []
