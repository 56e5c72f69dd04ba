"""AutoPipe's planner: cuts between blocks, by a model of 1F1B's critical path and a local search
around its critical stage.
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
from penstock.search.best_plan import best_plan
from penstock.search.catalogue import register
from penstock.search.planners.autopipe_path import Path, critical_path
from penstock.search.planners.cut_only import allowed, counts_of, stages_of
from penstock.search.planners.layer_costs import LayerCosts, stage_totals
from penstock.search.planners.scope import check_alike, check_scope
from penstock.search.proposal import Objective, Proposal
from penstock.search.request import PlanRequest

#: Maximum number of rounds x stages of all paths that are computed for a plan: about 1 s.
MOST_STEPS = 600_000

Cut = tuple[int, ...]


@register(
    "autopipe",
    source="Liu et al. 2022, AutoPipe, section 3; github.com/HPDL-Group/Merak, autopipe.cpp",
)
def autopipe(request: PlanRequest) -> Plan:
    """Return the plan with the shortest critical path of 1F1B that the search finds, with
    AutoPipe's slicer or without.

    Its blocks are the layers of the profile (in the paper halves of a transformer's), the number of
    stages is one per device unless requested otherwise, and the path is that of twice as many
    micro-batches as stages, whatever the plan has: see `critical_path`. A hop takes the time of the
    median layer's output on the slowest link between neighbours. All numbers of micro-batches are
    simulated under "autopipe", which halves the first of them (as many as the last stage needs to
    bridge the start-up), and under "1f1b"; the best is the plan.

    Raises:
        PlanError: another cut or schedule is requested, devices are of several kinds, or nothing
            fits.
    """
    check_scope(request, "autopipe", "autopipe", "1f1b")
    check_alike(request, "autopipe")
    stages = stages_of(request)
    counts = list(counts_of(request, stages))
    proposals: list[Proposal] = []
    for count in counts:
        costs = LayerCosts.of(request.profile, request.batch / count)
        best = search(
            costs.forward_s,
            costs.backward_s,
            stages,
            _hop_s(request, costs, stages),
            MOST_STEPS // len(counts),
        )
        objective = Objective("critical path of 1F1B, m = 2p", best.path.step_s, "s")
        sliced = _sliced(costs, best.cut, count)
        for schedule in allowed(request, "autopipe", "1f1b"):
            options = (("sliced", sliced),) if schedule == "autopipe" else ()
            proposals.append(Proposal(best.cut, schedule, count, options, objective=objective))
    return best_plan(request, proposals)


def _hop_s(request: PlanRequest, costs: LayerCosts, stages: int) -> float:
    """Return the seconds in which the slowest link between neighbours transfers the output of the
    median layer.
    """
    links = [
        request.cluster.link(a, b) for a, b in pairwise(range(min(stages, request.cluster.ranks)))
    ]
    crossing = median(costs.output_bytes[:-1]) if len(costs) > 1 else 0.0
    return max((link.transfer_seconds(crossing) for link in links), default=0.0)


def _sliced(costs: LayerCosts, cut: Cut, count: int) -> int:
    """Return the number of micro-batches that are halved.

    A half arrives on the last stage after half of the forwards before it, and that stage's
    backwards of the halved micro-batches have to bridge the other half. For equal stages the number
    is (p - 1) f / 2b, as in the schedule "autopipe".
    """
    first = len(costs) - cut[-1]
    other_half, bridged = sum(costs.forward_s[:first]) / 2, sum(costs.backward_s[first:])
    # A quotient that is whole up to rounding must not count one more.
    return count if bridged == 0 else min(count, math.ceil(other_half / bridged - 1e-9))


@final
@dataclass(frozen=True)
class CutPath:
    """A cut and its critical path."""

    cut: Cut
    path: Path


def search(
    forward: Sequence[float],
    backward: Sequence[float],
    stages: int,
    transfer_s: float,
    most_steps: int,
) -> CutPath:
    """Return the best cut that AutoPipe's local search finds.

    It starts with the exact minimax cut of f + b. For each cut in the queue:

    1. stages behind the critical one give their first block to the stage before, as long as that
       stays lighter than the critical stage and the critical stage stays the same: work at the
       front ends sooner in the cool-down;
    2. two more cuts are queued: the critical stage's first block given to the stages before it,
       which are cut again by minimax, and its last block given to the next stage. A cut that was
       tried before, or whose critical stage is later, is left out.

    Args:
        forward, backward: seconds of every block.
        stages: number of stages.
        transfer_s: seconds of a hop.
        most_steps: rounds x stages after which the best so far is returned; the cuts of a
            transformer take far fewer.
    """
    loads = [f + b for f, b in zip(forward, backward, strict=True)]

    def evaluate(cut: Cut) -> CutPath:
        """Return a cut with its critical path."""
        stage_forward, stage_backward = stage_totals(forward, cut), stage_totals(backward, cut)
        return CutPath(cut, critical_path(stage_forward, stage_backward, transfer_s))

    first = evaluate(tuple(minimax(loads, stages)))
    best, queue, tried = first, deque([first]), {first.cut}
    # Every cut costs a path of 2p rounds on p stages.
    remaining = most_steps // (2 * stages * stages)
    while queue and remaining > 0:
        current = queue.popleft()
        for shifted in _shift_towards_front(current, loads, evaluate):
            current, remaining = shifted, remaining - 1
            best = _shorter(best, current)
        best = _shorter(best, current)
        for cut in _relieve_critical(current, loads):
            if cut in tried:
                continue
            tried.add(cut)
            remaining -= 1
            relieved = evaluate(cut)
            if relieved.path.critical <= current.path.critical:
                queue.append(relieved)
    return best


def _shorter(one: CutPath, other: CutPath) -> CutPath:
    """Return the cut with the shorter critical path; of equal ones the first."""
    return min(one, other, key=lambda cut_path: cut_path.path.step_s)


def _shift_towards_front(
    current: CutPath, loads: Sequence[float], evaluate: Callable[[Cut], CutPath]
) -> Iterator[CutPath]:
    """Step 1: yield every intermediate cut, each with one more block moved one stage forward."""
    critical = current.path.critical
    for taker in range(critical + 1, len(current.cut) - 1):
        while current.cut[taker + 1] > 1:
            cut = current.cut
            start = sum(cut[:taker])
            load_after = sum(loads[start : start + cut[taker] + 1])
            first = sum(cut[:critical])
            if load_after >= sum(loads[first : first + cut[critical]]):
                break
            shifted = evaluate(
                (*cut[:taker], cut[taker] + 1, cut[taker + 1] - 1, *cut[taker + 2 :])
            )
            if shifted.path.critical != critical:
                break
            current = shifted
            yield current


def _relieve_critical(current: CutPath, loads: Sequence[float]) -> Iterator[Cut]:
    """Step 2: yield the cuts in which the critical stage has one block less."""
    cut, critical = current.cut, current.path.critical
    if cut[critical] == 1:
        return
    if critical > 0:
        front = sum(cut[:critical]) + 1
        yield (*minimax(loads[:front], critical), cut[critical] - 1, *cut[critical + 1 :])
    if critical < len(cut) - 1:
        yield (*cut[:critical], cut[critical] - 1, cut[critical + 1] + 1, *cut[critical + 2 :])
