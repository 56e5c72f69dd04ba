"""BaPipe's planner: which schedule, for the kind of accelerator, and a balanced partition for it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import final

from penstock.errors import PlanError
from penstock.plan.plan import Plan
from penstock.schedule.catalogue import FAMILIES
from penstock.search.catalogue import register
from penstock.search.laid import CLOSE
from penstock.search.planners.bapipe_balance import (
    balanced_lengths,
    coarse_boundaries,
    fine_tuned,
    fractional_cut,
)
from penstock.search.planners.bapipe_table import AS, Row, S, Stages
from penstock.search.planners.layer_costs import LayerCosts, Numbers, before
from penstock.search.planners.scope import check_scope
from penstock.search.proposal import Objective, Proposal
from penstock.search.request import PlanRequest
from penstock.search.score import scored

#: Ways that are simulated until one fits.
TRIED = 6

#: Stages times micro-batches beyond which more of these gain nothing but time of the planner.
MOST_FORWARDS = 20_000

#: For stages that take no time, so that what they ask of a link in it is finite.
TINY_S = 1e-12


@final
@dataclass(frozen=True)
class Way:
    """A schedule with a cut, by the paper's table.

    `step_s` is the table's time of a batch with the slowest stage; `split_s` the same if boundary
    layers were split so that all are equally long. `excess_bytes` is by how much the stages hold
    too much, `starved` whether a link carries less than is asked of it. `held_bytes` is what the
    fullest holds.
    """

    schedule: str
    micro_batches: int
    lengths: tuple[int, ...]
    step_s: float
    split_s: float
    held_bytes: float
    excess_bytes: float
    starved: bool


@register(
    "bapipe",
    source="Zhao et al. 2020, BaPipe (arXiv 2012.12544); journal: Parallel Processing Letters 2022",
)
def bapipe(request: PlanRequest) -> Plan:
    """The whole exploration: for every number of micro-batches a balanced partition, for every
    schedule that the kind of accelerator can run the paper's formulas; the fastest that fits, then
    the leanest.

    FPGAs compute and transfer at once at a fine grain: they choose between 1F1B-AS, and FBP-AS
    where a link does not carry what that asks for. GPUs and CPUs choose between 1F1B-SNO, and
    1F1B-SO where transfers take notable time and twice the features fit.

    All accelerators are used, in the cluster's order, as far as there are layers for them; a stage
    has one copy. On FPGAs the paper also splits the layers at the boundaries: `split_s` has the
    time that this would take, and it is the plan's objective there. The plan itself has whole
    layers, for that is what can run here.

    Raises:
        PlanError: FPGAs are mixed with devices of another kind; or nothing fits.
    """
    kinds = {device.kind for device in request.cluster.devices}
    if "fpga" in kinds and len(kinds) > 1:
        raise PlanError(
            f"bapipe chooses the schedule by the kind of accelerator, and {request.cluster.name} mixes "
            f"{', '.join(sorted(kinds))}: FPGAs compute and transfer at once, the others do not. Plan for one of them"
        )
    table = AS if kinds == {"fpga"} else S
    check_scope(request, "bapipe", *(name.lower() for name in table))
    asked = (
        None
        if request.schedules is None
        else {FAMILIES.find(name).name for name in request.schedules}
    )
    rows = {
        name.lower(): row
        for name, row in table.items()
        if asked is None or FAMILIES.find(name.lower()).name in asked
    }
    refusal: PlanError | None = None
    for way in preferred(explore(request, rows))[:TRIED]:
        try:
            return scored(request, _proposal(way, split=table is AS))
        except PlanError as error:
            refusal = refusal or error
    raise refusal or PlanError("bapipe has no number of micro-batches to try")


def preferred(ways: Iterable[Way]) -> list[Way]:
    """Those that fit and whose links carry what is asked first, the fastest of these first; before
    it those that are as fast to within 0.1 % and leaner.
    """
    left = sorted(ways, key=lambda way: (way.excess_bytes, way.starved, way.step_s, way.held_bytes))
    if not left:
        return []
    first = left[0]
    near = [
        way
        for way in left
        if (way.excess_bytes, way.starved) == (first.excess_bytes, first.starved)
        and way.step_s <= first.step_s * (1 + CLOSE)
    ]
    near.sort(key=lambda way: way.held_bytes)
    return [*near, *(way for way in left if way not in near)]


def _proposal(way: Way, *, split: bool) -> Proposal:
    value = way.split_s if split else way.step_s
    name = f"{way.schedule} step with split layers" if split else f"{way.schedule} step"
    return Proposal(
        way.lengths, way.schedule, way.micro_batches, objective=Objective(name, value, "s")
    )


def explore(request: PlanRequest, rows: dict[str, Callable[[Stages], Row]]) -> Iterator[Way]:
    """Every schedule with every number of micro-batches, each with its own partition."""
    stages = request.stages or min(request.cluster.ranks, len(request.profile))
    if stages > request.cluster.ranks:
        raise PlanError(
            f"bapipe has one stage on every accelerator: {stages} need as many, {request.cluster.name} has "
            f"{request.cluster.ranks}"
        )
    counts = request.micro_batch_counts(request.cluster.ranks)
    for count in [each for each in counts if each * stages <= MOST_FORWARDS] or counts[:1]:
        kinds = {id(request.profile_of(rank)): request.profile_of(rank) for rank in range(stages)}
        costs = {
            key: LayerCosts.of(profile, request.batch / count) for key, profile in kinds.items()
        }
        chain = _Chain(
            request, [costs[id(request.profile_of(rank))] for rank in range(stages)], count
        )
        lengths = chain.cut()
        for name, row in rows.items():
            yield chain.way(name, row, lengths)


@dataclass(frozen=True)
class _Sums:
    """Costs before every layer, of one kind of accelerator."""

    forward: Numbers
    backward: Numbers
    activation: Numbers
    parameter: Numbers

    @classmethod
    def of(cls, costs: LayerCosts) -> _Sums:
        return cls(
            before(costs.forward_s),
            before(costs.backward_s),
            before(costs.activation_bytes),
            before(costs.parameter_bytes),
        )


class _Chain:
    """The accelerators in order, what each layer costs on each, and the links between them."""

    def __init__(
        self, request: PlanRequest, costs: Sequence[LayerCosts], micro_batches: int
    ) -> None:
        self.request, self.costs, self.micro_batches = request, costs, micro_batches
        self.stages = len(costs)
        self.links = [request.cluster.link(rank, rank + 1) for rank in range(self.stages - 1)]
        sums = {id(each): _Sums.of(each) for each in costs}
        self.parts = [sums[id(each)] for each in costs]

    def cut(self) -> tuple[int, ...]:
        """Balanced between layers, with fewer places to cut if transfers would bound."""
        seconds = [each.seconds for each in self.costs]
        lengths = balanced_lengths(seconds)
        ends = list(accumulate(lengths))[:-1]
        slowest = max(self.seconds(lengths))
        if all(hop <= slowest for hop in self.hops(ends)):
            return lengths
        worst = [
            max(link.transfer_seconds(count) for link in self.links)
            for count in self.costs[0].output_bytes[:-1]
        ]
        return balanced_lengths(seconds, coarse_boundaries(worst, slowest, self.stages - 1))

    def seconds(self, lengths: Sequence[int]) -> list[float]:
        """Forward and backward of every stage."""
        return [forward + backward for forward, backward, *_ in self.sums(lengths)]

    def hops(self, ends: Sequence[int]) -> list[float]:
        """Seconds of a micro-batch over the link behind every stage but the last."""
        return [
            link.transfer_seconds(self.costs[0].output_bytes[end - 1])
            for link, end in zip(self.links, ends, strict=True)
        ]

    def sums(self, lengths: Sequence[int]) -> list[tuple[float, float, float, float]]:
        """Per stage forward and backward seconds, and bytes of activations and of weights."""
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

    def way(self, name: str, row: Callable[[Stages], Row], lengths: Sequence[int]) -> Way:
        """The schedule with its cut tuned to memory."""
        tuned = fine_tuned(lengths, lambda each: self.excess(row, each))
        if any(self.request.cluster.devices[rank].on_chip_bytes for rank in range(self.stages)):
            tuned = self.on_chip(row, tuned)
        ends = list(accumulate(tuned))[:-1]
        equal = self.equal_stages(tuned)
        whole = equal.forward_s + equal.backward_s
        share = fractional_cut([each.seconds for each in self.costs])[0] / whole if whole else 1.0
        split = replace(
            equal, forward_s=equal.forward_s * share, backward_s=equal.backward_s * share
        )
        held = self.held(row, tuned)
        return Way(
            name,
            self.micro_batches,
            tuned,
            row(equal).seconds,
            row(split).seconds,
            max(held),
            sum(self.excess(row, tuned)),
            self.starved(row, tuned, ends),
        )

    def equal_stages(self, lengths: Sequence[int]) -> Stages:
        """What the table takes: as if all stages were as the slowest, and all links as the slowest."""
        slowest = max(self.sums(lengths), key=lambda each: each[0] + each[1])
        ends = list(accumulate(lengths))[:-1]
        return Stages(
            self.stages,
            self.micro_batches,
            slowest[0] or TINY_S,
            slowest[1] or TINY_S,
            max(self.hops(ends), default=0.0),
        )

    def starved(
        self, row: Callable[[Stages], Row], lengths: Sequence[int], ends: Sequence[int]
    ) -> bool:
        """Whether a link carries less than the schedule asks of it."""
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

    def held(self, row: Callable[[Stages], Row], lengths: Sequence[int]) -> list[float]:
        """Bytes of every stage: features and weights by the table, no more features than there are
        micro-batches, and the numbers of the optimizer, which the table leaves out.
        """
        found = []
        for stage, (forward, backward, kept, weights) in enumerate(self.sums(lengths)):
            line = row(
                Stages(
                    self.stages,
                    self.micro_batches,
                    forward or TINY_S,
                    backward or TINY_S,
                    0.0,
                    kept,
                    weights,
                )
            )
            found.append(
                min(line.feature_bytes[stage], self.micro_batches * kept)
                + line.weight_bytes
                + self.request.profile.optimizer_states * weights
            )
        return found

    def excess(self, row: Callable[[Stages], Row], lengths: Sequence[int]) -> list[float]:
        """By how much every stage holds too much."""
        held = self.held(row, lengths)
        return [max(0.0, own - self.request.memory_bytes(rank)) for rank, own in enumerate(held)]

    def on_chip(self, row: Callable[[Stages], Row], lengths: tuple[int, ...]) -> tuple[int, ...]:
        """Layers moved so that more boards have their weights on the chip, as long as it costs
        neither time nor memory.
        """
        slowest, excess = max(self.seconds(lengths)), sum(self.excess(row, lengths))
        chips = [self.request.cluster.devices[rank].on_chip_bytes for rank in range(self.stages)]

        def beyond(each: Sequence[int]) -> list[float]:
            if max(self.seconds(each)) > slowest or sum(self.excess(row, each)) > excess:
                return [float("inf")]
            return [
                max(0.0, weights - chip)
                for (*_, weights), chip in zip(self.sums(each), chips, strict=True)
            ]

        return fine_tuned(lengths, beyond)
