"""DAPPLE's planner: cuts, copies of stages and their places for the least latency by its pivot
formula.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import accumulate
from math import comb, prod

from penstock.cluster.cluster import Cluster
from penstock.errors import PlanError
from penstock.plan.plan import Option, Plan
from penstock.search.catalogue import register
from penstock.search.planners.dapple_places import Network
from penstock.search.planners.dapple_search import Placed, Task, devices_of, search
from penstock.search.planners.layer_costs import LayerCosts
from penstock.search.planners.scope import check_alike, check_scope, likely, nodes_of, quickest
from penstock.search.proposal import Objective, Proposal
from penstock.search.request import PlanRequest
from penstock.search.score import best_of

#: Layers x states of the devices x ways to place a stage that the search may take, which is some
#: seconds; and beyond which it is only
#: asked for a few numbers of micro-batches.
MOST_WAYS, MANY_WAYS = 1.5e6, 2e5
FEW_COUNTS = (8, 32)

#: Policy B from here on: the slowest transfer over the mean stage's forward and backward. The paper
#: says "notable"; so much costs
#: policy A a tenth of a step.
NOTABLE = 0.05


@register(
    "dapple",
    source="Fan et al. 2021, DAPPLE (arXiv 2007.01045), section 4; github.com/AlibabaPAI/DAPPLE",
)
def dapple(request: PlanRequest) -> Plan:
    """The pipelines with the least L = T_w + T_s + T_e, of which the fastest in simulation is the
    plan.

    The paper takes the micro-batch as given: here several numbers of micro-batches are searched,
    and the pipelines with the least L simulated. Its runtime splits a micro-batch over a stage's k
    copies; ours gives whole micro-batches to the copies in turn, so a plan runs with k times as
    many of them, of the same size as the paper's shares, where the batch has samples for that.

    Policy A (a stage runs as many forwards ahead as there are stages from it on) is "1f1b"; policy
    B (up to twice as many) is taken where transfers are notable, unless only A fits the memory.

    Raises:
        PlanError: devices are of different kinds; there are too many of them for the search; or
        nothing fits.
    """
    check_scope(request, "dapple", "1f1b")
    check_alike(request, "dapple")
    nodes = nodes_of(request.cluster)
    ways = _ways(nodes, len(request.profile))
    if ways > MOST_WAYS:
        raise PlanError(
            f"dapple's search has some {ways:.0e} ways to place stages of {len(request.profile)} layers on "
            f"{request.cluster.name}, and is not made for more than {MOST_WAYS:.0e}: use fewer devices, or merge layers"
        )
    found: list[tuple[Placed, int]] = []
    for count in _counts(request, many=ways > MANY_WAYS):
        found += [
            (each, count)
            for each in search(_task(request, nodes, count), max(1, 32 // request.cluster.ranks))
        ]
    if not found:
        raise PlanError(
            f"dapple finds no pipeline of {request.stages} stages for {request.cluster.name}: it needs a device for each"
        )
    found.sort(key=lambda each: (each[0].seconds, len(each[0].stages)))
    proposals: dict[Proposal, None] = {}
    for placed, count in found:
        proposals.update(dict.fromkeys(_proposals(request, placed, count, nodes)))
    return best_of(request, quickest(likely(request, list(proposals)), 8))


def _ways(nodes: Sequence[Sequence[int]], layers: int) -> int:
    """About how many steps the search has: layers, numbers of devices used of each node, and
    policies with numbers of devices.
    """
    sizes = Counter(map(len, nodes))
    devices = sum(map(len, nodes))
    states = prod(
        comb(size + count, count) for size, count in sizes.items()
    )  # nodes of equal size are alike
    return layers * states * devices * (3 if 1 < len(nodes) < devices else 1)


def _counts(request: PlanRequest, *, many: bool) -> list[int]:
    """Numbers of the paper's micro-batches to search with. Each of them is one or more of ours."""
    counts = list(request.micro_batch_counts(request.copies_allowed))
    if request.micro_batches is not None:
        most = request.micro_batches
        counts = [each for each in range(1, most + 1) if most % each == 0]
    few = [each for each in counts if each in FEW_COUNTS]
    return (few or counts[-1:]) if many else counts


def _task(request: PlanRequest, nodes: Sequence[Sequence[int]], count: int) -> Task:
    samples = request.batch / count
    # Our runtime gives every copy a micro-batch of its own, the paper's a sample at least.
    copies = max(
        1, min(request.copies_allowed, int(samples), request.micro_batches or request.batch)
    )
    whole = LayerCosts.of(request.profile, samples)
    costs = [
        whole,
        *(LayerCosts.of(request.profile, samples / each) for each in range(2, copies + 1)),
    ]
    return Task(costs, tuple(map(len, nodes)), network_of(request.cluster), count, request.stages)


def network_of(cluster: Cluster) -> Network:
    """The links of a cluster as the planner sees them; of nodes with different links inside the
    slowest counts.
    """
    inside = [cluster.inside, *(link for _, link in cluster.insides)]
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
    """The same pipeline with one of our micro-batches for each of the paper's, and with one for
    each share; policy B before A.
    """
    replicas = tuple(sum(place) for *_, place in placed.stages)
    samples = request.batch / count
    shares = count * max(replicas)
    counts = [each for each in (shares, count) if max(replicas) <= each <= request.batch]
    if request.micro_batches is not None:
        counts = [request.micro_batches] if max(replicas) <= request.micro_batches else []
    basic: tuple[tuple[str, Option], ...] = (
        () if set(replicas) == {1} else (("replicas", replicas),)
    )
    options = [basic]
    if _ratio(request, placed, samples) >= NOTABLE:
        options.insert(0, (*basic, ("warm_up", twice_ahead(replicas))))
    return [
        Proposal(
            tuple(stop - start for start, stop, _ in placed.stages),
            "1f1b",
            each,
            more,
            devices=tuple(rank for ranks in devices_of(placed, nodes) for rank in ranks),
            objective=Objective(f"L of {count} micro-batches", placed.seconds, "s"),
        )
        for each in counts
        for more in options
    ]


def _ratio(request: PlanRequest, placed: Placed, samples: float) -> float:
    """The paper's ACR: the slowest transfer between stages over what a stage computes in the mean."""
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


def twice_ahead(replicas: Sequence[int]) -> tuple[int, ...]:
    """Policy B for stages with copies: per stage, forwards that its ranks together run before the
    first backward. Where policy A has w + 1 of them on each, as PipeDream's start-up rule says, B
    has 2w + 1.

    >>> twice_ahead((1, 1, 1, 1)), twice_ahead((2, 2))
    ((7, 5, 3, 1), (6, 2))
    """
    before = accumulate(replicas, initial=0)
    wanted = [
        k * (2 * ((sum(replicas) - 1 - earlier) // k) + 1)
        for k, earlier in zip(replicas, before, strict=False)
    ]
    return tuple(accumulate(wanted, min))
