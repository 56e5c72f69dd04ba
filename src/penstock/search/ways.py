"""The ways to run that `auto` weighs: schedules with their numbers, the promising ones first; and where each is cut."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from penstock.partition.catalogue import partition
from penstock.schedule.op import Kind, Schedule
from penstock.schedule.period import period_of
from penstock.search.request import PlanRequest
from penstock.simulate.costs import Costs
from penstock.simulate.plan_costs import stage_costs

#: Numbers of micro-batches that are tried: doubling more gains little bubble and pays every call's fixed cost.
MICRO_BATCHES = (1, 2, 4, 8, 16, 32, 64)

#: Stages on one rank that are tried, for schedules that take several.
STAGES_PER_RANK = 4

#: What a cut evens out: the slowest stage or link, or the stage that holds most.
Balance = Literal["time", "memory"]


@dataclass(frozen=True)
class Way:
    """A schedule with its numbers. `estimate_s` sorts the ways, `bound_s` is what no cut can beat."""

    schedule: str
    stages: int
    micro_batches: int
    estimate_s: float
    bound_s: float


def ways(request: PlanRequest) -> list[Way]:
    """All ways to run that the request allows, best estimate first."""
    return sorted(_ways(request), key=lambda way: (way.estimate_s, way.micro_batches, way.stages, way.schedule))


def _ways(request: PlanRequest) -> Iterator[Way]:
    ranks, layers = request.cluster.ranks, len(request.profile)
    counts = [m for m in MICRO_BATCHES if m <= request.batch] if request.micro_batches is None else [request.micro_batches]
    for micro_batches in counts:
        forward, backward, inputs, weights = (
            sum(request.profile.seconds(phase, request.batch / micro_batches))
            for phase in ("forward", "backward", "input_grad", "weight_grad")
        )
        least = forward + min(backward, inputs + weights)
        for facts in request.families():
            single = facts.stages_per_rank == "1"
            # "2" is all that is said where it is always two; elsewhere the family says by refusing.
            pair = 2 if facts.stages_per_rank == "2" else 1
            most = min(ranks if single else ranks * pair if pair > 1 else ranks * STAGES_PER_RANK, layers)
            for stages in range(pair, most + 1, pair) if request.stages is None else (request.stages,):
                used = min(stages, ranks)
                ramp = used - 1 if facts.synchronous else 0
                estimate = (micro_batches + ramp) * (forward + backward) / used
                # All work, shared evenly. Only a schedule of one stage per rank surely has no more ranks than stages, unless
                # it is one whose batches take turns on copies.
                most_ranks = used if single and facts.synchronous else ranks
                yield Way(facts.name, stages, micro_batches, estimate, micro_batches * least / most_ranks)


def cut(request: PlanRequest, stages: int, micro_batches: int, balance: Balance) -> tuple[tuple[int, ...], Costs]:
    """The lengths of the stages and their costs, stage s standing on rank s; cut as the request says, or exactly."""
    profile, cluster = request.profile, request.cluster
    micro_batch = request.batch / micro_batches
    if request.by != "bottleneck":
        # "time" is the one method besides that asks for the size at which costs count.
        sized = {"micro_batch": micro_batch} if request.by == "time" else {}
        lengths = partition(profile, stages, by=request.by, **sized)
    elif balance == "time":
        crossing = micro_batch * sum(layer.output_bytes_per_sample for layer in profile) / len(profile)
        links = [cluster.link(a, b) for a, b in pairwise(range(min(stages, cluster.ranks)))]
        link = max(links, key=lambda each: each.transfer_seconds(crossing), default=cluster.inside)
        lengths = partition(profile, stages, by="bottleneck", micro_batch=micro_batch, latency_s=link.latency_s,
                            bandwidth_bytes_per_s=link.bandwidth_bytes_per_s)  # fmt: skip
    else:
        single = stage_costs(profile, [1] * len(profile), micro_batch, cluster, micro_batches=micro_batches)
        weights, kept = (single.spread(name, len(profile)) or () for name in ("weight_bytes", "activation_bytes"))
        in_flight = min(stages, micro_batches)
        lengths = partition(profile, stages, by="bottleneck",
                            costs=[held + in_flight * each for held, each in zip(weights, kept, strict=True)])  # fmt: skip
    return tuple(lengths), stage_costs(profile, lengths, micro_batch, cluster, micro_batches=micro_batches)


def least_s(made: Schedule, costs: Costs) -> float:
    """Seconds that no step of this schedule undercuts, transfers and updates counted as free; of a stream, no batch.

    For every rank:

        stages before that of its first op, forward  |  its own work up to its last backward  |  the backwards before that

    The sum is valid since a rank is sequential, and its first forward and last backward have those stages before and after them.
    A stream is full: of a rank only its own work counts, in as many batches as it takes until all comes again.
    """
    names = {Kind.F: "forward", Kind.B: "backward", Kind.I: "input_grad", Kind.W: "weight_grad"}
    seconds = {kind: costs.spread(name, made.stages) or () for kind, name in names.items()}
    if made.stream is not None:
        period = period_of(made)
        work = (sum(seconds[op.kind][op.stage] for op in loop if op.kind in seconds) for loop in period.loops)
        return max(work, default=0.0) / period.batches
    down = list(map(min, seconds[Kind.B], seconds[Kind.I]))
    least = 0.0
    for program in made.programs:
        todo = [(op, seconds[op.kind][op.stage] * made.shares[op.micro_batch]) for op in program if op.kind in seconds]
        turns = [i for i, (op, _) in enumerate(todo) if op.kind in (Kind.B, Kind.I)]
        if not turns:
            continue
        first, last = todo[0][0], todo[turns[-1]][0]
        fill = sum(seconds[Kind.F][: first.stage]) * made.shares[first.micro_batch]
        whole = fill + sum(each for _, each in todo)
        behind = sum(down[: last.stage]) * made.shares[last.micro_batch]
        drained = fill + sum(each for _, each in todo[: turns[-1] + 1]) + behind
        least = max(least, whole, drained)
    return least
