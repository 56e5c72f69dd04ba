"""Pipelines in which stages stand on different numbers of ranks: dear stages more often, those with
many weights once.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import lcm

import numpy as np

from penstock.partition.replicated import replicated_table
from penstock.search.proposal import Proposal
from penstock.search.request import PlanRequest
from penstock.simulate.plan_costs import meeting_seconds

#: More ranks than this are shared out evenly only: the table of what every stage would take grows
#: with them.
MOST_RANKS = 128

#: Up to so many ranks all must be used: of more, some may be left over where the slowest stage is
#: none the worse.
FEW = 16

#: Numbers of stages that are tried besides the best by the slowest stage alone: fewer fill and
#: drain faster.
STAGES = (2, 3, 4)


def uneven(request: PlanRequest) -> Iterator[Proposal]:
    """Proposals: for some numbers of micro-batches and of stages, the cut and the copies whose
    slowest stage is fastest.

    A stage on k ranks takes a k-th of its seconds for each micro-batch, or what comes in for it, or
    its part of what k ranks take to add up their gradients, whichever is most. Nothing is proposed
    where devices differ or are more than 128.
    """
    ranks, layers = request.cluster.ranks, len(request.profile)
    alike = len({id(request.profile_of(rank)) for rank in range(ranks)}) == 1
    names = [
        facts.name
        for facts in request.families()
        if facts.synchronous and facts.stages_per_rank == "1"
    ]
    names = [name for name in ("1f1b", "zb-h1") if name in names] or names[:1]
    # A stream goes on from batch to batch, so that every copy needs as many micro-batches of each.
    streams = any(facts.name == "pipedream" for facts in request.families())
    if (
        not alike
        or not request.copies_allowed > 1
        or not 2 < ranks <= MOST_RANKS
        or request.by != "bottleneck"
        or not (names or streams)
    ):
        return
    given = request.stages
    for micro_batches in _counts(request):
        table = _table(request, micro_batches)
        wanted: tuple[int | None, ...] = (
            (None, *(s for s in STAGES if s <= min(layers, ranks))) if given is None else (given,)
        )
        found: dict[tuple[tuple[int, int], ...], None] = {}
        most = min(request.copies_allowed, micro_batches)
        table[:, :, most + 1 :] = np.inf
        for stages in wanted:
            made = replicated_table(
                table, None, stages=stages, exactly=most >= ranks and ranks <= FEW
            )
            if made is not None:
                found[tuple(made)] = None
        for each in found:
            copies = tuple(count for _, count in each)
            if len(set(copies)) > 1:  # others are whole pipelines
                lengths = tuple(length for length, _ in each)
                for name in names:
                    yield Proposal(lengths, name, micro_batches, (("replicas", copies),))
                even = lcm(*copies) * max(1, round(micro_batches / lcm(*copies)))
                if streams and even <= request.batch and request.micro_batches in (None, even):
                    yield Proposal(lengths, "pipedream", even, (("replicas", copies),))


def _counts(request: PlanRequest) -> list[int]:
    """Numbers of micro-batches: as many as ranks, or some times that."""
    if request.micro_batches is not None:
        return [request.micro_batches]
    ranks = request.cluster.ranks
    return [times * ranks for times in (1, 2, 4, 8) if times * ranks <= request.batch]


def _table(request: PlanRequest, micro_batches: int) -> np.ndarray:
    """Shape (layers + 1, layers + 1, ranks + 1): seconds for a micro-batch of the layers a to b on
    k ranks.
    """
    profile, cluster, ranks = request.profile, request.cluster, request.cluster.ranks
    micro_batch, layers = request.batch / micro_batches, len(profile)
    work = np.concatenate([[0.0], np.cumsum(profile.step_seconds(micro_batch))])
    held = np.concatenate([[0.0], np.cumsum([layer.parameter_bytes for layer in profile])])
    copies = np.arange(1, ranks + 1)
    table = np.full((layers + 1, layers + 1, ranks + 1), np.inf)
    comes_in = [0.0] + [
        cluster.transfer_seconds(micro_batch * layer.output_bytes_per_sample, 0, ranks - 1)
        for layer in profile
    ]
    # What a meeting takes is linear in the bytes: two sizes tell it.
    unit = 1e6
    fixed = np.array([meeting_seconds(range(count), 0.0, cluster) for count in copies])
    slope = np.array([meeting_seconds(range(count), unit, cluster) for count in copies]) - fixed
    seconds = (work[None, :] - work[:, None])[:, :, None] / copies
    met = (
        fixed + np.maximum(held[None, :] - held[:, None], 0.0)[:, :, None] / unit * slope
    ) / micro_batches
    table[:, :, 1:] = np.maximum(
        np.maximum(seconds, met), np.array(comes_in)[:, None, None] / copies
    )
    return table
