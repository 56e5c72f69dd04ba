"""PipeDream-2BW's planner: all widths and depths of equal pipelines, each with the largest
micro-batch that fits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, final

from penstock.errors import PlanError
from penstock.plan.plan import Plan
from penstock.schedule.recompute import Recompute
from penstock.search.best_plan import best_plan
from penstock.search.catalogue import register
from penstock.search.planners.bapipe_balance import balanced_lengths
from penstock.search.planners.layer_costs import LayerCosts, ranges_of, stage_totals
from penstock.search.planners.replicated_stages import least_memory
from penstock.search.planners.scope import check_alike, check_scope, quickest
from penstock.search.proposal import Objective, Proposal, replica_options
from penstock.search.request import PlanRequest
from penstock.search.sync_line import ring_seconds
from penstock.units import format_bytes

#: Cost of recompute: factor on all compute (the paper's c_extra).
EXTRA = 4 / 3


@final
@dataclass(frozen=True)
class Shape:
    """Equal pipelines with their size of micro-batch.

    Attributes:
        width: number of pipelines.
        depth: number of stages.
        micro_batch: samples in a micro-batch.
        micro_batches: micro-batches per batch and pipeline.
        recompute: whether activations are recomputed.
        lengths: layers of every stage.
        seconds: the paper's t, for a micro-batch on every pipeline.
        bytes: the most that a device holds.
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
        """Seconds per batch once the pipelines are full."""
        return self.seconds * self.micro_batches


@register("2bw", source="Narayanan et al. 2021, PipeDream-2BW (arXiv 2006.09503), section 3.3")
def two_bw(request: PlanRequest) -> Plan:
    """Return the plan with the width, depth, micro-batch and recompute of the highest throughput by
    the paper's cost functions.

    The paper's models are blocks that repeat, so that equal cuts have equal layers; this planner's
    stages have equal seconds, as nearly as whole layers allow, which is the same for such models.
    Devices of one pipeline are neighbours.

    With `asynchronous` the schedule is the paper's own, with two versions of the weights. Without,
    it is its PipeDream-Flush, "1f1b" with a flush after every batch, which the paper plans in the
    same way.

    Raises:
        PlanError: devices are of different kinds; no depth goes with the requested number of
            replicas; or no width and depth fits.
    """
    name = "2bw" if request.asynchronous else "1f1b"
    check_scope(request, "2bw", name)
    check_alike(request, "2bw")
    candidates = list(shapes(request))
    if not candidates:
        raise PlanError(_infeasible_message(request))
    # Of equally fast shapes the shallowest, then the one without recompute.
    candidates.sort(key=lambda shape: (shape.step_s, shape.depth, shape.recompute))
    return best_plan(request, quickest([_proposal(shape, name) for shape in candidates]))


def _infeasible_message(request: PlanRequest) -> str:
    """Return the message of the error if no shape fits."""
    depth = "" if request.stages is None else f" in {request.stages} stages"
    return (
        f"2bw finds no width and depth{depth} for {request.cluster.ranks} devices with "
        f"{format_bytes(least_memory(request))} each: a batch of {request.batch} must have as "
        "many micro-batches for each pipeline as it has stages, and with its cost functions none "
        "of that fits. Use more devices, or a larger batch"
    )


def _proposal(shape: Shape, name: str) -> Proposal:
    """Return a shape as a proposal."""
    recompute: Literal["auto"] | Recompute = Recompute.ALWAYS if shape.recompute else "auto"
    return Proposal(
        shape.lengths,
        name,
        shape.width * shape.micro_batches,
        replica_options(shape.width),
        recompute=recompute,
        objective=Objective("seconds of a batch, full", shape.step_s, "s"),
    )


def shapes(request: PlanRequest) -> Iterator[Shape]:
    """Yield every width and depth whose product is the number of devices, with and without
    recompute, at the largest micro-batch that fits, a power of two.
    """
    ranks = request.cluster.ranks
    for depth in range(1, min(ranks, len(request.profile)) + 1):
        width, rest = divmod(ranks, depth)
        if rest or width > request.copies_allowed or request.stages not in (None, depth):
            continue
        for recompute in (False, True):
            if request.recompute != "auto" and recompute != (
                request.recompute is not Recompute.NEVER
            ):
                continue
            shape = _largest_micro_batch(request, width, depth, recompute)
            if shape is not None:
                yield shape


