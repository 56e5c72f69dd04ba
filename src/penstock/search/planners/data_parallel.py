"""Data parallelism: the whole model on every device, gradients added up over a ring."""

from __future__ import annotations

from penstock.errors import PlanError
from penstock.plan.plan import Plan
from penstock.search.catalogue import register
from penstock.search.planners.scope import check_scope, may_fit
from penstock.search.proposal import Objective, Proposal
from penstock.search.request import PlanRequest
from penstock.search.score import scored


@register(
    "data-parallel",
    source="gradients averaged over a ring, as in Horovod (Sergeev and Del Balso 2018) and PyTorch's DDP",
)
def data_parallel(request: PlanRequest) -> Plan:
    """Every device computes its share of the batch, then all add up their gradients.

    Where a share does not fit the memory at once, its gradients are accumulated over as few parts
    as do. Each device holds all weights, gradients and optimizer state; there is nothing to cut. It
    is a pipeline of one stage with a copy on every device.

    Raises:
        PlanError: more than one stage is asked for, or a model in its smallest parts does not fit a
        device.
    """
    check_scope(request, "data-parallel", "1f1b", "gpipe")
    if request.stages not in (None, 1):
        raise PlanError(
            f"data-parallel has one stage, and {request.stages} are asked for: ask another planner"
        )
    ranks = min(request.copies_allowed, request.batch)
    if request.micro_batches is not None:
        ranks = min(ranks, request.micro_batches)
    share = request.batch // ranks
    parts = (
        (1,)
        if request.micro_batches is not None
        else tuple(2**power for power in range(share.bit_length()))
    )
    proposals = [_proposal(request, ranks, request.micro_batches or ranks * part) for part in parts]
    fitting = [proposal for proposal in proposals[:-1] if may_fit(request, proposal)]
    for proposal in fitting:
        try:
            return scored(request, proposal)
        except PlanError:
            continue  # that in more parts may fit
    return scored(request, proposals[-1])


def _proposal(request: PlanRequest, ranks: int, micro_batches: int) -> Proposal:
    options = (("replicas", ranks),) if ranks > 1 else ()
    name = "gpipe" if request.schedules is not None and "1f1b" not in request.schedules else "1f1b"
    return Proposal(
        (len(request.profile),),
        name,
        micro_batches,
        options,
        objective=Objective("step", step_seconds(request, ranks, micro_batches), "s"),
    )


def step_seconds(request: PlanRequest, ranks: int, micro_batches: int) -> float:
    """Seconds of a step: the slowest device's parts of the batch one after the other, the ring, the
    update.

        max over ranks( ceil(M / R) (F + B)(batch / M) + update )  +  2 (R - 1) (latency + weights /
                                                                   (R bandwidth))

    F and B are of the whole model for so many samples; latency and bandwidth are of the slowest
    link on the ring. Gradients of one part are added to those of the parts before.
    """
    parameter_bytes = sum(layer.parameter_bytes for layer in request.profile)
    each = -(-micro_batches // ranks)
    profiles = {id(profile): profile for profile in map(request.profile_of, range(ranks))}
    own = max(
        each * sum(profile.step_seconds(request.batch / micro_batches))
        + parameter_bytes * (profile.update_s_per_byte + (each - 1) * profile.accumulate_s_per_byte)
        + (profile.update_fixed_s if parameter_bytes else 0.0)
        for profile in profiles.values()
    )
    if ranks == 1:
        return own
    links = [request.cluster.link(rank, (rank + 1) % ranks) for rank in range(ranks)]
    return own + 2 * (ranks - 1) * max(
        link.transfer_seconds(parameter_bytes / ranks) for link in links
    )
