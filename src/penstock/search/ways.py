"""The ways to run that `auto` weighs: shapes with schedules and numbers, the promising ones first,
each with what nothing can beat.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property

import numpy as np

from penstock.errors import ScheduleError
from penstock.plan.plan import Option
from penstock.schedule.catalogue import ScheduleFacts, schedule
from penstock.schedule.op import Kind, Schedule
from penstock.schedule.period import period_of
from penstock.search.request import PlanRequest
from penstock.search.shapes import Shape
from penstock.simulate.costs import Costs
from penstock.simulate.plan_costs import meeting_seconds
from penstock.simulate.stage_seconds import PHASES

#: Stages on one rank that are tried, for schedules that take any number.
STAGES_PER_RANK = (2, 3, 4)


@dataclass(frozen=True)
class Way:
    """A schedule with its numbers on a shape. `estimate_s` sorts the ways, `bound_s` is what no cut
    can beat.
    """

    shape: Shape
    schedule: str
    stages: int
    micro_batches: int
    options: tuple[tuple[str, Option], ...]
    estimate_s: float
    bound_s: float

    @property
    def all_options(self) -> tuple[tuple[str, Option], ...]:
        """With the number of pipelines, where there are several."""
        own: tuple[tuple[str, Option], ...] = (
            (("replicas", self.shape.pipelines),) if self.shape.pipelines > 1 else ()
        )
        return own + self.options


def layouts(facts: ScheduleFacts, ranks: int) -> list[tuple[int, tuple[tuple[str, Option], ...]]]:
    """Numbers of stages, and the options for them, with which a schedule may stand on so many
    ranks.
    """
    if facts.stages_per_rank == "chunks":
        return [(each * ranks, (("chunks", each),)) for each in STAGES_PER_RANK]
    if facts.stages_per_rank == "2 x waves":
        return [(2 * each * ranks, (("waves", each),)) for each in (1, 2)]
    if facts.stages_per_rank == "2":  # the family says by refusing which of them it is
        return [(ranks, ()), (2 * ranks, ())] if ranks % 2 == 0 else [(2 * ranks, ())]
    return [(ranks, ())]


def _unlike_alone(families: Sequence[ScheduleFacts]) -> list[ScheduleFacts]:
    """Those that differ where the whole model is one stage: they split its backwards or not, flush
    or not.
    """
    kinds: dict[object, ScheduleFacts] = {}
    for facts in sorted(families, key=lambda facts: facts.name):
        if facts.stages_per_rank == "1":
            kinds.setdefault((facts.splits_backward, facts.synchronous, facts.weights), facts)
    return list(kinds.values()) or list(families[:1])


class Space:
    """All ways of a request. What it takes to know their bounds is worked out once for each kind of
    device and size.
    """

    def __init__(self, request: PlanRequest, every: list[Shape]) -> None:
        self.request, self.shapes = request, every
        self._rows: dict[tuple[int, float], np.ndarray] = {}
        self._bests: dict[tuple[tuple[int, ...], float], tuple[float, float]] = {}
        self._met: dict[Shape, float] = {}
        self._shared: dict[tuple[tuple[tuple[int, int], ...], float], float] = {}

    @cached_property
    def ways(self) -> list[Way]:
        """Best estimate first."""
        found = [way for shape in self.shapes for way in self._of_shape(shape)]
        key = {
            way: (way.estimate_s, way.micro_batches, way.stages, way.schedule, way.shape.pipelines)
            for way in found
        }
        return sorted(found, key=lambda way: key[way])

    @cached_property
    def leading(self) -> frozenset[str]:
        """The schedules that stand for all in a first look: of those with a flush and of those
        without 1F1B, or its kin PipeDream, where it is allowed, else that of the best estimate.
        """
        found = []
        for synchronous, favourite in ((True, "1f1b"), (False, "pipedream")):
            kin = {
                facts.name for facts in self.request.families() if facts.synchronous is synchronous
            }
            names = [way.schedule for way in self.ways if way.schedule in kin]
            found += [favourite if favourite in names else names[0]] if names else []
        return frozenset(found)

    @cached_property
    def least_s(self) -> float:
        """No step is shorter, however stages are cut and copied: all work, shared evenly among all
        devices.
        """
        found = [
            count * self._load(shape, count).of_cluster
            for shape in self.shapes[:1]
            for count in self.request.micro_batch_counts(self.request.cluster.ranks)
        ]
        return min(found, default=0.0)

    def _of_shape(self, shape: Shape) -> Iterator[Way]:
        request, layers = self.request, len(self.request.profile)
        counts = sorted({*request.micro_batch_counts(shape.pipelines), *self._multiples(shape)})
        families = request.families() if shape.ranks > 1 else _unlike_alone(request.families())
        listed = [(facts, *layout) for facts in families for layout in layouts(facts, shape.ranks)]
        for micro_batches in counts:
            if not shape.pipelines <= micro_batches:
                continue
            load = self._load(shape, micro_batches)
            for facts, stages, options in listed:
                if not 1 <= stages <= layers or request.stages not in (None, stages):
                    continue
                estimate, bound = _reckon(load, facts, stages)
                yield Way(shape, facts.name, stages, micro_batches, options, estimate, bound)

    def _multiples(self, shape: Shape) -> Iterator[int]:
        """Numbers of micro-batches that some schedules need: multiples of the ranks, for each
        pipeline.
        """
        if self.request.micro_batches is None:
            for times in (1, 2, 4):
                count = times * shape.ranks * shape.pipelines
                if count <= min(self.request.batch, 64 * shape.pipelines):
                    yield count

    def _seconds(self, rank: int, samples: float) -> np.ndarray:
        """Shape (4, layers): per layer, seconds of each phase on one device."""
        profile = self.request.profile_of(rank)
        key = id(profile), samples
        if key not in self._rows:
            self._rows[key] = np.array([profile.seconds(phase, samples) for phase in PHASES])
        return self._rows[key]

    def _least(self, kinds: Sequence[int], samples: float) -> tuple[float, float]:
        """Of the whole model, every layer on the device and in the way that is fastest for it, as
        no cut can better: a micro-batch's way through all layers, and that and back.

        Which device is faster may differ from layer to layer, and so may whether a backward is
        worth splitting.
        """
        key = tuple(kinds), samples
        if key not in self._bests:
            rows = [self._seconds(rank, samples) for rank in kinds]
            path = sum(np.min([f + np.minimum(b, i) for f, b, i, _ in rows], axis=0))
            self._bests[key] = float(sum(np.min([f for f, *_ in rows], axis=0))), float(path)
        return self._bests[key]

    def _shared_s(self, ranks: Sequence[int], samples: float) -> float:
        """Seconds of each device at the least, if they share the work of a micro-batch however they
        like.

        One of another kind than the first is at all layers at most as much faster as at the layer
        that suits it best.
        """
        counts = Counter(id(self.request.profile_of(rank)) for rank in ranks)
        key = tuple(counts.items()), samples
        if key not in self._shared:
            kinds = self._kinds(ranks)
            rows = [
                f + np.minimum(b, i + w)
                for f, b, i, w in (self._seconds(rank, samples) for rank in kinds)
            ]
            some = rows[0] > 0
            rate = sum(
                counts[id(self.request.profile_of(rank))]
                * float(np.max(rows[0][some] / np.maximum(row[some], 1e-300), initial=0.0))
                for rank, row in zip(kinds, rows, strict=True)
            )
            self._shared[key] = float(rows[0].sum()) / rate if rate else 0.0
        return self._shared[key]

    def _kinds(self, ranks: Sequence[int]) -> list[int]:
        """The first of these ranks with each profile."""
        return list({id(self.request.profile_of(rank)): rank for rank in reversed(ranks)}.values())[
            ::-1
        ]

    def _load(self, shape: Shape, micro_batches: int) -> Load:
        """What a number of micro-batches puts on a shape."""
        samples, ranks = self.request.batch / micro_batches, self.request.cluster.ranks
        kinds = self._kinds(shape.first)
        whole = {
            id(self.request.profile_of(rank)): float(self._seconds(rank, samples)[:2].sum())
            for rank in kinds
        }
        even = (
            1 / sum(1 / whole[id(self.request.profile_of(rank))] for rank in shape.first)
            if all(whole.values())
            else 0.0
        )
        down, path = self._least(kinds, samples)
        held = sum(layer.parameter_bytes for layer in self.request.profile)
        update = (
            held
            * min(self.request.profile_of(rank).update_s_per_byte for rank in kinds)
            / shape.ranks
        )
        return Load(
            shape.ranks,
            shape.pipelines,
            micro_batches,
            even,
            self._shared_s(shape.first, samples),
            down,
            path,
            update + self._met_s(shape),
            self._shared_s(range(ranks), samples),
        )

    @cached_property
    def _every(self) -> list[int]:
        return self._kinds(range(self.request.cluster.ranks))

    def _met_s(self, shape: Shape) -> float:
        """About what the copies of a stage take to add up their gradients."""
        if shape.pipelines == 1:
            return 0.0
        if shape not in self._met:
            held = sum(layer.parameter_bytes for layer in self.request.profile) / shape.ranks
            self._met[shape] = meeting_seconds(
                shape.devices[:: shape.ranks], held, self.request.cluster
            )
        return self._met[shape]


@dataclass(frozen=True)
class Load:
    """Seconds that one micro-batch takes on each rank of a pipeline if all share it evenly
    (`even`), and at the least (`least`); on its path through all stages (`down`) and back (`path`);
    what comes after the last backward (`after`); and its share of the whole cluster.
    """

    ranks: int
    pipelines: int
    micro_batches: int
    even: float
    least: float
    down: float
    path: float
    after: float
    of_cluster: float


def _reckon(load: Load, facts: ScheduleFacts, stages: int) -> tuple[float, float]:
    """An estimate of a way, and what nothing can beat."""
    each = -(-load.micro_batches // load.pipelines)
    if (
        not facts.synchronous
    ):  # batches may take turns on copies, so that more ranks than these work
        bound = load.micro_batches * load.of_cluster
        return max(each * load.even, bound), bound
    estimate = (each + (load.ranks - 1) / max(1, stages // load.ranks)) * load.even + load.after
    bound = load.micro_batches / load.pipelines * load.least
    if _slices(facts.name):
        return max(estimate, bound), bound
    bound = max(bound, load.path)
    if facts.stages_per_rank == "1":  # weight gradients run beside the drain
        bound = max(
            bound, _with_ramp(each, load, load.down if facts.splits_backward else load.path)
        )
    return max(estimate, bound), bound


@cache
def _slices(name: str) -> bool:
    """Whether a schedule cuts micro-batches further, so that a slice's path is shorter than theirs."""
    try:
        return schedule(name, 2, 2).slicing is not None
    except ScheduleError:
        return True


