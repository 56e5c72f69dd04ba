"""What would help: the chosen way simulated again with one thing better at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from penstock.cluster.cluster import Cluster
from penstock.cluster.device import Link
from penstock.errors import PenstockError
from penstock.plan.plan import Remedy
from penstock.profile.paced import scale_profile
from penstock.search.hunt import Hunt
from penstock.search.laid import Scored, is_measured, lay_out, relaid
from penstock.search.request import PlanRequest
from penstock.search.shapes import shapes
from penstock.search.ways import Space
from penstock.simulate.steady import steady

#: Changes that are told, and what they must win to be told, relatively.
MOST, WORTH = 5, 0.005

#: Clusters of more ranks are not planned anew with one more.
FEW_RANKS = 32

#: Ops simulated in search of a plan for one rank more.
WORK = 120_000


def remedies(request: PlanRequest, chosen: Scored) -> list[Remedy]:
    """Changes with what a step takes then, best first: those that make it faster by half a percent
    or more.

    All but one keep the plan and change what it runs on; only for one rank more another is looked
    for, with the same schedule.
    """
    found = []
    for change, other in _changes(request, chosen):
        laid = relaid(chosen.laid, other)
        found.append(
            Remedy(change, steady(laid.made, laid.costs, chosen.recompute).seconds_per_batch)
        )
    if chosen.recompute != "never":
        found.append(
            Remedy(
                "memory for all activations, so that nothing is recomputed",
                steady(chosen.laid.made, chosen.laid.costs).seconds_per_batch,
            )
        )
    found += _twice_the_batch(request, chosen) + _one_more_rank(request, chosen)
    worth = [each for each in found if each.step_s < chosen.step_s * (1 - WORTH)]
    return sorted(worth, key=lambda each: each.step_s)[:MOST]


def _changes(request: PlanRequest, chosen: Scored) -> Iterator[tuple[str, PlanRequest]]:
    cluster = request.cluster
    for where in ("inside", "between"):
        if cluster.nodes == (cluster.ranks if where == "inside" else 1):  # it has no such link
            continue
        place = "inside a node" if where == "inside" else "between nodes"
        wide = _with_link(
            cluster,
            where,
            lambda link: replace(link, bandwidth_bytes_per_s=2 * link.bandwidth_bytes_per_s),
        )
        yield f"twice the bandwidth {place}", replace(request, cluster=wide)
        yield (
            f"no latency {place}",
            replace(
                request,
                cluster=_with_link(cluster, where, lambda link: replace(link, latency_s=0.0)),
            ),
        )
    profiles = {
        device.name: request.profile_of(rank) for rank, device in enumerate(cluster.devices)
    }
    yield (
        "devices twice as fast",
        replace(
            request, profiles={name: scale_profile(each, 0.5) for name, each in profiles.items()}
        ),
    )
    busy = chosen.found.timeline.busy if chosen.found is not None else ()
    if len(busy) > 1:
        rank = max(range(len(busy)), key=lambda r: busy[r])
        device = chosen.laid.proposal.devices[rank] if chosen.laid.proposal.devices else rank
        own = replace(
            cluster.devices[device], name=f"{cluster.devices[device].name}, twice as fast"
        )
        faster = {**profiles, own.name: scale_profile(request.profile_of(device), 0.5)}
        devices = tuple(own if r == device else each for r, each in enumerate(cluster.devices))
        yield (
            f"the device of rank {rank} twice as fast",
            replace(request, cluster=replace(cluster, devices=devices), profiles=faster),
        )


def _with_link(cluster: Cluster, where: str, change: Callable[[Link], Link]) -> Cluster:
    if where == "between":
        return cluster.with_links(between=change(cluster.between))
    insides = tuple((node, change(link)) for node, link in cluster.insides)
    return replace(cluster.with_links(inside=change(cluster.inside)), insides=insides)


def _twice_the_batch(request: PlanRequest, chosen: Scored) -> list[Remedy]:
    """With twice the micro-batches, of the same size, filling and draining count half."""
    if is_measured(chosen.laid.proposal.schedule):
        return []
    proposal = replace(
        chosen.laid.proposal,
        recompute=chosen.recompute,
        micro_batches=2 * chosen.laid.proposal.micro_batches,
    )
    try:
        laid = lay_out(
            replace(request, batch=2 * request.batch, micro_batches=None), proposal
        ).with_selection(chosen.laid.selection)
    except PenstockError:
        return []
    return [
        Remedy(
            "twice the batch (time for as many samples)",
            steady(laid.made, laid.costs, chosen.recompute).seconds_per_batch / 2,
        )
    ]


def _one_more_rank(request: PlanRequest, chosen: Scored) -> list[Remedy]:
    cluster = request.cluster
    name = chosen.laid.proposal.schedule
    if (
        cluster.ranks > FEW_RANKS
        or chosen.laid.made.stream is not None
        or request.stages is not None
        or is_measured(name)
    ):
        return []
    nodes = tuple(map(cluster.node, range(cluster.ranks)))
    more = replace(
        cluster, devices=(*cluster.devices, cluster.devices[-1]), node_of=(*nodes, nodes[-1])
    )
    try:
        wanted = replace(request, cluster=more, schedules=(name,), budget_s=request.budget_s / 10)
        hunt = Hunt(wanted, WORK)
        for way in Space(wanted, shapes(wanted)).ways:
            if hunt.over:
                break
            hunt.weigh_way(way)
    except PenstockError:
        return []
    return [Remedy(f"one rank more (with {name})", hunt.best_s)] if hunt.fits else []
