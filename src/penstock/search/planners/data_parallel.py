"""Data parallelism: the whole model on every device, gradients all-reduced over a ring."""

from __future__ import annotations

from contextlib import suppress

from penstock.errors import PlanError
from penstock.plan.plan import Plan
from penstock.search.best_plan import plan_proposal
from penstock.search.catalogue import register
from penstock.search.planners.scope import check_scope, may_fit
from penstock.search.proposal import Objective, Proposal, replica_options
from penstock.search.request import PlanRequest
from penstock.search.sync_line import ring_seconds


@register(
    "data-parallel",
    source="gradients averaged over a ring, as in Horovod (Sergeev and Del Balso 2018) and PyTorch's DDP",
)
def data_parallel(request: PlanRequest) -> Plan:
    """Return the plan in which every device computes its share of the batch, then all sync their
    gradients.

    Where a share does not fit the memory at once, its gradients are accumulated over as few parts
    as fit. Each device holds all weights, gradients and optimizer states; there is nothing to cut.
    It is a pipeline of one stage with a replica on every device.

    Raises:
        PlanError: more than one stage is requested, or the smallest parts do not fit a device.
    """
    check_scope(request, "data-parallel", "1f1b", "gpipe")
    if request.stages not in (None, 1):
        raise PlanError(
            f"data-parallel has one stage, and {request.stages} are requested: use another planner"
        )
    ranks = min(request.copies_allowed, request.batch)
    if request.micro_batches is not None:
        counts = [request.micro_batches]
        ranks = min(ranks, request.micro_batches)
    else:
        share = request.batch // ranks
        counts = [ranks * 2**power for power in range(share.bit_length())]
    proposals = [_proposal(request, ranks, count) for count in counts]
    for proposal in proposals[:-1]:
        if may_fit(request, proposal):
            with suppress(PlanError):  # smaller parts may fit
                return plan_proposal(request, proposal)
    return plan_proposal(request, proposals[-1])


def _proposal(request: PlanRequest, ranks: int, micro_batches: int) -> Proposal:
    """Return the proposal for these numbers. With one stage 1F1B and GPipe are the same."""
    name = "gpipe" if request.schedules is not None and "1f1b" not in request.schedules else "1f1b"
    return Proposal(
        (len(request.profile),),
        name,
        micro_batches,
        replica_options(ranks),
        objective=Objective("step", step_seconds(request, ranks, micro_batches), "s"),
    )


def step_seconds(request: PlanRequest, ranks: int, micro_batches: int) -> float:
    """Return the seconds of a step: the slowest device's parts of the batch one after the other and
    its update, and the all-reduce.

        max over ranks( ceil(M / R) (F + B)(batch / M) + update )
        + 2 (R - 1) (latency + weights / (R bandwidth))

    F and B are those of the whole model for the given number of samples; latency and bandwidth are
    those of the slowest link on the ring. Accumulating the gradients of each part but the first
    counts too.
    """
    parameter_bytes = request.profile.parameter_bytes
    parts = -(-micro_batches // ranks)
    slowest = max(
        parts * sum(profile.step_seconds(request.batch / micro_batches))
        + profile.update_seconds(parameter_bytes)
        + (parts - 1) * parameter_bytes * profile.accumulate_s_per_byte
        for profile in request.different_profiles(range(ranks))
    )
    return slowest + ring_seconds(range(ranks), parameter_bytes, request.cluster)
