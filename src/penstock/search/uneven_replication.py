"""Propose pipelines whose stages have different numbers of replicas: expensive stages many, stages
with many weights one.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import lcm

import numpy as np

from penstock.partition.replicated import replicated_table
from penstock.search.proposal import Proposal
from penstock.search.request import PlanRequest
from penstock.simulate.plan_costs import all_reduce_seconds

#: Clusters of more ranks are not considered: the table of the seconds of all stages grows with the
#: number of ranks.
MOST_RANKS = 128

#: Up to this number of ranks all must be used. Of more ranks some may be left over if the slowest
#: stage is no slower.
FEW = 16

#: Numbers of stages that are tried besides the one with the fastest slowest stage: fewer stages
#: fill and drain faster.
STAGES = (2, 3, 4)

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
            even = lcm(*replicas) * max(1, round(micro_batches / lcm(*replicas)))
            if streams and even <= request.batch and request.micro_batches in (None, even):
                yield Proposal(lengths, "pipedream", even, (("replicas", replicas),))


def _applies(request: PlanRequest) -> bool:
    """Return whether the request allows replicas and leaves the cut free, and the cluster has more
    than two and not too many devices, all of one kind.
    """
    ranks = request.cluster.ranks
    if request.copies_allowed == 1 or request.by != "bottleneck" or not 2 < ranks <= MOST_RANKS:
        return False
    return len({id(request.profile_of(rank)) for rank in range(ranks)}) == 1


def _synchronous_schedules(request: PlanRequest) -> list[str]:
    """Return 1F1B and ZB-H1 as far as they are allowed, else another synchronous schedule with one
    stage per rank, if any.
    """
    names = [
        facts.name
        for facts in request.families()
        if facts.synchronous and facts.stages_per_rank == "1"
    ]
    return [name for name in ("1f1b", "zb-h1") if name in names] or names[:1]


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
        cut = replicated_table(table, None, stages=stages, exactly=use_all)
        if cut is not None:
            unique[tuple(cut)] = None
    return list(unique)


def _micro_batch_counts(request: PlanRequest) -> list[int]:
    """Return the numbers of micro-batches to try: small multiples of the number of ranks."""
    if request.micro_batches is not None:
        return [request.micro_batches]
    ranks = request.cluster.ranks
    return [multiple * ranks for multiple in (1, 2, 4, 8) if multiple * ranks <= request.batch]


def _stage_seconds_table(request: PlanRequest, micro_batches: int) -> np.ndarray:
    """Return the seconds per micro-batch of a stage of layers a … b - 1 on k ranks, shape
    (layers + 1, layers + 1, ranks + 1), indexed [a, b, k].
    """
    profile, cluster, ranks = request.profile, request.cluster, request.cluster.ranks
    micro_batch, layers = request.batch / micro_batches, len(profile)
    work = np.concatenate([[0.0], np.cumsum(profile.step_seconds(micro_batch))])
    parameter_bytes = np.concatenate(
        [[0.0], np.cumsum([layer.parameter_bytes for layer in profile])]
    )
    replicas = np.arange(1, ranks + 1)
    input_s = [0.0] + [
        cluster.transfer_seconds(micro_batch * layer.output_bytes_per_sample, 0, ranks - 1)
        for layer in profile
    ]
    # The seconds of a gradient sync are linear in the bytes: two sizes determine them.
    unit = 1e6
    fixed = np.array([all_reduce_seconds(range(count), 0.0, cluster) for count in replicas])
    slope = (
        np.array([all_reduce_seconds(range(count), unit, cluster) for count in replicas]) - fixed
    )
    seconds = (work[None, :] - work[:, None])[:, :, None] / replicas
    stage_bytes = np.maximum(parameter_bytes[None, :] - parameter_bytes[:, None], 0.0)
    sync_s = (fixed + stage_bytes[:, :, None] / unit * slope) / micro_batches
    table = np.full((layers + 1, layers + 1, ranks + 1), np.inf)
    table[:, :, 1:] = np.maximum(
        np.maximum(seconds, sync_s), np.array(input_s)[:, None, None] / replicas
    )
    return table
