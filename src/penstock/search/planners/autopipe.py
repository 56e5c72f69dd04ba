"""AutoPipe's planner: cuts between blocks, by a model of 1F1B's critical path and a search around
its critical stage.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import final

from penstock.partition.bottleneck import minimax
from penstock.plan.plan import Plan
from penstock.search.catalogue import register
from penstock.search.planners.autopipe_path import Path, critical_path
from penstock.search.planners.layer_costs import LayerCosts
from penstock.search.planners.scope import check_alike, check_scope
from penstock.search.planners.straight import allowed, counts_of, stages_of
from penstock.search.proposal import Objective, Proposal
from penstock.search.request import PlanRequest
from penstock.search.score import best_of

#: Rounds x stages of all paths that are reckoned for a plan: about 1 s.
MOST_STEPS = 600_000

Cut = tuple[int, ...]


@register(
    "autopipe",
    source="Liu et al. 2022, AutoPipe, section 3; github.com/HPDL-Group/Merak, autopipe.cpp",
)
def autopipe(request: PlanRequest) -> Plan:
    """The cut with the shortest critical path of 1F1B that the search finds, run with its slicer or
    without.

    Its blocks are a profile's layers (in the paper halves of a transformer's), the number of stages
    is one on each device unless asked otherwise, and the path is that of twice as many
    micro-batches, whatever the plan has: see `critical_path`. A hop takes what the median layer's
    output does on the slowest link between neighbours. All numbers of micro-batches are simulated
    under "autopipe", which cuts the first of them in two (as many as the last stage needs to bridge
    the start-up), and under "1f1b"; the best is taken.

    Raises:
        PlanError: another cut or schedule is asked for, devices are of several kinds, or nothing
        fits.
    """
    check_scope(request, "autopipe", "autopipe", "1f1b")
    check_alike(request, "autopipe")
    stages = stages_of(request)
    counts = list(counts_of(request, stages))
    proposals: list[Proposal] = []
    for count in counts:
        costs = LayerCosts.of(request.profile, request.batch / count)
        found = search(
            costs.forward_s,
            costs.backward_s,
            stages,
            _hop_s(request, costs, stages),
            MOST_STEPS // len(counts),
        )
        objective = Objective("critical path of 1F1B, m = 2p", found.path.step_s, "s")
        sliced = _sliced(costs, found.cut, count)
        for schedule in allowed(request, "autopipe", "1f1b"):
            options = (("sliced", sliced),) if schedule == "autopipe" else ()
            proposals.append(Proposal(found.cut, schedule, count, options, objective=objective))
    return best_of(request, proposals)


def _hop_s(request: PlanRequest, costs: LayerCosts, stages: int) -> float:
    links = [
        request.cluster.link(a, b) for a, b in pairwise(range(min(stages, request.cluster.ranks)))
    ]
    crossing = median(costs.output_bytes[:-1]) if len(costs) > 1 else 0.0
    return max((link.transfer_seconds(crossing) for link in links), default=0.0)


def _sliced(costs: LayerCosts, cut: Cut, count: int) -> int:
    """How many micro-batches are halved: a half arrives on the last stage after half of the
    forwards before it, and that stage's backwards of the halved ones have to bridge the other half.
    For equal stages (p - 1) f / 2b, as of the schedule "autopipe".
    """
    first = len(costs) - cut[-1]
    other_half, bridged = sum(costs.forward_s[:first]) / 2, sum(costs.backward_s[first:])
    return count if bridged == 0 else min(count, math.ceil(other_half / bridged - 1e-9))


@final
@dataclass(frozen=True)
class Found:
    """A cut and its path."""

    cut: Cut
    path: Path


def search(
    forward: Sequence[float],
    backward: Sequence[float],
    stages: int,
    transfer_s: float,
    most_steps: int,
) -> Found:
    """The best cut that AutoPipe's local search meets.

    It begins with the exact minimax cut of f + b. Of each cut that waits in the queue:

    1. stages behind the critical one hand their first block to the stage before, while that stays
       lighter than the critical one and the critical stage stays the same: work at the front is
       over sooner in the cool-down;
    2. two more cuts are queued: the critical stage's first block given to the stages before it,
       which are cut anew by minimax, and its last block given to the next stage. A cut whose
       critical stage is later is left out, and one that was met before.

    Args:
        forward, backward: seconds of every block.
        stages: how many stages to make.
        transfer_s: of a hop.
        most_steps: rounds x stages after which the best so far is taken; the cuts of a transformer
        take far fewer.
    """
    loads = [f + b for f, b in zip(forward, backward, strict=True)]

    def weighed(cut: Cut) -> Found:
        ends = [sum(cut[: stage + 1]) for stage in range(stages)]
        parts = [slice(end - length, end) for end, length in zip(ends, cut, strict=True)]
        return Found(
            cut,
            critical_path(
                [sum(forward[p]) for p in parts], [sum(backward[p]) for p in parts], transfer_s
            ),
        )

    start = weighed(tuple(minimax(loads, stages)))
    best, queue, met = start, deque([start]), {start.cut}
    left = most_steps // (2 * stages * stages)
    while queue and left > 0:
        found = queue.popleft()
        for after in _handed_forward(found, loads, weighed):
            found, left = after, left - 1
            best = min(best, found, key=lambda each: each.path.step_s)
        best = min(best, found, key=lambda each: each.path.step_s)
        for cut in _relieved(found, loads):
            if cut in met:
                continue
            met.add(cut)
            left -= 1
            after = weighed(cut)
            if after.path.critical <= found.path.critical:
                queue.append(after)
    return best


def _handed_forward(
    found: Found, loads: Sequence[float], weighed: Callable[[Cut], Found]
) -> Iterator[Found]:
    """Step 1: every cut on the way, one block further each time."""
    critical = found.path.critical
    for taker in range(critical + 1, len(found.cut) - 1):
        while found.cut[taker + 1] > 1:
            cut = found.cut
            start = sum(cut[:taker])
            light = sum(loads[start : start + cut[taker] + 1])
            first = sum(cut[:critical])
            if light >= sum(loads[first : first + cut[critical]]):
                break
            after = weighed((*cut[:taker], cut[taker] + 1, cut[taker + 1] - 1, *cut[taker + 2 :]))
            if after.path.critical != critical:
                break
            found = after
            yield found


def _relieved(found: Found, loads: Sequence[float]) -> Iterator[Cut]:
    """Step 2: the cuts in which the critical stage has a block less."""
    cut, critical = found.cut, found.path.critical
    if cut[critical] == 1:
        return
    if critical > 0:
        front = sum(cut[:critical]) + 1
        yield (*minimax(loads[:front], critical), cut[critical] - 1, *cut[critical + 1 :])
    if critical < len(cut) - 1:
        yield (*cut[:critical], cut[critical] - 1, cut[critical + 1] + 1, *cut[critical + 2 :])
