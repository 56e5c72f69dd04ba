"""Check a planner's plan against the request: planners may be contributed, so their plans are not
trusted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from penstock.errors import PenstockError, PlanError
from penstock.plan.plan import Plan
from penstock.search.instantiate import unreplicable_copies
from penstock.search.request import PlanRequest
from penstock.units import format_bytes
from penstock.verify.verify import verify

#: Plans of more ops are not verified: verification would take as long as planning.
MOST_OPS = 50_000


def checked_plan(plan: Plan, request: PlanRequest, planner: str) -> Plan:
    """Check that a plan can run and matches the request, and return it with its planner's name.

    Args:
        plan: what the planner returned.
        request: what it was given.
        planner: its name.

    Raises:
        PlanError: the plan differs from the request, or cannot run; the message names the planner
            and lists all differences.
    """
    if not isinstance(plan, Plan):
        raise PlanError(f"planner {planner!r} returned {type(plan).__name__} and not a Plan")
    try:
        plan.check()
        if sum(map(len, plan.programs)) <= MOST_OPS:
            schedule = plan.schedule
            if schedule.stream is None:
                verify(schedule)
            else:
                verify(schedule, weights=plan.weights)
    except PenstockError as error:
        raise PlanError(f"planner {planner!r} returned a plan that cannot run: {error}") from error
    findings = [finding for check in _CHECKS for finding in check(plan, request)]
    if findings:
        lines = "\n  ".join(findings)
        raise PlanError(
            f"planner {planner!r} returned a plan that does not match the request:\n  {lines}\n"
            "Use another planner, such as 'auto', or fix this one"
        )
    return replace(plan, planner=planner)


def _check_model(plan: Plan, request: PlanRequest) -> Iterator[str]:
    """Yield differences in the model and the batch."""
    profile = request.profile
    if plan.fingerprint != profile.fingerprint or plan.layers != len(profile):
        yield (
            f"model: the plan is for {plan.layers} layers with fingerprint {plan.fingerprint}, "
            f"the profile has {len(profile)} with {profile.fingerprint}"
        )
    if plan.batch != request.batch:
        yield f"batch: {plan.batch} in the plan, {request.batch} requested"


def _check_numbers(plan: Plan, request: PlanRequest) -> Iterator[str]:
    """Yield differences in values that the request fixes."""
    options = request.sharding_options
    rows = (
        ("stages", plan.stages, request.stages),
        ("micro_batches", plan.micro_batches, request.micro_batches),
        ("weights", plan.weights, request.weights),
        ("partition", plan.lengths, None if isinstance(request.by, str) else request.by),
        ("recompute", plan.recompute, None if request.recompute == "auto" else request.recompute),
        ("tensor_parallel", plan.tensor_parallel, options.tensor_parallel),
        ("sequence_parallel", plan.sequence_parallel, options.sequence_parallel),
        ("zero", plan.zero, options.zero),
    )
    for name, planned, requested in rows:
        if requested is not None and planned != requested:
            yield f"{name}: {planned!r} in the plan, {requested!r} requested"
    if dict(plan.weights_options) != dict(request.weights_options):
        yield (
            f"weights_options: {dict(plan.weights_options)} in the plan, "
            f"{dict(request.weights_options)} requested"
        )


def _check_schedule(plan: Plan, request: PlanRequest) -> Iterator[str]:
    """Yield differences between the plan's schedule and those that the request allows."""
    name = plan.schedule_name
    if request.schedules is not None:
        names = {facts.name for facts in request.families()}
        # In one stage all schedules are the same.
        if plan.stages > 1 and name not in names:
            yield f"schedules: {name} in the plan, {', '.join(sorted(names))} requested"
        return
    synchronous = {facts.synchronous for facts in request.families()}
    if plan.synchronous not in synchronous | {True}:
        yield f"asynchronous: {name} is asynchronous, and synchronous schedules were requested"
    if plan.slicing is not None and plan.slicing.along == "tokens":
        yield f"schedules: {name} cuts sequences, which only causal models allow: it must be named"


def _check_replicas(plan: Plan, request: PlanRequest) -> Iterator[str]:
    """Yield layers that must not be replicated but are, and stages with too many replicas."""
    for layer, ranks in unreplicable_copies(request, plan.schedule, plan.lengths):
        yield (
            f"copies: layer {plan.layer_names[layer]} is on ranks {', '.join(map(str, ranks))}, "
            f"and cannot have copies: {request.unreplicable_layers[layer]}"
        )
    replicas = plan.schedule.copies
    allowed = request.max_replicas
    # A named schedule may consist of replicas, such as Chimera; its options do not ask for them.
    inherent = request.schedules is not None and "replicas" not in dict(plan.schedule_options)
    if allowed is not None and replicas > allowed and not inherent:
        yield f"max_replicas: a stage has {replicas} copies in the plan, {allowed} requested"


def _check_devices(plan: Plan, request: PlanRequest) -> Iterator[str]:
    """Yield ranks that the cluster does not have, and ranks that exceed their memory."""
    cluster = request.cluster
    if plan.cluster_ranks != cluster.ranks or plan.ranks > cluster.ranks:
        yield (
            f"devices: the plan is {plan.ranks} ranks of {plan.cluster_ranks}, and {cluster.name} "
            f"has {cluster.ranks}"
        )
        return
    devices = plan.devices or tuple(range(plan.ranks))
    for rank, (device, peak) in enumerate(zip(devices, plan.predicted.peak_memory, strict=True)):
        limit = request.memory_bytes(device)
        if peak > limit:
            yield (
                f"memory: rank {rank} needs {format_bytes(peak)}, and may hold "
                f"{format_bytes(limit)} on device {device}"
            )


_CHECKS: tuple[Callable[[Plan, PlanRequest], Iterator[str]], ...] = (
    _check_model,
    _check_numbers,
    _check_schedule,
    _check_replicas,
    _check_devices,
)
