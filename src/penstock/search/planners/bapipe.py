"""BaPipe's planner: a schedule for the kind of accelerator, and a balanced partition for it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import final

from penstock.errors import PlanError
from penstock.plan.plan import Plan
from penstock.schedule.catalogue import FAMILIES
from penstock.search.best_plan import plan_proposal
from penstock.search.catalogue import register
from penstock.search.instantiate import CLOSE
from penstock.search.planners.bapipe_balance import (
    balanced_lengths,
    coarse_boundaries,
    fractional_cut,
    tune_memory,
)
from penstock.search.planners.bapipe_table import AS, Row, S, Stages
from penstock.search.planners.cut_only import stages_of
from penstock.search.planners.layer_costs import LayerCosts, Numbers, before
from penstock.search.planners.scope import check_scope
from penstock.search.proposal import Objective, Proposal
from penstock.search.request import PlanRequest

#: Maximum number of candidates that are simulated until one fits.
MOST_SIMULATED = 6

#: Maximum number of stages times micro-batches: more gain nothing, and the planner takes longer.
MOST_FORWARDS = 20_000

#: Replaces the time of stages that take none, so that the bandwidth that they need is finite.
TINY_S = 1e-12


@final
@dataclass(frozen=True)
class Candidate:
    """A schedule with a cut, evaluated by the paper's table.

    Attributes:
        schedule: name of the schedule.
        micro_batches: number of micro-batches.
        lengths: layers of every stage.
        step_s: the table's time of a batch with the slowest stage.
        split_s: the same if boundary layers were split so that all stages are equally long.
        stage_bytes: bytes that the fullest stage holds.
        excess_bytes: bytes that the stages hold in excess of their memory, in total.
        exceeds_bandwidth: whether a link carries less than the schedule needs.
    """

    schedule: str
    micro_batches: int
    lengths: tuple[int, ...]
    step_s: float
    split_s: float
    stage_bytes: float
    excess_bytes: float
    exceeds_bandwidth: bool


@register(
    "bapipe",
    source="Zhao et al. 2020, BaPipe (arXiv 2012.12544); journal: Parallel Processing Letters 2022",
)
def bapipe(request: PlanRequest) -> Plan:
    """Return BaPipe's plan: for every number of micro-batches a balanced partition, for every
    schedule that the kind of accelerator can run the paper's formulas; the fastest that fits, then
    the one with the least memory.

    FPGAs compute and transfer at the same time at a fine grain: they choose between 1F1B-AS, and
    FBP-AS where a link does not carry what that needs. GPUs and CPUs choose between 1F1B-SNO, and
    1F1B-SO where transfers take notable time and twice the features fit.

    All accelerators are used, in the cluster's order, as far as there are layers for them; a stage
    has one replica. On FPGAs the paper also splits the layers at the boundaries: `split_s` is the
    time that this would take, and it is the plan's objective there. The plan itself has whole
    layers, since only those can run in this library.

    Raises:
        PlanError: FPGAs are mixed with devices of another kind; or nothing fits.
    """
    kinds = {device.kind for device in request.cluster.devices}
    if "fpga" in kinds and len(kinds) > 1:
        raise PlanError(
            "bapipe chooses the schedule by the kind of accelerator, and "
            f"{request.cluster.name} mixes {', '.join(sorted(kinds))}: FPGAs compute and transfer "
            "at once, the others do not. Plan for one of them"
        )
    table = AS if kinds == {"fpga"} else S
    check_scope(request, "bapipe", *(name.lower() for name in table))
    rows = _requested_rows(request, table)
    first_error: PlanError | None = None
    for candidate in preferred(explore(request, rows))[:MOST_SIMULATED]:
        try:
            return plan_proposal(request, _proposal(candidate, split=table is AS))
        except PlanError as error:
            # The next candidate may fit the memory; the first refusal is of the one that the paper
            # prefers.
            first_error = first_error or error
    raise first_error or PlanError("bapipe has no number of micro-batches to try")


def _requested_rows(
    request: PlanRequest, table: dict[str, Callable[[Stages], Row]]
) -> dict[str, Callable[[Stages], Row]]:
    """Return the rows of the table whose schedules are requested; all if none is named."""
    rows = {name.lower(): row for name, row in table.items()}
    if request.schedules is None:
        return rows
    return {
        name: row for name, row in rows.items() if FAMILIES.find(name).name in request.schedules
    }


def preferred(candidates: Iterable[Candidate]) -> list[Candidate]:
    """Order candidates: those that fit and whose links suffice first, of these the fastest first.
    At the front, candidates within 0.1 % of the best time are ordered by their memory.
    """
    ordered = sorted(
        candidates,
        key=lambda candidate: (
            candidate.excess_bytes,
            candidate.exceeds_bandwidth,
            candidate.step_s,
            candidate.stage_bytes,
        ),
    )
    if not ordered:
        return []
    first = ordered[0]
    close = [
        candidate
        for candidate in ordered
        if candidate.excess_bytes == first.excess_bytes
        and candidate.exceeds_bandwidth == first.exceeds_bandwidth
        and candidate.step_s <= first.step_s * (1 + CLOSE)
    ]
    close.sort(key=lambda candidate: candidate.stage_bytes)
    return [*close, *(candidate for candidate in ordered if candidate not in close)]


def _proposal(candidate: Candidate, *, split: bool) -> Proposal:
    """Return a candidate as a proposal; its objective is the time with split layers if `split`."""
    value = candidate.split_s if split else candidate.step_s
    name = f"{candidate.schedule} step"
    if split:
        name += " with split layers"
    return Proposal(
        candidate.lengths,
        candidate.schedule,
        candidate.micro_batches,
        objective=Objective(name, value, "s"),
    )


def explore(request: PlanRequest, rows: dict[str, Callable[[Stages], Row]]) -> Iterator[Candidate]:
    """Yield every schedule with every number of micro-batches, each with its own partition."""
    stages = stages_of(request)
    if stages > request.cluster.ranks:
        raise PlanError(
            f"bapipe has one stage on every accelerator: {stages} need as many, "
            f"{request.cluster.name} has {request.cluster.ranks}"
        )
    profiles = [request.profile_of(rank) for rank in range(stages)]
    counts = request.micro_batch_counts(request.cluster.ranks)
    small_counts = [count for count in counts if count * stages <= MOST_FORWARDS]
    for count in small_counts or counts[:1]:
        costs: dict[int, LayerCosts] = {}
        for profile in profiles:
            if id(profile) not in costs:
                costs[id(profile)] = LayerCosts.of(profile, request.batch / count)
        chain = _Chain(request, [costs[id(profile)] for profile in profiles], count)
        lengths = chain.cut()
        for name, row in rows.items():
            yield chain.candidate(name, row, lengths)


@dataclass(frozen=True)
class _Sums:
    """Sums of costs before every layer, for one kind of accelerator."""

    forward: Numbers
    backward: Numbers
    activation: Numbers
    parameter: Numbers

    @classmethod
    def of(cls, costs: LayerCosts) -> _Sums:
        """Return the sums of these costs."""
        return cls(
            before(costs.forward_s),
            before(costs.backward_s),
            before(costs.activation_bytes),
            before(costs.parameter_bytes),
        )


class _Chain:
    """The accelerators in order, the costs of each layer on each, and the links between them."""

    def __init__(
        self, request: PlanRequest, costs: Sequence[LayerCosts], micro_batches: int
    ) -> None:
        self.request, self.costs, self.micro_batches = request, costs, micro_batches
        self.stages = len(costs)
        self.links = [request.cluster.link(rank, rank + 1) for rank in range(self.stages - 1)]
        sums = {id(layer_costs): _Sums.of(layer_costs) for layer_costs in costs}
        self.parts = [sums[id(layer_costs)] for layer_costs in costs]

    def cut(self) -> tuple[int, ...]:
        """Return a balanced cut in whole layers; if a transfer would take longer than the slowest
        stage, the best one at boundaries with quick transfers.
        """
        seconds = [layer_costs.seconds for layer_costs in self.costs]
        lengths = balanced_lengths(seconds)
        ends = list(accumulate(lengths))[:-1]
        slowest = max(self.seconds(lengths))
        if all(hop <= slowest for hop in self.hops(ends)):
            return lengths
        slowest_hops = []
        for size in self.costs[0].output_bytes[:-1]:
            slowest_hops.append(max(link.transfer_seconds(size) for link in self.links))
        boundaries = coarse_boundaries(slowest_hops, slowest, self.stages - 1)
        return balanced_lengths(seconds, boundaries)

    def seconds(self, lengths: Sequence[int]) -> list[float]:
        """Return the seconds of forward and backward of every stage."""
        return [forward + backward for forward, backward, *_ in self.sums(lengths)]

    def hops(self, ends: Sequence[int]) -> list[float]:
        """Return the seconds of a micro-batch over the link behind every stage but the last."""
        return [
            link.transfer_seconds(self.costs[0].output_bytes[end - 1])
            for link, end in zip(self.links, ends, strict=True)
        ]

    def sums(self, lengths: Sequence[int]) -> list[tuple[float, float, float, float]]:
        """Return per stage its forward and backward seconds, activation bytes and weight bytes."""
        ends = list(accumulate(lengths, initial=0))
        return [
            (
                float(part.forward[stop] - part.forward[start]),
                float(part.backward[stop] - part.backward[start]),
                float(part.activation[stop] - part.activation[start]),
                float(part.parameter[stop] - part.parameter[start]),
            )
            for part, start, stop in zip(self.parts, ends, ends[1:], strict=False)
        ]

    def candidate(
        self, name: str, row: Callable[[Stages], Row], lengths: Sequence[int]
    ) -> Candidate:
        """Return the schedule with its cut tuned to memory."""
        tuned = tune_memory(lengths, lambda cut: self.excess_bytes(row, cut))
        if any(self.request.cluster.devices[rank].on_chip_bytes for rank in range(self.stages)):
            tuned = self.on_chip(row, tuned)
        ends = list(accumulate(tuned))[:-1]
        equal = self.equal_stages(tuned)
        slowest_s = equal.forward_s + equal.backward_s
        split_s, _ = fractional_cut([layer_costs.seconds for layer_costs in self.costs])
        share = split_s / slowest_s if slowest_s else 1.0
        split = replace(
            equal, forward_s=equal.forward_s * share, backward_s=equal.backward_s * share
        )
        return Candidate(
            schedule=name,
            micro_batches=self.micro_batches,
            lengths=tuned,
            step_s=row(equal).seconds,
            split_s=row(split).seconds,
            stage_bytes=max(self.stage_bytes(row, tuned)),
            excess_bytes=sum(self.excess_bytes(row, tuned)),
            exceeds_bandwidth=self.exceeds_bandwidth(row, tuned, ends),
        )

    def equal_stages(self, lengths: Sequence[int]) -> Stages:
        """Return the input of the table: all stages as the slowest, all links as the slowest."""
        slowest = max(self.sums(lengths), key=lambda stage: stage[0] + stage[1])
        ends = list(accumulate(lengths))[:-1]
        return Stages(
            self.stages,
            self.micro_batches,
            slowest[0] or TINY_S,
            slowest[1] or TINY_S,
            max(self.hops(ends), default=0.0),
        )

    def exceeds_bandwidth(
        self, row: Callable[[Stages], Row], lengths: Sequence[int], ends: Sequence[int]
    ) -> bool:
        """Return whether a link carries less than the schedule needs."""
        # No link follows the last stage, so that its sums are left over.
        for (forward, backward, *_), link, end in zip(
            self.sums(lengths), self.links, ends, strict=False
        ):
            crossing = self.costs[0].output_bytes[end - 1]
            stage = Stages(
                self.stages,
                self.micro_batches,
                forward or TINY_S,
                backward or TINY_S,
                0.0,
                crossing,
            )
            if max(row(stage).demand_bytes_per_s) > link.bandwidth_bytes_per_s:
                return True
        return False

    def stage_bytes(self, row: Callable[[Stages], Row], lengths: Sequence[int]) -> list[float]:
        """Return the bytes of every stage: features and weights by the table, features of no more
        than all micro-batches, and the states of the optimizer, which the table leaves out.
        """
        totals = []
        for stage, (forward, backward, activations, weights) in enumerate(self.sums(lengths)):
            line = row(
                Stages(
                    self.stages,
                    self.micro_batches,
                    forward or TINY_S,
                    backward or TINY_S,
                    0.0,
                    activations,
                    weights,
                )
            )
            totals.append(
                min(line.feature_bytes[stage], self.micro_batches * activations)
                + line.weight_bytes
                + self.request.profile.optimizer_states * weights
            )
        return totals

    def excess_bytes(self, row: Callable[[Stages], Row], lengths: Sequence[int]) -> list[float]:
        """Return per stage the bytes in excess of its memory; 0 if it fits."""
        return [
            max(0.0, size - self.request.memory_bytes(rank))
            for rank, size in enumerate(self.stage_bytes(row, lengths))
        ]

    def on_chip(self, row: Callable[[Stages], Row], lengths: tuple[int, ...]) -> tuple[int, ...]:
        """Move layers so that more boards have their weights on the chip, as long as it costs
        neither time nor memory.
        """
        slowest, excess = max(self.seconds(lengths)), sum(self.excess_bytes(row, lengths))
        chips = [self.request.cluster.devices[rank].on_chip_bytes for rank in range(self.stages)]

        def off_chip(cut: Sequence[int]) -> list[float]:
            """Return per board the bytes of weights that are not on the chip; infinite for a cut
            that is slower or holds more.
            """
            if max(self.seconds(cut)) > slowest or sum(self.excess_bytes(row, cut)) > excess:
                return [float("inf")]
            return [
                max(0.0, weights - chip)
                for (*_, weights), chip in zip(self.sums(cut), chips, strict=True)
            ]

        return tune_memory(lengths, off_chip)