def _largest_micro_batch(
    request: PlanRequest, width: int, depth: int, recompute: bool
) -> Shape | None:
    """Return the shape with the largest micro-batch that fits and leaves every pipeline as many
    micro-batches as it has stages; None if there is none.
    """
    if request.micro_batches is None:
        share = max(request.batch // width, 1)
        sizes = [2**power for power in range(share.bit_length())]
    elif request.micro_batches % width:
        return None
    else:
        sizes = [-(-request.batch // request.micro_batches)]
    limit = least_memory(request)
    for size in reversed(sizes):
        if request.micro_batches is None:
            count = -(-request.batch // (width * size))
        else:
            count = request.micro_batches // width
        if count < depth or count * width > request.batch:
            continue
        shape = _shape(request, (width, depth), (size, count), recompute)
        if shape.bytes <= limit:
            return shape
    return None


def _shape(
    request: PlanRequest, devices: tuple[int, int], batch: tuple[int, int], recompute: bool
) -> Shape:
    """Return the shape of `devices`, (width, depth), and `batch`, (samples in a micro-batch,
    micro-batches per pipeline), with a balanced cut.
    """
    (width, depth), (size, count) = devices, batch
    costs = LayerCosts.of(request.profile, size)
    lengths = balanced_lengths([costs.seconds] * depth)
    other_state_factor = request.state_per_parameter_byte - 1
    return Shape(
        width,
        depth,
        size,
        count,
        recompute,
        lengths,
        seconds(request, costs, lengths, width, count, recompute),
        memory(costs, lengths, recompute=recompute, other_state_factor=other_state_factor),
    )


def seconds(
    request: PlanRequest,
    costs: LayerCosts,
    lengths: tuple[int, ...],
    width: int,
    micro_batches: int,
    recompute: bool,
) -> float:
    """Return the paper's t, which is the maximum over stages.

        t = max over stages i of max( T_comp,i + sum over j of T_comm,i->j, T_dp,i / m )

    T_comm counts an activation and its gradient; T_dp is a ring's time for the stage's gradients
    over the pipelines. Stage i is on ranks i, i + depth, i + 2 depth, …
    """
    cluster, depth = request.cluster, len(lengths)
    slowest = 0.0
    for stage, (start, stop) in enumerate(ranges_of(lengths)):
        ranks = [pipeline * depth + stage for pipeline in range(width)]
        stage_s = sum(costs.seconds[start:stop]) * (EXTRA if recompute else 1.0)
        if stage + 1 < depth:
            size = costs.output_bytes[stop - 1]
            stage_s += 2 * max(cluster.transfer_seconds(size, rank, rank + 1) for rank in ranks)
        sync_s = ring_seconds(ranks, sum(costs.parameter_bytes[start:stop]), cluster)
        slowest = max(slowest, stage_s, sync_s / micro_batches)
    return slowest


def memory(
    costs: LayerCosts,
    lengths: tuple[int, ...],
    *,
    recompute: bool,
    other_state_factor: float = 2.0,
) -> float:
    """Return the most bytes that a device holds, by the paper's functions: 2 |W| / d + |A| + d
    |A_in|, or with recompute 2 |W| / d + |A| / d + d |A_in|.

    |A| / d is that of the fullest stage here, and so is |W| / d, whose 2 are the versions.
    Gradients and optimizer states, which the paper's functions leave out, count
    `other_state_factor` times the weights in addition.
    """
    depth = len(lengths)
    weights = max(stage_totals(costs.parameter_bytes, lengths))
    activations = max(stage_totals(costs.activation_bytes, lengths))
    inputs = [0.0, *(costs.output_bytes[stop - 1] for _, stop in ranges_of(lengths))]
    # |A| is d times |A| / d; with recompute only the micro-batch in its backward has activations.
    in_flight = 1 if recompute else depth
    # The output of the last stage is the input of none.
    return (2 + other_state_factor) * weights + in_flight * activations + depth * max(inputs[:-1])
