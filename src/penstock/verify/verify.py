"""All rules for schedules, checked before a schedule runs."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice, pairwise

import numpy as np

from penstock.errors import Finding
from penstock.notebook import NotebookText
from penstock.schedule.arrays import op_arrays
from penstock.schedule.channels import channel_depth
from penstock.schedule.dependencies import dependencies_of
from penstock.schedule.op import ACTIVATION_MOVES, Kind, Op, Schedule
from penstock.schedule.rules import needs
from penstock.schedule.transfers import unsound
from penstock.verify.completeness import completeness_findings
from penstock.verify.stream_rules import stream_findings
from penstock.verify.weight_rules import check_weights
from penstock.weights.catalogue import WeightRule

#: The kinds of op that a micro-batch goes through on its rank, in order.
_KIND_ORDER = (Kind.F, Kind.E, Kind.L, Kind.B, Kind.I, Kind.W)

#: The kinds of op that may be in a pair: those that compute.
_PAIRED_KINDS = {Kind.F, Kind.B, Kind.I, Kind.W}

#: Tolerance for sums of shares, which are floats.
_TOLERANCE = 1e-9

#: Maximum number of findings per rule: ten thousand unrelated ops miss a hundred million others.
_MAX_FINDINGS = 1000


@dataclass(frozen=True, repr=False)
class Report(NotebookText):
    """Figures of a sound schedule. Print it to see them by stage.

    Attributes:
        schedule: name of the schedule.
        staleness_max, staleness_mean: per stage, the number of updates between the weights that the
            forward of a gradient read under the weight rule and the weights that the gradient
            updates. Predictions do not count.
        peak_in_flight: per stage, the maximum number of micro-batches in flight on any of its
            ranks; a fraction where micro-batches are cut into slices.
        peak_on_rank: the same per rank, over all its stages and what it stores for a partner.
        channel_depth: minimum number of messages that a blocking channel must buffer.
        versions: per stage, the maximum number of versions of its weights that a rank keeps at a
            time, over all copies that take turns there.
        weights: name of the weight rule.
        staleness_across: for streams with waves, per stage, the maximum number of batches of any
            other copy that are missing in a batch's weights, of those with a lower number; empty
            for other schedules.
    """

    schedule: str
    staleness_max: tuple[int, ...]
    staleness_mean: tuple[float, ...]
    peak_in_flight: tuple[float, ...]
    peak_on_rank: tuple[float, ...]
    channel_depth: int
    versions: tuple[int, ...]
    weights: str
    staleness_across: tuple[int, ...] = ()

    def __repr__(self) -> str:
        stages, ranks = len(self.versions), len(self.peak_on_rank)
        held = max(self.peak_on_rank, default=0)
        return (
            f"<Report: {self.schedule} is sound, {stages} stages on {ranks} ranks, at most {held} "
            f"micro-batches in flight on a rank, weight rule {self.weights}>"
        )

    def __str__(self) -> str:
        from penstock.verify.description import describe  # imports this module

        return describe(self)


def verify(
    schedule: Schedule, in_flight_limit: int | None = None, weights: str | WeightRule | None = None
) -> Report:
    """Prove that the programs are sound, or report everything that is wrong.

    Args:
        schedule: any schedule, built-in or user-defined.
        in_flight_limit: maximum number of micro-batches that a rank may hold, over all its stages.
        weights: name of the weight rule. By default the one that the stream is designed for,
            `flush` for synchronous schedules, and `none` for asynchronous ones without a stream.

    Raises:
        ScheduleError: a rule is broken; each of its `findings` names the rule, the op and the rank.
        UnknownName: there is no such weight rule.
    """
    checks = (
        completeness_findings,
        _slice_numbers,
        _evict_and_load,
        _pairs,
        _order,
        _updates,
        stream_findings,
    )
    findings: list[Finding] = []
    # Each check relies on the ones before it, so the first that fails ends the verification.
    for check in checks:
        findings = findings or [*islice(check(schedule), _MAX_FINDINGS)]
    if not findings:
        stage_peaks, rank_peaks = op_arrays(schedule).in_flight
        if in_flight_limit is not None:
            findings += _over_limit(schedule, rank_peaks, in_flight_limit)
    if findings:
        raise unsound(schedule.name, findings)
    rule, readings = check_weights(schedule, weights)
    return Report(
        schedule.name,
        readings.max_staleness,
        readings.mean_staleness,
        stage_peaks,
        rank_peaks,
        channel_depth(schedule),
        readings.versions,
        rule.name,
        readings.across,
    )


def _slice_numbers(schedule: Schedule) -> Iterator[Finding]:
    """Check that ops count the existing slices, and that a sequence stays on one rank per stage."""
    slicing = schedule.slicing
    if slicing is None:
        return
    if schedule.slices != len(slicing.share):
        yield Finding(
            "slices",
            f"forwards number {schedule.slices} slices, the micro-batches are cut into "
            f"{len(slicing.share)}",
        )
        return
    if slicing.along == "samples":
        return
    for (stage, number), rank in schedule.placement.items():
        previous = slicing.neighbour(number, -1)
        if previous is not None and schedule.placement[stage, previous] != rank:
            yield Finding(
                "slices",
                f"{stage}F{number} is on rank {rank}, but {stage}F{previous}, the slice before "
                f"it of the same micro-batch, on rank {schedule.placement[stage, previous]}",
                rank,
                f"{stage}F{number}",
            )


def _evict_and_load(schedule: Schedule) -> Iterator[Finding]:
    """Check that every E and its L are on the rank of the forward and on one partner, in order.

    On the rank of the forward the order is F, E, L, backward.
    """
    places: dict[Op, dict[int, int]] = defaultdict(dict)
    for rank, program in enumerate(schedule.programs):
        moves = [(i, op) for i, op in enumerate(program) if op.kind in ACTIVATION_MOVES]
        for i, op in moves:
            if rank in places[op]:
                yield Finding("evict and load", f"{op} occurs twice on rank {rank}", rank, str(op))
            places[op][rank] = i
    for op in list(places):
        yield from _evict_or_load(schedule, op, places)


def _evict_or_load(
    schedule: Schedule, op: Op, places: Mapping[Op, Mapping[int, int]]
) -> Iterator[Finding]:
    """Check one E or L; `places` has the places of each of them in the programs, by op and rank."""
    _, stage, number = op
    owner = schedule.placement.get((stage, number))
    counterpart = Op(Kind.L if op.kind is Kind.E else Kind.E, stage, number)
    if owner not in places[op] or len(places[op]) != 2:
        yield Finding(
            "evict and load",
            f"{op} is on ranks {', '.join(map(str, places[op]))}: it must be on two, that "
            f"of {stage}F{number} ({'none' if owner is None else owner}) and a partner",
            min(places[op]),
            str(op),
        )
    elif places.get(counterpart, {}).keys() != places[op].keys():
        ranks = " and ".join(map(str, sorted(places[op])))
        yield Finding(
            "evict and load",
            f"{op} needs {counterpart} on the same two ranks, {ranks}",
            owner,
            str(op),
        )
    elif op.kind is Kind.E:
        yield from _evict_and_load_order(schedule, op, counterpart, places)


def _evict_and_load_order(
    schedule: Schedule, evict: Op, load: Op, places: Mapping[Op, Mapping[int, int]]
) -> Iterator[Finding]:
    """Check the order F, E, L, backward on the owner's rank, and E, L on the partner's."""
    _, stage, number = evict
    owner = schedule.placement[stage, number]
    kinds = set(_KIND_ORDER) - {Kind.W}
    ops = [op for op in schedule.programs[owner] if op[1:] == (stage, number) and op.kind in kinds]
    expected = sorted(ops, key=lambda op: _KIND_ORDER.index(op.kind))
    if ops != expected:
        yield Finding(
            "evict and load",
            f"rank {owner} runs {' '.join(map(str, ops))}: the order is "
            f"{' '.join(map(str, expected))}",
            owner,
            str(evict),
        )
    for rank, place in places[evict].items():
        if rank != owner and places[load][rank] < place:
            yield Finding(
                "evict and load",
                f"rank {rank} runs {load}, which returns the activations, before {evict}, which "
                "receives them",
                rank,
                str(load),
            )


def _pairs(schedule: Schedule) -> Iterator[Finding]:
    """Check that the ops of a pair are adjacent, independent, and in no other pair."""
    adjacent: set[tuple[Op, Op]] = set()
    for program in schedule.programs:
        adjacent.update(pairwise(program))
    paired_ops: set[Op] = set()
    # Sorted, because a set has no order that two runs share.
    for first, second in sorted(schedule.pairs, key=str):
        op, error = first, ""
        if (first, second) not in adjacent:
            error = " are not adjacent in that order on any rank"
        elif any(first in inputs for inputs in needs(second, schedule.stages, schedule.slicing)):
            op, error = second, f" cannot run as one: {second} needs {first}"
        elif {first, second} & paired_ops or {first.kind, second.kind} - _PAIRED_KINDS:
            error = ": an op of compute runs with one other, no more"
        if error:
            yield Finding("pair", f"{first}&{second}{error}", None, str(op))
        paired_ops |= {first, second}


def _order(schedule: Schedule) -> Iterator[Finding]:
    """Check that the programs and the transfers between them have no cycle."""
    dependencies = dependencies_of(schedule)
    blocked = set(dependencies.blocked.tolist())
    if not blocked:
        return
    predecessors = dependencies.predecessors()
    rank_of = dependencies.ops.rank.tolist()
    first_blocked: dict[int, int] = {}
    # Of each rank only its first: the ops behind it wait for it.
    for row in sorted(blocked):
        first_blocked.setdefault(rank_of[row], row)
    for rank, row in first_blocked.items():
        op = schedule.ops[row]
        blockers = [
            (rank_of[predecessor], schedule.ops[predecessor])
            for predecessor in predecessors[row]
            if predecessor in blocked
        ]
        for blocking_rank, blocking_op in dict.fromkeys(blockers):
            yield Finding(
                "no cycle",
                f"rank {rank} cannot start {op}: it needs {blocking_op} on rank {blocking_rank}",
                rank,
                str(op),
            )


def _updates(schedule: Schedule) -> Iterator[Finding]:
    """Check the U ops of every copy of every stage (see `_updates_of_copy`)."""
    update_count = Counter(
        (rank, op.stage)
        for rank, program in enumerate(schedule.programs)
        for op in program
        if op.kind is Kind.U
    )
    for rank, program in enumerate(schedule.programs):
        for stage in schedule.stages_of_rank[rank]:
            ops = [op for op in program if op.stage == stage]
            yield from _updates_of_copy(schedule, rank, stage, ops, update_count)


def _updates_of_copy(
    schedule: Schedule,
    rank: int,
    stage: int,
    ops: Sequence[Op],
    update_count: Mapping[tuple[int, int], int],
) -> Iterator[Finding]:
    """Check the U ops of a stage on one of its ranks.

    They come after its gradients, and are as many as on the other ranks (with waves, one may be
    missing). Versions count 1, 2, 3 …, in a synchronous schedule only 1.

    Args:
        schedule: the schedule.
        rank, stage: the copy.
        ops: the ops of the stage on this rank, in order.
        update_count: number of U ops by (rank, stage).
    """
    finding = partial(Finding, "update", rank=rank)
    versions = [op.micro_batch for op in ops if op.kind is Kind.U]
    if not versions:
        yield finding(
            f"stage {stage} has no U on rank {rank}: its weights would never change",
            op=f"{stage}U1",
        )
        return
    waves = schedule.stream is not None and schedule.stream.waves is not None
    copies = schedule.ranks_of_stage[stage]
    other_rank = max(copies, key=lambda copy: update_count[copy, stage])
    if len(versions) + waves < update_count[other_rank, stage]:
        yield finding(
            f"stage {stage} has {update_count[other_rank, stage]} U on rank {other_rank}, but "
            f"{len(versions)} on rank {rank}: its copies "
            f"{'take batches in turn' if waves else 'synchronise at every U'}",
            op=f"{stage}U{len(versions) + 1}",
        )
    wrong = next((n for n, version in enumerate(versions, start=1) if version != n), None)
    if wrong is not None:
        op = f"{stage}U{versions[wrong - 1]}"
        yield finding(
            f"{op} on rank {rank} is update {wrong} of stage {stage}: versions count 1, 2, 3 …",
            op=op,
        )
    if schedule.synchronous and len(versions) > 1:
        yield finding(
            f"stage {stage} updates {len(versions)} times on rank {rank}, a synchronous "
            "schedule once",
            op=f"{stage}U{versions[1]}",
        )
    if ops[-1].kind is not Kind.U:
        yield finding(
            f"{ops[-1]} on rank {rank} comes after the last U of stage {stage}: "
            "its gradient would be lost",
            op=str(ops[-1]),
        )


def _over_limit(schedule: Schedule, rank_peaks: tuple[float, ...], limit: int) -> Iterator[Finding]:
    """Report every rank that holds more micro-batches than the limit.

    Each with the op that first exceeds it; the rank with the highest peak comes first.
    """
    arrays = op_arrays(schedule)
    for rank in sorted(range(schedule.ranks), key=lambda rank: -rank_peaks[rank]):
        rows = slice(arrays.first[rank], arrays.first[rank + 1])
        in_flight = np.cumsum(arrays.in_flight_change[rows])
        over = np.flatnonzero(in_flight > limit + _TOLERANCE)
        if len(over):
            op = schedule.programs[rank][over[0]]
            yield Finding(
                "in flight",
                f"rank {rank} holds {rank_peaks[rank]} micro-batches in flight, over the limit "
                f"of {limit}, which {op} is the first to exceed",
                rank,
                str(op),
            )
