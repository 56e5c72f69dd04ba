"""DAPPLE's planner: cuts, replicas of stages and their places with the least latency by its pivot
formula.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import comb, prod

from penstock.cluster.cluster import Cluster
from penstock.errors import PlanError
from penstock.plan.plan import Plan
from penstock.schedule.replicas import start_up
from penstock.search.best_plan import best_plan
from penstock.search.catalogue import register
from penstock.search.planners.dapple_places import Network
from penstock.search.planners.dapple_search import Placed, Task, devices_of, search
from penstock.search.planners.layer_costs import LayerCosts
from penstock.search.planners.replicated_stages import links_inside
from penstock.search.planners.scope import check_alike, check_scope, likely, quickest
from penstock.search.proposal import Objective, Proposal, replica_options
from penstock.search.request import PlanRequest

#: Size of the search in steps, layers x states of the devices x ways to place a stage: the most
#: that it may have, which takes some seconds; and the size above which only a few numbers of
#: micro-batches are searched.
MOST_STEPS, MANY_STEPS = 1.5e6, 2e5
FEW_COUNTS = (8, 32)

#: Policy B is used if the slowest transfer takes this share of the mean stage's forward and
#: backward. The paper says "notable"; this share costs policy A a tenth of a step.
NOTABLE = 0.05


@register(
    "dapple",
    source="Fan et al. 2021, DAPPLE (arXiv 2007.01045), section 4; github.com/AlibabaPAI/DAPPLE",
)
def dapple(request: PlanRequest) -> Plan:
    """Return the plan that simulates fastest among the pipelines with the least
    L = T_w + T_s + T_e.

    The paper takes the micro-batch as given; this planner searches several numbers of
    micro-batches, and simulates the pipelines with the least L. The paper's runtime splits a
    micro-batch over a stage's k replicas; this library gives whole micro-batches to the replicas in
    turn, so that a plan has k times as many of them, of the size of the paper's shares, where the
    batch has samples for that.

    Policy A (a stage runs as many forwards ahead as there are stages from it to the last) is
    "1f1b"; policy B (up to twice as many) is used where transfers are notable, unless only A fits
    the memory.

    Raises:
        PlanError: devices are of different kinds; there are too many of them for the search; or
            nothing fits.
    """
    check_scope(request, "dapple", "1f1b")
    check_alike(request, "dapple")
    nodes = request.cluster.by_node(range(request.cluster.ranks))
    steps = _search_size(nodes, len(request.profile))
    if steps > MOST_STEPS:
        raise PlanError(
            f"dapple's search has some {steps:.0e} ways to place stages of {len(request.profile)} "
            f"layers on {request.cluster.name}, and is not made for more than {MOST_STEPS:.0e}: "
            "use fewer devices, or merge layers"
        )
    candidates: list[tuple[Placed, int]] = []
    for count in _counts(request, is_large=steps > MANY_STEPS):
        task = _task(request, nodes, count)
        for placed in search(task, max(1, 32 // request.cluster.ranks)):
            candidates.append((placed, count))
    if not candidates:
        raise PlanError(
            f"dapple finds no pipeline of {request.stages} stages for {request.cluster.name}: it "
            "needs a device for each"
        )
    candidates.sort(key=lambda candidate: (candidate[0].seconds, len(candidate[0].stages)))
    proposals: dict[Proposal, None] = {}
    for placed, count in candidates:
        proposals.update(dict.fromkeys(_proposals(request, placed, count, nodes)))
    return best_plan(request, quickest(likely(request, list(proposals)), 8))


def _search_size(nodes: Sequence[Sequence[int]], layers: int) -> int:
    """Return the approximate number of steps of the search: layers, numbers of devices used of each
    node, and policies with numbers of devices.
    """
    # Nodes of equal size are interchangeable.
    sizes = Counter(map(len, nodes))
    devices = sum(map(len, nodes))
    states = prod(comb(size + count, count) for size, count in sizes.items())
    return layers * states * devices * (3 if 1 < len(nodes) < devices else 1)


def _counts(request: PlanRequest, *, is_large: bool) -> list[int]:
    """Return the numbers of the paper's micro-batches to search with; each stands for one or more
    micro-batches of this library. If the search is large (`is_large`), few are tried.
    """
    counts = list(request.micro_batch_counts(request.copies_allowed))
    if request.micro_batches is not None:
        most = request.micro_batches
        counts = [count for count in range(1, most + 1) if most % count == 0]
    few = [count for count in counts if count in FEW_COUNTS]
    return (few or counts[-1:]) if is_large else counts


def _task(request: PlanRequest, nodes: Sequence[Sequence[int]], count: int) -> Task:
    """Return the search for `count` micro-batches, with the costs for every number of replicas."""
    samples = request.batch / count
    # This library gives every replica a micro-batch of its own, the paper at least one sample.
    most = max(1, min(request.copies_allowed, int(samples), request.micro_batches or request.batch))
    costs = [LayerCosts.of(request.profile, samples / replicas) for replicas in range(1, most + 1)]
    return Task(costs, tuple(map(len, nodes)), network_of(request.cluster), count, request.stages)


def network_of(cluster: Cluster) -> Network:
    """Return the links of a cluster as the planner sees them; if the links inside nodes differ, the
    slowest.
    """
    inside = links_inside(cluster)
    return Network(
        (
            max(link.latency_s for link in inside),
            max(1 / link.bandwidth_bytes_per_s for link in inside),
        ),
        (cluster.between.latency_s, 1 / cluster.between.bandwidth_bytes_per_s),
    )


def _proposals(
    request: PlanRequest, placed: Placed, count: int, nodes: Sequence[Sequence[int]]
) -> list[Proposal]:
    """Return proposals for a pipeline: with one of this library's micro-batches per share of the
    paper's, and with one per micro-batch; policy B before A.
    """
    replicas = tuple(sum(place) for *_, place in placed.stages)
    samples = request.batch / count
    shares = count * max(replicas)
    requested = request.micro_batches
    counts = [shares, count] if requested is None else [requested]
    basic = replica_options(replicas)
    options = [basic]
    if _activation_communication_ratio(request, placed, samples) >= NOTABLE:
        options.insert(0, (*basic, ("warm_up", warm_up_of_policy_b(replicas))))
    devices: list[int] = []
    for ranks in devices_of(placed, nodes):
        devices += ranks
    lengths = tuple(stop - start for start, stop, _ in placed.stages)
    objective = Objective(f"L of {count} micro-batches", placed.seconds, "s")
    return [
        Proposal(
            lengths,
            "1f1b",
            micro_batches,
            schedule_options,
            devices=tuple(devices),
            objective=objective,
        )
        for micro_batches in counts
        if max(replicas) <= micro_batches <= request.batch
        for schedule_options in options
    ]


def _activation_communication_ratio(request: PlanRequest, placed: Placed, samples: float) -> float:
    """Return the paper's ACR: the slowest transfer between stages over the mean compute of a stage,
    both in seconds.
    """
    if len(placed.stages) == 1:
        return 0.0
    network, profile = network_of(request.cluster), request.profile
    hops, work = [], []
    for stage, (start, stop, place) in enumerate(placed.stages):
        work.append(sum(profile.step_seconds(samples / sum(place))[start:stop]))
        if stage:
            latency, per_byte = network.transfer(placed.stages[stage - 1][2], place)
            hops.append(
                latency + per_byte * samples * profile.layers[start - 1].output_bytes_per_sample
            )
    return max(hops) * len(work) / sum(work) if sum(work) else 0.0


def warm_up_of_policy_b(replicas: Sequence[int]) -> tuple[int, ...]:
    """Return policy B for stages with replicas: per stage, the forwards that its ranks together run
    before the first backward. Where policy A runs w + 1 on each rank, as PipeDream's start-up rule
    says, B runs 2w + 1.

    >>> warm_up_of_policy_b((1, 1, 1, 1)), warm_up_of_policy_b((2, 2))
    ((7, 5, 3, 1), (6, 2))
    """
    return start_up(replicas, factor=2)
