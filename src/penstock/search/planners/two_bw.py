"""PipeDream-2BW's planner: all widths and depths of equal pipelines, each with the largest
micro-batch that fits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, final

from penstock.errors import PlanError
from penstock.plan.plan import Plan
from penstock.search.catalogue import register
from penstock.search.planners.bapipe_balance import balanced_lengths
from penstock.search.planners.layer_costs import LayerCosts
from penstock.search.planners.scope import check_alike, check_scope, quickest
from penstock.search.proposal import Objective, Proposal
from penstock.search.request import PlanRequest
from penstock.search.score import best_of
from penstock.units import format_bytes

#: What recomputing costs: all computing takes so many times as long (the paper's c_extra).
EXTRA = 4 / 3


@final
@dataclass(frozen=True)
class Shape:
    """`width` pipelines of `depth` stages, each `micro_batches` a batch of `micro_batch` samples.

    `seconds` is the paper's t, of a micro-batch on every pipeline; `bytes` what a device holds at
    most.
    """

    width: int
    depth: int
    micro_batch: int
    micro_batches: int
    recompute: bool
    lengths: tuple[int, ...]
    seconds: float
    bytes: float

    @property
    def step_s(self) -> float:
        """Seconds for a batch once the pipelines are full."""
        return self.seconds * self.micro_batches


@register("2bw", source="Narayanan et al. 2021, PipeDream-2BW (arXiv 2006.09503), section 3.3")
def two_bw(request: PlanRequest) -> Plan:
    """The width, depth, micro-batch and recomputing with the most throughput by the paper's cost
    functions.

    The paper's models are blocks that repeat, so that equal cuts have equal layers; here the stages
    have equal seconds, as nearly as whole layers can, which is the same for such models. Devices of
    one pipeline are neighbours.

    With `asynchronous` the schedule is the paper's own, with two versions of the weights. Without,
    it is its PipeDream-Flush, "1f1b" with a flush after every batch, which the paper plans in the
    same way.

    Raises:
        PlanError: devices are of different kinds; a number of replicas is asked for that has no
        depth; or no width and depth fits.
    """
    name = "2bw" if request.asynchronous else "1f1b"
    check_scope(request, "2bw", name)
    check_alike(request, "2bw")
    found = list(shapes(request))
    if not found:
        raise PlanError(_nothing(request))
    found.sort(key=lambda shape: (shape.step_s, shape.depth, shape.recompute))
    return best_of(request, quickest([_proposal(shape, name) for shape in found]))


def _nothing(request: PlanRequest) -> str:
    depth = "" if request.stages is None else f" in {request.stages} stages"
    least = min(request.memory_bytes(rank) for rank in range(request.cluster.ranks))
    return (
        f"2bw finds no width and depth{depth} for {request.cluster.ranks} devices with {format_bytes(least)} each: a batch of "
        f"{request.batch} must have as many micro-batches for each pipeline as it has stages, and with its cost functions none "
        "of that fits. Use more devices, or a larger batch"
    )


def _proposal(shape: Shape, name: str) -> Proposal:
    recompute: Literal["auto", "always"] = "always" if shape.recompute else "auto"
    return Proposal(
        shape.lengths,
        name,
        shape.width * shape.micro_batches,
        (("replicas", shape.width),) if shape.width > 1 else (),
        recompute=recompute,
        objective=Objective("seconds of a batch, full", shape.step_s, "s"),
    )


def shapes(request: PlanRequest) -> Iterator[Shape]:
    """Every width and depth whose product is the number of devices, with and without recomputing,
    at the largest micro-batch, a power of two, that fits.
    """
    ranks = request.cluster.ranks
    for depth in range(1, min(ranks, len(request.profile)) + 1):
        width, rest = divmod(ranks, depth)
        if rest or width > request.copies_allowed or request.stages not in (None, depth):
            continue
        for recompute in (False, True):
            if request.recompute != "auto" and recompute != (request.recompute != "never"):
                continue
            found = _largest(request, width, depth, recompute)
            if found is not None:
                yield found


def _largest(request: PlanRequest, width: int, depth: int, recompute: bool) -> Shape | None:
    """The shape with the largest micro-batch that fits and leaves every pipeline as many
    micro-batches as it has stages.
    """
    share = request.batch // width
    sizes = [2**power for power in range(max(share, 1).bit_length())]
    if request.micro_batches is not None:
        if request.micro_batches % width:
            return None
        sizes = [-(-request.batch // request.micro_batches)]
    limit = min(request.memory_bytes(rank) for rank in range(request.cluster.ranks))
    for size in reversed(sizes):
        count = (
            -(-request.batch // (width * size))
            if request.micro_batches is None
            else request.micro_batches // width
        )
        if count < depth or count * width > request.batch:
            continue
        shape = _shape(request, (width, depth), (size, count), recompute)
        if shape.bytes <= limit:
            return shape
    return None


def _shape(
    request: PlanRequest, devices: tuple[int, int], batch: tuple[int, int], recompute: bool
) -> Shape:
    (width, depth), (size, count) = devices, batch
    costs = LayerCosts.of(request.profile, size)
    lengths = balanced_lengths([costs.seconds] * depth)
    return Shape(
        width,
        depth,
        size,
        count,
        recompute,
        lengths,
        seconds(request, costs, lengths, width, count, recompute),
        memory(costs, lengths, recompute=recompute, besides=request.held_per_parameter_byte - 1),
    )


def seconds(
    request: PlanRequest,
    costs: LayerCosts,
    lengths: tuple[int, ...],
    width: int,
    micro_batches: int,
    recompute: bool,
) -> float:
    """The paper's t = max over stages i of max( T_comp,i + sum over j of T_comm,i->j, T_dp,i / m ).

    T_comm counts an activation and its gradient; T_dp is a ring's time for the stage's gradients
    over the pipelines. Stage i is on ranks i, i + depth, i + 2 depth, …
    """
    depth, worst, start = len(lengths), 0.0, 0
    for stage, length in enumerate(lengths):
        stop = start + length
        own = sum(costs.seconds[start:stop]) * (EXTRA if recompute else 1.0)
        if stage + 1 < depth:
            pairs = [
                (pipeline * depth + stage, pipeline * depth + stage + 1)
                for pipeline in range(width)
            ]
            own += 2 * max(
                request.cluster.transfer_seconds(costs.output_bytes[stop - 1], *pair)
                for pair in pairs
            )
        shared = 0.0
        if width > 1:
            ring = [pipeline * depth + stage for pipeline in range(width)]
            piece = sum(costs.parameter_bytes[start:stop]) / width
            shared = (
                2
                * (width - 1)
                * max(
                    request.cluster.transfer_seconds(piece, one, other)
                    for one, other in zip(ring, [*ring[1:], ring[0]], strict=True)
                )
            )
        worst, start = max(worst, own, shared / micro_batches), stop
    return worst


def memory(
    costs: LayerCosts, lengths: tuple[int, ...], *, recompute: bool, besides: float = 2.0
) -> float:
    """What a device holds at most, by the paper's functions: 2 |W| / d + |A| + d |A_in|, or with
    recomputing 2 |W| / d + |A| / d + d
    |A_in|.

    |A| / d is the fullest stage's here, and so is |W| / d, whose 2 are the versions; its gradients and the optimizer's numbers are counted
    besides (`besides` times the weights), which the paper's functions leave out.
    """
    depth, start = len(lengths), 0
    kept, weights, inputs = [], [], [0.0]
    for length in lengths:
        kept.append(sum(costs.activation_bytes[start : start + length]))
        weights.append(sum(costs.parameter_bytes[start : start + length]))
        inputs.append(costs.output_bytes[start + length - 1])
        start += length
    in_flight = 1 if recompute else depth
    return (2 + besides) * max(weights) + in_flight * max(kept) + depth * max(inputs[:-1])
