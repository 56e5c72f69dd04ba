"""Checks of what a paper's planner can be asked for, and the choice of proposals to simulate."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.errors import PlanError
from penstock.schedule.catalogue import FAMILIES
from penstock.schedule.recompute import Recompute
from penstock.schedule.replicas import start_up
from penstock.search.proposal import Proposal
from penstock.search.request import PlanRequest

#: Maximum number of proposals of a planner that are simulated, and maximum number of forwards of
#: all of them together; the first is always simulated.
SIMULATED, SIMULATED_FORWARDS = 4, 50_000


def check_scope(request: PlanRequest, planner: str, *schedules: str) -> None:
    """Check that the request leaves the cut to the planner and allows one of its schedules.

    Raises:
        PlanError: the request says how to cut, or names none of these schedules.
    """
    if request.by != "bottleneck":
        raise PlanError(
            f"{planner} cuts by its own method, and partition={request.by!r} is requested: leave "
            "that out, or use planner 'auto'"
        )
    if request.schedules is None:
        return
    available = {FAMILIES.find(name).name for name in schedules}
    if not available.intersection(request.schedules):
        raise PlanError(
            f"{planner} runs {' or '.join(sorted(available))}, and {', '.join(request.schedules)} "
            "is requested: leave schedules out, or use planner 'auto'"
        )


def check_alike(request: PlanRequest, planner: str) -> None:
    """Check that all devices of the cluster are of one kind.

    Raises:
        PlanError: they are not.
    """
    kinds = request.cluster.kinds
    if len(kinds) > 1:
        raise PlanError(
            f"{planner} takes all devices for equal, and {request.cluster.name} has "
            f"{', '.join(kinds)}: use bapipe, hetpipe or auto, or plan for those of one kind"
        )


def likely(request: PlanRequest, proposals: Sequence[Proposal]) -> list[Proposal]:
    """Return the proposals that may fit the memory; all, if none may, so that the error says what
    they need.
    """
    fitting = [proposal for proposal in proposals if may_fit(request, proposal)]
    return fitting or list(proposals)


def may_fit(request: PlanRequest, proposal: Proposal) -> bool:
    """Return whether the stages of a 1F1B with replicas may fit, by a rough estimate without
    simulation and with the most recompute that is allowed.
    """
    replicas = proposal.replicas if isinstance(proposal.replicas, tuple) else (1,) * proposal.stages
    warm_up = dict(proposal.options).get("warm_up") or start_up(replicas)
    if not isinstance(warm_up, tuple):
        return True
    first_layer = first_rank = 0
    for length, count, forwards in zip(proposal.lengths, replicas, warm_up, strict=True):
        in_flight = min(-(-forwards // count), -(-proposal.micro_batches // count))
        needed = _stage_bytes(
            request, proposal, slice(first_layer, first_layer + length), in_flight
        )
        ranks = proposal.devices[first_rank : first_rank + count] or range(
            first_rank, first_rank + count
        )
        if needed > min(request.memory_bytes(rank) for rank in ranks):
            return False
        first_layer, first_rank = first_layer + length, first_rank + count
    return True


def _stage_bytes(request: PlanRequest, proposal: Proposal, part: slice, in_flight: int) -> float:
    """Return the least bytes of a stage's weights and of the activations of `in_flight`
    micro-batches, with the most recompute that is allowed.
    """
    layers = request.profile.layers[part]
    samples = -(-request.batch // proposal.micro_batches)
    recompute = proposal.recompute if request.recompute == "auto" else request.recompute
    activations = samples * sum(layer.activation_bytes_per_sample for layer in layers)
    input_bytes = request.profile.input_bytes_per_sample
    if part.start:
        input_bytes = request.profile.layers[part.start - 1].output_bytes_per_sample
    if recompute is Recompute.NEVER:
        needed = in_flight * activations
    elif recompute != "auto" and recompute.whole:
        needed = (in_flight - 1) * samples * input_bytes + activations
    else:
        # With any selection the first layer saves its input or its activations, and the activations
        # of the largest layer are recomputed.
        first = layers[0].activation_bytes_per_sample + layers[0].entry_bytes_per_sample
        largest = max(layer.activation_bytes_per_sample for layer in layers)
        needed = samples * ((in_flight - 1) * min(input_bytes, first) + largest)
    return needed + sum(
        request.state_per_parameter_byte * layer.parameter_bytes + layer.buffer_bytes
        for layer in layers
    )


def quickest(proposals: Sequence[Proposal], most: int = SIMULATED) -> list[Proposal]:
    """Return the first proposal, and a few more if they are not too large to simulate."""
    selected: list[Proposal] = []
    forwards = 0
    for proposal in proposals[:most]:
        forwards += proposal.stages * proposal.micro_batches
        if selected and forwards > SIMULATED_FORWARDS:
            break
        selected.append(proposal)
    return selected