def _with_ramp(micro_batches: int, load: Load, path: float) -> float:
    """What no cut into one stage per rank can beat: rank s waits until a micro-batch has gone
    through the stages before it and, behind its last, back through them, which takes a share q of
    these stages' work: `path` of the whole model's.

    For stages t, prefix sums P: max_s (q P_s + m t_s) is least where all are equal: C, with t_s =
    (C - q P_s) / m; they sum to the work w for C = w q / (1 - (1 - q / m)^p).
    """
    work = load.least * load.ranks
    share = min(path / work, 1.0) if work else 0.0
    if not share:
        return 0.0
    return work * share / (1 - (1 - share / micro_batches) ** load.ranks)


def least_s(made: Schedule, costs: Costs) -> float:
    """Seconds that no step of this schedule undercuts, transfers and updates counted as free; of a
    stream, no batch.

    For every rank:

        stages before that of its first op, forward  |  its own work up to its last backward  |  the
                                                     backwards before that

    The sum is valid since a rank is sequential, and its first forward and last backward have those
    stages before and after them. A stream is full: of a rank only its own work counts, in as many
    batches as it takes until all comes again.
    """
    seconds = {
        Kind(letter): _least_of(costs, name, made)
        for letter, name in zip("FBIW", PHASES, strict=True)
    }
    if made.stream is not None:
        period = period_of(made)
        work = (
            sum(seconds[op.kind][op.stage] for op in loop if op.kind in seconds)
            for loop in period.loops
        )
        return max(work, default=0.0) / period.batches
    down = list(map(min, seconds[Kind.B], seconds[Kind.I]))
    least = 0.0
    for program in made.programs:
        todo = [
            (op, seconds[op.kind][op.stage] * made.shares[op.micro_batch])
            for op in program
            if op.kind in seconds
        ]
        turns = [i for i, (op, _) in enumerate(todo) if op.kind in (Kind.B, Kind.I)]
        if not turns:
            continue
        first, last = todo[0][0], todo[turns[-1]][0]
        fill = sum(seconds[Kind.F][: first.stage]) * made.shares[first.micro_batch]
        whole = fill + sum(each for _, each in todo)
        behind = sum(down[: last.stage]) * made.shares[last.micro_batch]
        drained = fill + sum(each for _, each in todo[: turns[-1] + 1]) + behind
        least = max(least, whole, drained)
    return least


def _least_of(costs: Costs, name: str, made: Schedule) -> tuple[float, ...]:
    """Per stage, the seconds of one phase; of copies on different devices the fastest's."""
    value = getattr(costs, name)
    if not isinstance(value, tuple):
        return costs.spread(name, made.stages) or ()
    return tuple(float(np.min(entry)) for entry in value)
