"""A planner's plan against what was asked: the planner may be anybody's, and a plan that is not
what was asked for is no answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from penstock.errors import PenstockError, PlanError
from penstock.plan.plan import Plan
from penstock.search.request import PlanRequest
from penstock.simulate.stage_seconds import parts_of
from penstock.units import format_bytes
from penstock.verify.verify import verify

#: Plans of more ops are not verified again: that takes as long as to plan them.
MOST_OPS = 50_000


def checked_plan(plan: Plan, request: PlanRequest, planner: str) -> Plan:
    """The plan with its planner's name, once it is whole and what was asked for.

    Args:
        plan: what the planner returned.
        request: what it was asked.
        planner: its name.

    Raises:
        PlanError: the plan differs from the request, or cannot run; the message has the planner and
        everything that differs.
    """
    if not isinstance(plan, Plan):
        raise PlanError(f"planner {planner!r} returned {type(plan).__name__} and not a Plan")
    try:
        plan.check()
        if sum(map(len, plan.programs)) <= MOST_OPS:
            made = plan.schedule
            verify(made) if made.stream is None else verify(made, weights=plan.weights)
    except PenstockError as error:
        raise PlanError(f"planner {planner!r} returned a plan that cannot run: {error}") from error
    findings = [finding for check in _CHECKS for finding in check(plan, request)]
    if findings:
        lines = "\n  ".join(findings)
        raise PlanError(
            f"planner {planner!r} returned a plan that is not what was asked:\n  {lines}\nAsk another planner, such as 'auto', or mend "
            "this one"
        )
    return replace(plan, planner=planner)


def _model(plan: Plan, request: PlanRequest) -> Iterator[str]:
    profile = request.profile
    if plan.fingerprint != profile.fingerprint or plan.layers != len(profile):
        yield (
            f"model: the plan is for {plan.layers} layers with fingerprint {plan.fingerprint}, the profile has {len(profile)} with "
            f"{profile.fingerprint}"
        )
    if plan.batch != request.batch:
        yield f"batch: {plan.batch} in the plan, {request.batch} asked for"


def _numbers(plan: Plan, request: PlanRequest) -> Iterator[str]:
    rows = (
        ("stages", plan.stages, request.stages),
        ("micro_batches", plan.micro_batches, request.micro_batches),
        ("weights", plan.weights, request.weights),
        ("partition", plan.lengths, None if isinstance(request.by, str) else request.by),
        ("recompute", plan.recompute, None if request.recompute == "auto" else request.recompute),
    )
    for name, has, asked in rows:
        if asked is not None and has != asked:
            yield f"{name}: {has!r} in the plan, {asked!r} asked for"
    if dict(plan.weights_options) != dict(request.weights_options):
        yield (
            f"weights_options: {dict(plan.weights_options)} in the plan, {dict(request.weights_options)} asked for"
        )


def _schedule(plan: Plan, request: PlanRequest) -> Iterator[str]:
    names = {facts.name for facts in request.families()}
    name = plan.schedule_name
    if request.schedules is not None and plan.stages > 1 and name not in names:
        yield f"schedules: {name} in the plan, {', '.join(sorted(names))} asked for"
    synchronous = {facts.synchronous for facts in request.families()}
    if request.schedules is None and plan.synchronous not in synchronous | {True}:
        yield f"asynchronous: {name} is asynchronous, and synchronous schedules were asked for"
    cuts_tokens = plan.slicing is not None and plan.slicing.along == "tokens"
    if request.schedules is None and cuts_tokens:
        yield f"schedules: {name} cuts sequences, which only causal models allow: it must be named"


def _copies(plan: Plan, request: PlanRequest) -> Iterator[str]:
    holders = plan.schedule.ranks_of_stage
    for part, ranks in zip(parts_of(plan.lengths), holders, strict=True):
        for layer in range(part.start, part.stop):
            if len(ranks) > 1 and layer in request.single_copies:
                yield (
                    f"copies: layer {plan.layer_names[layer]} is on ranks {', '.join(map(str, ranks))}, and cannot have copies: "
                    f"{request.single_copies[layer]}"
                )
    most, allowed = max(map(len, holders)), request.max_replicas
    made_of_copies = request.schedules is not None and "replicas" not in dict(plan.schedule_options)
    if allowed is not None and most > allowed and not made_of_copies:
        yield f"max_replicas: a stage has {most} copies in the plan, {allowed} asked for"


def _devices(plan: Plan, request: PlanRequest) -> Iterator[str]:
    cluster = request.cluster
    if plan.cluster_ranks != cluster.ranks or plan.ranks > cluster.ranks:
        yield (
            f"devices: the plan is {plan.ranks} ranks of {plan.cluster_ranks}, and {cluster.name} has {cluster.ranks}"
        )
        return
    devices = plan.devices or tuple(range(plan.ranks))
    for rank, (device, peak) in enumerate(zip(devices, plan.predicted.peak_memory, strict=True)):
        if peak > request.memory_bytes(device):
            yield (
                f"memory: rank {rank} needs {format_bytes(peak)}, and may hold {format_bytes(request.memory_bytes(device))} on device "
                f"{device}"
            )


_CHECKS: tuple[Callable[[Plan, PlanRequest], Iterator[str]], ...] = (
    _model,
    _numbers,
    _schedule,
    _copies,
    _devices,
)
