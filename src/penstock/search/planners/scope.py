"""What a paper's planner can be asked: those that cannot answer say so, and why."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.cluster.cluster import Cluster
from penstock.errors import PlanError
from penstock.schedule.catalogue import FAMILIES
from penstock.schedule.replicas import start_up
from penstock.search.proposal import Proposal
from penstock.search.request import PlanRequest

#: Most proposals of a planner that are simulated, and most forwards of all of them but the first
#: together.
SIMULATED, SIMULATED_FORWARDS = 4, 50_000


def check_scope(request: PlanRequest, planner: str, *schedules: str) -> None:
    """Pass, if the planner may choose the cut, and one of its schedules.

    Raises:
        PlanError: the request says how to cut, or names schedules that are none of these.
    """
    if request.by != "bottleneck":
        raise PlanError(
            f"{planner} cuts by its own method, and partition={request.by!r} is asked for: leave that out, or ask "
            "planner 'auto'"
        )
    if request.schedules is None:
        return
    own = {FAMILIES.find(name).name for name in schedules}
    asked = [FAMILIES.find(name).name for name in request.schedules]
    if not own.intersection(asked):
        raise PlanError(
            f"{planner} runs {' or '.join(sorted(own))}, and {', '.join(asked)} is asked for: leave schedules out, or "
            "ask planner 'auto'"
        )


def check_alike(request: PlanRequest, planner: str) -> None:
    """Pass, if the cluster has one kind of devices.

    Raises:
        PlanError: it mixes them.
    """
    kinds = request.cluster.kinds
    if len(kinds) > 1:
        raise PlanError(
            f"{planner} takes all devices for equal, and {request.cluster.name} has {', '.join(kinds)}: ask bapipe, "
            "hetpipe or auto, or plan for those of one kind"
        )


def likely(request: PlanRequest, proposals: Sequence[Proposal]) -> list[Proposal]:
    """Those that may fit the memory; all, if none may, so that the message says what they need."""
    return [each for each in proposals if may_fit(request, each)] or list(proposals)


def may_fit(request: PlanRequest, proposal: Proposal) -> bool:
    """Whether the stages of a 1F1B with copies may fit, at a glance, before anything is simulated;
    with as much recomputing as may be.
    """
    replicas = proposal.replicas if isinstance(proposal.replicas, tuple) else (1,) * proposal.stages
    ahead = dict(proposal.options).get("warm_up") or start_up(replicas)
    if not isinstance(ahead, tuple):
        return True
    samples = -(-request.batch // proposal.micro_batches)
    again = proposal.recompute if request.recompute == "auto" else request.recompute
    start = rank = 0
    for length, copies, number in zip(proposal.lengths, replicas, ahead, strict=True):
        layers = request.profile.layers[start : start + length]
        kept = samples * sum(layer.activation_bytes_per_sample for layer in layers)
        before = (
            request.profile.layers[start - 1].output_bytes_per_sample
            if start
            else request.profile.input_bytes_per_sample
        )
        in_flight = min(-(-number // copies), -(-proposal.micro_batches // copies))
        if again == "never":
            held = in_flight * kept
        elif again in ("always", "except_last"):
            held = (in_flight - 1) * samples * before + kept
        # whatever runs again, the first layer keeps its input or what it saves, and each layer's
        # comes back
        else:
            first = layers[0].activation_bytes_per_sample + layers[0].entry_bytes_per_sample
            largest = max(layer.activation_bytes_per_sample for layer in layers)
            held = samples * ((in_flight - 1) * min(before, first) + largest)
        held += sum(
            request.held_per_parameter_byte * layer.parameter_bytes + layer.buffer_bytes
            for layer in layers
        )
        ranks = proposal.devices[rank : rank + copies] or range(rank, rank + copies)
        if held > min(request.memory_bytes(each) for each in ranks):
            return False
        start, rank = start + length, rank + copies
    return True


def quickest(proposals: Sequence[Proposal], most: int = SIMULATED) -> list[Proposal]:
    """The first of them, and a few more if they are not too large to simulate."""
    found: list[Proposal] = []
    forwards = 0
    for proposal in proposals[:most]:
        forwards += proposal.stages * proposal.micro_batches
        if found and forwards > SIMULATED_FORWARDS:
            break
        found.append(proposal)
    return found


def nodes_of(cluster: Cluster) -> list[list[int]]:
    """The ranks of every node, in the order of their first."""
    nodes: dict[int, list[int]] = {}
    for rank in range(cluster.ranks):
        nodes.setdefault(cluster.node(rank), []).append(rank)
    return list(nodes.values())
