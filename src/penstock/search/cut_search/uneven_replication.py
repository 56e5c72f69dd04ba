"""Propose pipelines whose stages have different numbers of replicas: expensive stages many, stages
with many weights one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cache
from itertools import product
from math import lcm

import numpy as np

from penstock.errors import ScheduleError
from penstock.partition.replicated import replicated_table
from penstock.plan.plan import Option
from penstock.schedule.catalogue import schedule
from penstock.search.cut_search.cut_bounds import ROUNDING, all_cuts, lengths_of, stage_sums
from penstock.search.cuts import layer_bytes
from penstock.search.planners.layer_costs import Numbers, before
from penstock.search.proposal import Proposal
from penstock.search.request import PlanRequest
from penstock.search.search_space import Configuration
from penstock.search.shapes import Shape, placements
from penstock.search.sync_line import sync_line

#: Clusters of more ranks are not considered: the table of the seconds of all stages grows with the
#: number of ranks.
MOST_RANKS = 128

#: Up to this number of ranks all must be used. Of more ranks some may be left over if the slowest
#: stage is no slower.
FEW = 16

#: Up to this number of ranks every schedule is proposed with replicas, on more only two.
ALL_SCHEDULES = 8

#: Up to this number of ranks every number of replicas of every stage is tried with every cut.
MOST_ENUMERATED = 4

#: Numbers of stages that are tried besides the one with the fastest slowest stage: fewer stages
#: fill and drain faster.
STAGES = (2, 3, 4)

#: What recompute of everything multiplies the seconds by, if a backward takes two forwards.
RECOMPUTED = 4 / 3

#: A cut with replicas: per stage, its number of layers and its number of ranks.
ReplicatedCut = tuple[tuple[int, int], ...]


def uneven(request: PlanRequest) -> Iterator[Proposal]:
    """Yield, for some numbers of micro-batches and of stages, the cut and the replicas whose
    slowest stage is fastest.

    The time of a stage on k ranks per micro-batch is the largest of: a k-th of its seconds, its
    share of its input's transfer, and its share of the gradient sync among k ranks. Nothing is
    proposed for devices of different kinds or more than 128.
    """
    schedules = _synchronous_schedules(request)
    # A stream continues from batch to batch, so that the micro-batches of each batch must divide
    # evenly among the replicas of every stage.
    streams = any(facts.name == "pipedream" for facts in request.families())
    if not _applies(request) or not (schedules or streams):
        return
    for micro_batches in _micro_batch_counts(request):
        for cut in _cuts(request, micro_batches):
            replicas = tuple(count for _, count in cut)
            if len(set(replicas)) == 1:
                # Equal numbers of replicas are whole pipelines, which the search space covers.
                continue
            lengths = tuple(length for length, _ in cut)
            for name in schedules:
                yield Proposal(lengths, name, micro_batches, (("replicas", replicas),))
            # A stream needs as many micro-batches of a batch on every replica of a stage.
            multiple = lcm(*replicas)
            even_count = multiple * max(1, round(micro_batches / multiple))
            is_requested = request.micro_batches in (None, even_count)
            if streams and even_count <= request.batch and is_requested:
                yield Proposal(lengths, "pipedream", even_count, (("replicas", replicas),))


def uneven_placements(request: PlanRequest) -> Iterator[tuple[Shape, list[Proposal]]]:
    """Yield, on few ranks, the numbers of replicas per stage that differ, each with one proposal
    per placement: that with the least estimate over cuts and numbers of micro-batches. Those with
    the least estimates come first.

    The shape has the ranks of the numbers of replicas, and the first devices. Proposals have the
    leading schedule, to compare placements. Nothing is yielded on more ranks.
    """
    ranks = request.cluster.ranks
    names = _synchronous_schedules(request)
    if not _allows_replicas(request) or ranks > MOST_ENUMERATED or not names:
        return
    single_pipelines = [shape for shape in placements(request) if shape.pipelines == 1]
    for replicas in _uneven_counts(request):
        rank_count = sum(replicas)
        default = Shape(1, rank_count, tuple(range(rank_count)))
        choices = [shape for shape in single_pipelines if shape.ranks == rank_count] or [default]
        counts = [n for n in _micro_batch_counts(request) if n >= max(replicas)]
        options: tuple[tuple[str, Option], ...] = (("replicas", replicas),)
        proposals: list[tuple[float, Proposal]] = []
        for shape in choices if counts else []:
            estimates = [_estimate(request, shape, replicas, count) for count in counts]
            estimate_s, micro_batches, lengths = min(estimates)
            proposal = Proposal(lengths, names[0], micro_batches, options, devices=shape.devices)
            proposals.append((estimate_s, proposal))
        proposals.sort(key=lambda pair: pair[0])
        yield default, [proposal for _, proposal in proposals]


def _estimate(
    request: PlanRequest, shape: Shape, replicas: tuple[int, ...], micro_batches: int
) -> tuple[float, int, tuple[int, ...]]:
    """Return the estimated seconds per step of the best cut, the number of micro-batches, and the
    lengths of that cut: the work of the slowest stage, and the path of a micro-batch through all;
    longer where memory does not suffice without recompute.
    """
    ends = all_cuts(len(request.profile), len(replicas))
    stage_s = np.zeros((len(ends), len(replicas)))
    memory_share = np.zeros_like(stage_s)
    weights, activations = map(np.array, layer_bytes(request, micro_batches))
    first = 0
    for stage, count in enumerate(replicas):
        devices = shape.devices[first : first + count]
        first += count
        layer_s = np.max([request.work_seconds(rank, micro_batches) for rank in devices], axis=0)
        stage_ends = ends[:, stage : stage + 2]
        stage_s[:, stage] = stage_sums(stage_ends, layer_s)[:, 0]
        # As in 1F1B, whose micro-batches in flight the replicas of a stage divide.
        in_flight = -(-(len(replicas) - stage) // count)
        stage_bytes = stage_sums(stage_ends, weights + in_flight * activations)[:, 0]
        memory_share[:, stage] = stage_bytes / min(map(request.memory_bytes, devices))
    slowest = (stage_s / np.array(replicas)).max(axis=1)
    seconds = micro_batches * slowest + stage_s.sum(axis=1)
    seconds[(memory_share > 1).any(axis=1)] *= RECOMPUTED
    best = int(np.argmin(seconds))
    return float(seconds[best]), micro_batches, lengths_of(ends[best])


def uneven_configurations(
    request: PlanRequest, placed: Iterable[tuple[tuple[int, ...], Shape]]
) -> list[Configuration]:
    """Return the configurations with these numbers of replicas per stage on these devices, so that
    each can be tried with every cut.
    """
    names = _synchronous_schedules(request)
    configurations = []
    for replicas, shape in placed:
        for micro_batches in _micro_batch_counts(request):
            if max(replicas) > micro_batches:
                continue
            bound_s = _bound_s(request, shape, replicas, micro_batches)
            options: tuple[tuple[str, Option], ...] = (("replicas", replicas),)
            for name in names:
                configuration = Configuration(
                    shape, name, len(replicas), micro_batches, options, bound_s, bound_s
                )
                configurations.append(configuration)
    return configurations


def _uneven_counts(request: PlanRequest) -> Iterator[tuple[int, ...]]:
    """Yield all numbers of replicas per stage that are not all equal, on all ranks or fewer."""
    ranks, layers = request.cluster.ranks, len(request.profile)
    for stages in range(2, min(ranks, layers) + 1):
        if request.stages not in (None, stages):
            continue
        for replicas in product(range(1, request.copies_allowed + 1), repeat=stages):
            if sum(replicas) <= ranks and len(set(replicas)) > 1:
                yield replicas


def _bound_s(
    request: PlanRequest, shape: Shape, replicas: tuple[int, ...], micro_batches: int
) -> float:
    """Return a lower bound in seconds per step over all cuts: the work of the slowest stage, shared
    by its ranks, on the fastest of the devices.
    """
    # One rank of each kind is enough: all of a kind have the same seconds.
    of_kind = {id(request.profile_of(rank)): rank for rank in shape.devices}
    layer_s = np.min(
        [request.work_seconds(rank, micro_batches) for rank in of_kind.values()], axis=0
    )
    ends = all_cuts(len(request.profile), len(replicas))
    stage_s = stage_sums(ends, layer_s) / np.array(replicas)
    slowdown = min(request.cluster.slowdown(rank, shape.devices) for rank in shape.devices)
    least: float = stage_s.max(axis=1).min()
    # A bound must not exceed the time itself by rounding.
    return micro_batches * least * slowdown * (1 - ROUNDING)


def _applies(request: PlanRequest) -> bool:
    """Return whether `uneven` proposes anything: not for devices of several kinds."""
    kinds = request.different_profiles(range(request.cluster.ranks))
    return _allows_replicas(request) and len(kinds) == 1


def _allows_replicas(request: PlanRequest) -> bool:
    """Return whether the request allows replicas and leaves the cut free, and the cluster has more
    than two and not too many devices.
    """
    ranks = request.cluster.ranks
    return request.copies_allowed > 1 and request.by == "bottleneck" and 2 < ranks <= MOST_RANKS


def _synchronous_schedules(request: PlanRequest) -> list[str]:
    """Return all synchronous schedules with one stage per rank on few ranks; on more 1F1B and ZB-H1
    as far as they are allowed, else another such schedule, if any.
    """
    names = [
        facts.name
        for facts in request.families()
        if facts.synchronous and facts.stages_per_rank == "1" and _takes_uneven_replicas(facts.name)
    ]
    leading: list[str] = [name for name in ("1f1b", "zb-h1") if name in names] or names[:1]
    if request.cluster.ranks > ALL_SCHEDULES:
        return leading
    return [*leading, *(name for name in names if name not in leading)]


@cache
def _takes_uneven_replicas(name: str) -> bool:
    """Return whether a schedule can have stages with different numbers of ranks."""
    try:
        schedule(name, 4, 8, replicas=(2, 1, 1, 1))
    except ScheduleError:
        # Only the generator knows: the catalogue has no fact for this.
        return False
    return True


def _cuts(request: PlanRequest, micro_batches: int) -> list[ReplicatedCut]:
    """Return the best cut for each number of stages to try, without duplicates."""
    ranks, layers = request.cluster.ranks, len(request.profile)
    table = _stage_seconds_table(request, micro_batches)
    most = min(request.copies_allowed, micro_batches)
    table[:, :, most + 1 :] = np.inf
    stage_counts: list[int | None] = [request.stages]
    if request.stages is None:
        stage_counts += [stages for stages in STAGES if stages <= min(layers, ranks)]
    use_all = most >= ranks and ranks <= FEW
    unique: dict[ReplicatedCut, None] = {}
    for stages in stage_counts:
        cut = replicated_table(table, stages=stages, exactly=use_all)
        if cut is not None:
            unique[tuple(cut)] = None
    return list(unique)


def _micro_batch_counts(request: PlanRequest) -> list[int]:
    """Return the numbers of micro-batches to try: small multiples of the number of ranks, and on
    few ranks also those of other configurations.
    """
    if request.micro_batches is not None:
        return [request.micro_batches]
    ranks = request.cluster.ranks
    counts = {multiple * ranks for multiple in (1, 2, 4, 8) if multiple * ranks <= request.batch}
    if ranks <= MOST_ENUMERATED:
        counts.update(request.micro_batch_counts())
    return sorted(counts)


def _stage_seconds_table(request: PlanRequest, micro_batches: int) -> Numbers:
    """Return the seconds per micro-batch of a stage of layers a … b - 1 on k ranks, shape
    (layers + 1, layers + 1, ranks + 1), indexed [a, b, k]; infinite on 0 ranks.

    The largest of three times counts: a k-th of the work, a k-th of the transfer into the stage,
    and the all-reduce of its gradients, once per batch, shared by the micro-batches.
    """
    profile, cluster, ranks = request.profile, request.cluster, request.cluster.ranks
    micro_batch, layers = request.batch / micro_batches, len(profile)
    replicas = np.arange(1, ranks + 1)
    work_before = before(tuple(profile.step_seconds(micro_batch)))
    work_s = (work_before[None, :] - work_before[:, None])[:, :, None] / replicas
    input_s = np.zeros(layers + 1)
    for index, layer in enumerate(profile):
        output_bytes = micro_batch * layer.output_bytes_per_sample
        input_s[index + 1] = cluster.transfer_seconds(output_bytes, 0, ranks - 1)
    bytes_before = before(tuple(float(layer.parameter_bytes) for layer in profile))
    stage_bytes = np.maximum(bytes_before[None, :] - bytes_before[:, None], 0.0)
    lines = np.array([sync_line(range(count), cluster) for count in replicas])
    latency_s, s_per_byte = lines.T
    sync_s = (latency_s + stage_bytes[:, :, None] * s_per_byte) / micro_batches
    table = np.full((layers + 1, layers + 1, ranks + 1), np.inf)
    table[:, :, 1:] = np.maximum(np.maximum(work_s, sync_s), input_s[:, None, None] / replicas)
    return table
